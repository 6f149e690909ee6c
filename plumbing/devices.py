"""What a device can compute, and how: bfloat16, kernels, communicators, what fills its memory."""

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.attention
from torch import Tensor


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a device is a GPU that multiplies in bfloat16. NVIDIA's do from compute
    capability 8.0 on. A T4 (7.5) or V100 (7.0) only emulates it, and has no kernel of attention."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def has_triton(device: torch.device) -> bool:
    """Return whether torch.compile can write kernels for a device: with Triton, which is not in
    every build of torch, for GPUs from compute capability 7.0 on."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (7, 0)


def use_flash_attention_3(device: torch.device) -> bool:
    """Let FlashAttention 3 compute attention if its package is installed and the GPU is a Hopper.
    Return whether it does. Otherwise FlashAttention 2 computes that of packed documents."""
    is_nvidia = device.type == "cuda" and not torch.version.hip
    is_hopper = is_nvidia and torch.cuda.get_device_capability(device)[0] == 9
    uses_it = is_hopper and importlib.util.find_spec("flash_attn_interface") is not None
    if uses_it:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    return uses_it


def use_gpu_in_thread(gpu: int) -> None:
    """Let the calling thread use this GPU, with a stream of its own. On the common stream, its
    copies from the GPU would wait for the kernels of training."""
    torch.cuda.set_device(gpu)
    torch.cuda.set_stream(torch.cuda.Stream())


def connect(
    groups: Iterable[dist.ProcessGroup | None], device: torch.device, ordered: bool
) -> None:
    """Let NCCL connect all ranks, and those of each group, now and in the same order everywhere.
    Otherwise it connects at the first call in a group, and the first step seems to hang.

    If `ordered`, a GPU runs its calls in the order in which its process started them, also those of
    different groups. If ranks ran them in different orders, they could wait for each other."""
    if ordered:
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")  # read when NCCL first connects
    for group in (dist.group.WORLD, *filter(None, groups)):
        if dist.get_world_size(group) > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def take_gpu(device: torch.device) -> None:
    """Let this process use a GPU. Record its last allocations, with the lines of Python that made
    them, for memory_snapshot: each takes 2 microseconds more."""
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # less memory is lost to fragmentation
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch.cuda.set_device(device)
    torch.cuda.memory._record_memory_history(max_entries=50_000, stacks="python")


def memory_snapshot() -> str:
    """Write what the GPU's memory holds to a file, and return how to look at it; "" if there is no
    GPU, or the file cannot be written."""
    if not torch.cuda.is_available():
        return ""
    file = os.path.join(tempfile.gettempdir(), f"memory-{os.getpid()}.pickle")
    with contextlib.suppress(OSError, RuntimeError):
        torch.cuda.memory._dump_snapshot(file)
        return f"; https://pytorch.org/memory_viz shows what held the memory: open {file} there"
    return ""


def cast_by_autocast(*tensors: Tensor) -> list[Tensor]:
    """Return tensors in autocast's dtype if it is on, as torch's own matrix products get them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return [*tensors]
    return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]


def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype for sums of losses and tokens: float64, or float32 on Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64
