"""Take training steps on a GPU that does not exist. Arguments: names of cases. The last line of its
output is JSON of the results.

Tensors are fake: they have a device, a dtype and a shape, and no contents. Some C++ tells torch's
CPU build that there is a CUDA device; without that, backward would abort. Where devices or dtypes
do not fit together, torch raises an error as it would on a GPU. The result of a case is that error,
or for each part of a step the lines at which the host waits for the GPU, its attention kernels, and
the dtypes of all results.
"""

import ctypes
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import traceback
import zlib
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parent.parent.parent
DEVICE_THAT_DOES_NOTHING = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  const c10::Device gpu{c10::DeviceType::CUDA, 0};
  c10::Stream stream() const noexcept { return c10::Stream(c10::Stream::DEFAULT, gpu); }
  c10::Device getDevice() const override { return gpu; }
  c10::Device exchangeDevice(c10::Device) const override { return gpu; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
};
namespace c10 {
C10_REGISTER_GUARD_IMPL(CUDA, ::Guard)
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
};
namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", ::Hooks)
}
"""


def load_device() -> None:
    """Build the C++ once for each torch, and load it: before torch, which asks only once."""
    torch_dir = Path(sysconfig.get_paths()["purelib"]) / "torch"
    lib, made = torch_dir / "lib", (torch_dir / "version.py").stat().st_mtime_ns
    key = f"{os.getuid()}-{made}-{zlib.crc32(f'{lib} {DEVICE_THAT_DOES_NOTHING}'.encode())}"
    library = Path(tempfile.gettempdir()) / f"flatllama-fake-cuda-{key}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}")
        flags = f"-O0 -std=c++20 -shared -fPIC -I{torch_dir}/include -L{lib} -Wl,-rpath,{lib}"
        command = ["g++", "-x", "c++", "-", *flags.split(), "-ltorch_cpu", "-lc10", "-o", part]
        subprocess.run(command, input=DEVICE_THAT_DOES_NOTHING, text=True, check=True)
        part.rename(library)
    ctypes.CDLL(str(library))


load_device()
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.attention.varlen as varlen
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE, LOW = torch.device("cuda", 0), torch.bfloat16
GPU = {"is old": False}  # of a case: it has neither bfloat16 nor Triton, such as a P100
FAKE = FakeTensorMode(allow_non_fake_inputs=True)

# ------------------------------------------------------------- what torch asks of its CUDA device


class Nothing(MagicMock):
    """A stream or an event of the device."""

    def __init__(self, *_, **__):
        super().__init__()


def in_fake_mode(function):
    """Let a function make fake tensors alone."""

    def run(*args, **options):
        with FAKE:
            return function(*args, **options)

    return run


def made_fake(constructor):
    """Let a function that makes tensors on the device make fake ones, also outside of FAKE."""
    fake = in_fake_mode(constructor)

    def make(*args, device=None, **options):
        on_gpu = device is not None and torch.device(device).type == DEVICE.type
        return (fake if on_gpu else constructor)(*args, device=device, **options)

    return make


def pretend() -> None:
    cuda = torch.cuda
    torch.autograd.set_multithreading_enabled(False)  # a thread for the device would look for it
    torch.utils._device._device_constructors()  # keeps the constructors that are replaced below
    torch.empty, torch.zeros = made_fake(torch.empty), made_fake(torch.zeros)
    cuda.is_bf16_supported = lambda *_, **__: not GPU["is old"]
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.current_device = lambda: 0
    cuda.set_device = cuda.synchronize = lambda *_: None
    cuda.Stream = cuda.Event = cuda.current_stream = cuda.stream = Nothing
    cuda.amp.common.amp_definitely_not_available = lambda: False
    FakeTensor.record_stream = lambda *_: None
    F.scaled_dot_product_attention = attention_kernel
    varlen.varlen_attn = partial(of_low_precision, varlen.varlen_attn)
    torch.Tensor.tolist = FakeTensor.tolist = tolist


ATTENTION: set[str] = set()  # the kernels that ran
attention_on_cpu = F.scaled_dot_product_attention


def attention_kernel(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
    """Attention by the kernel that a GPU takes: choosing it would read the device's properties."""
    if q.device.type != DEVICE.type:
        options = dict(is_causal=is_causal, enable_gqa=enable_gqa)
        return attention_on_cpu(q, k, v, attn_mask, **options)
    kernel = "flash" if q.dtype == LOW and attn_mask is None else "efficient"
    ATTENTION.add(kernel)
    if kernel == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    assert q.shape[1] == k.shape[1], "this kernel needs a key/value head for each query head"
    if attn_mask is not None:
        attn_mask = attn_mask.to(q.dtype).expand(*q.shape[:3], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, attn_mask, True, 0.0, is_causal)[0]


def of_low_precision(kernel, q, k, v, *rest, **options):
    assert q.dtype == k.dtype == v.dtype == LOW, "this kernel needs bfloat16"
    return kernel(q, k, v, *rest, **options)


# ---------------------------------------------------------------------------- waits of the host

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim")
REAL_TOLIST = torch.Tensor.tolist


def where() -> str:
    """Return the innermost line of the project's own, as file:line."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and not {"tests", "site-packages"} & set(path.parts):
            return f"{path.name}:{frame.lineno}"
    return "?"


class Waits(TorchDispatchMode):
    """Notes operators for which the host waits for the GPU, and the lines that run them; and the
    dtypes of all results on the GPU."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, op._opname
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        if name in WAITING and devices - {"cpu", "meta"}:
            self.note(name)
            if name == "_local_scalar_dense":
                return 1.0 if args[0].is_floating_point() else 1
        to = kwargs.get("device")
        if name == "_to_copy" and to is not None:
            devices.add(torch.device(to).type)
        blocks = not kwargs.get("non_blocking") and not (name == "copy_" and any(args[2:]))
        if name in ("copy_", "_to_copy") and {"cpu", "cuda"} <= devices and blocks:
            self.note("a blocking copy")
        result = op(*args, **kwargs)
        results = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self.dtypes |= {tensor.dtype for tensor in results if tensor.device.type != "cpu"}
        return result

    def note(self, what: str) -> None:
        self.found.append(f"{what} at {where()}")

    def take(self) -> list[str]:
        """Return what was found since the last call."""
        found, self.found = self.found, []
        return found


WAITS = Waits()


def tolist(tensor: torch.Tensor) -> list:
    if not isinstance(tensor, FakeTensor):
        return REAL_TOLIST(tensor)
    if tensor.device.type != "cpu":
        WAITS.note("tolist")
    return np.ones(tensor.shape).tolist()


# ------------------------------------------------------------------------------------ the cases

pretend()
from models.mixtral import MixtralConfig
from models.qwen3 import Qwen3Config
from plumbing import devices

devices.has_triton = lambda device: device.type == "cuda" and not GPU["is old"]
import parallel as parallel_py
from config import ParallelConfig
from lora import LoRA
from model import LlamaConfig
from parallel import parallelize, with_mesh
from perf.instruments import build_on_meta
from plumbing.processes import Process
from plumbing.shards import allocate
from runs.answers import Trace
from techniques import cuda_graph, decoding
from techniques.context_parallel import share_sequences
from techniques.optimizers import make_optimizer
from text.batch import Batch
from train import accumulate, update

CONFIG = LlamaConfig(256, 2, 4, 2, 512, vocab_size=1024)  # widths that 8 and 4 bits take
FSDP, TP = dict(dp="fsdp", shard=2), dict(dp="fsdp", tp=2)
PP, CP = dict(dp="fsdp", pp=2), dict(dp="fsdp", shard=2, cp=2)
ADAPTERS, DORA = LoRA(8), LoRA(8, dora=True)
CASES = {  # fields of ParallelConfig, in bfloat16 if not said; arguments of take_step
    "float32": dict(dtype=torch.float32),
    "float32 packed": dict(dtype=torch.float32, packed=True),
    "qk norm": dict(kind=Qwen3Config),
    "packed": dict(packed=True, kind=Qwen3Config, checkpointing="selective"),
    "experts": dict(kind=MixtralConfig, packed=True),
    "muon": dict(optimizer="muon"),
    "full offloaded": dict(checkpointing="full", offload_activations=True, packed=True),
    "fsdp": FSDP | dict(packed=True),
    "fsdp all": FSDP | dict(reshard="all", checkpointing="full", offload_activations=True),
    "fsdp muon": FSDP | dict(optimizer="muon"),
    "hsdp": dict(dp="hsdp", shard=2, replicate=2),
    "zero1": dict(dp="zero1", replicate=4, moments="bfloat16"),
    "zero1 muon": dict(dp="zero1", replicate=4, optimizer="muon"),
    "tp": TP | dict(packed=True),
    "async tp full": TP | dict(async_tp=True, checkpointing="full"),
    "cp packed": CP | dict(packed=True),
    "cp float32": CP | dict(dtype=torch.float32),
    "pp": PP | dict(packed=True),
    "pp gpipe": PP | dict(schedule="gpipe", rank=1),
    "pp interleaved": PP | dict(schedule="interleaved", stages_per_rank=2),
    "pp tp fsdp muon": PP | dict(tp=2, shard=2, optimizer="muon"),
    "tensorwise": dict(float8="tensorwise"),
    "tensorwise async tp": TP | dict(float8="tensorwise", async_tp=True),
    "rowwise tp": TP | dict(float8="rowwise"),
    "lora fsdp": FSDP | dict(lora=LoRA(8, dropout=0.1), reshard="adapters"),
    "dora fsdp tp": TP | dict(shard=2, lora=DORA),
    "nf4 dora full": dict(lora=DORA, bits=4, checkpointing="full"),
    "nf4 fsdp tp": TP | dict(shard=2, lora=ADAPTERS, bits=4),
    "old fsdp muon": FSDP | dict(dtype=torch.float32, optimizer="muon"),
    "old moments": dict(dtype=torch.float32, moments="bfloat16"),
    "old nf4": dict(dtype=torch.float32, lora=ADAPTERS, bits=4),
}


WRITERS = {  # arguments of write_tokens
    "writes": {},
    "writes float32": {"dtype": torch.float32},
    "writes in 4 bits": {"bits": 4},
}


def take_step(lora=None, bits=16, packed=False, rank=0, kind=LlamaConfig, **options) -> dict:
    """Take two training steps with these fields of ParallelConfig. Return the waits of the second's
    forward and backward, and of its update, the kernels of attention, and the dtypes."""
    parallel = ParallelConfig(**dict(dtype=LOW) | options)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.size)
    world = with_mesh(Process(rank, parallel.size, 0, parallel.size, DEVICE), parallel)
    layers = parallel.pp * parallel.stages_per_rank + 1
    model = build_on_meta(kind(**vars(CONFIG) | dict(n_layers=layers)), lora, base_bits=bits)
    runner = parallelize(model, world, lambda model: None)
    optimizer = make_optimizer(model, world)
    tokens = torch.zeros(4, 96, dtype=torch.int64)
    positions = torch.cat([torch.arange(n) for n in (32, 16, 48)]).repeat(4, 1)
    batch = Batch(tokens, tokens.clone(), positions if packed else None, 1)
    batch = share_sequences(batch, world)
    with FAKE, WAITS:
        batch = batch.to(DEVICE)
        WAITS.dtypes.clear()
        for step in (1, 2):
            WAITS.take()
            ATTENTION.clear()
            loss = accumulate(runner, batch, 2 if parallel.pp == 1 else 1, world)
            passes = WAITS.take()
            update(optimizer, loss, batch.count(), [0, 0, 0], 1.0, world, step)
    return {
        "passes": passes,
        "update": WAITS.take(),
        "attention": sorted(ATTENTION),
        "dtype": str(parallel.dtype),
        "dtypes": sorted(map(str, WAITS.dtypes)),
        "by lengths": parallel.dtype == LOW and (packed or parallel.cp > 1),
    }


def write_tokens(dtype=LOW, bits=16, **sizes) -> dict:
    """Continue three prompts by 10 tokens. Return the waits after the prompts have been read, how
    often a step was recorded, the kernels of attention, and the dtypes."""
    config = Qwen3Config(**vars(CONFIG) | sizes)
    model = build_on_meta(config, LoRA(targets=()), base_bits=bits).to(dtype)
    in_fake_mode(allocate)(model, DEVICE)
    recorded = []
    cuda_graph.record = lambda step: recorded.append(step) or step
    prompts = [[1, 2, 3], [4, 5], [1, 2, 3]]
    with FAKE, WAITS:
        trace = Trace(model, 10, len(prompts))
        tokens = decoding.stream(model, prompts, 10, top_p=0.9, trace=trace)
        next(tokens)
        WAITS.take()
        WAITS.dtypes.clear()
        ATTENTION.clear()
        written = len(list(tokens))
    return {
        "written": written,
        "waits": WAITS.take(),
        "recorded": len(recorded),
        "attention": sorted(ATTENTION),
        "dtypes": sorted(map(str, WAITS.dtypes)),
    }


def main() -> None:
    parallel_py.allocate = in_fake_mode(parallel_py.allocate)
    torch.compile = lambda function, **_: function  # AdamW's kernel and NF4's: eager here
    results = {}
    for name in sys.argv[1:]:
        GPU["is old"] = name.startswith("old")
        try:
            writes = name in WRITERS
            results[name] = write_tokens(**WRITERS[name]) if writes else take_step(**CASES[name])
        except Exception as error:
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
