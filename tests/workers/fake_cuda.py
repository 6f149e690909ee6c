"""Take training steps on a GPU that does not exist. Arguments: names of cases or of the functions
in OTHERS. The last line of its output is JSON of the results.

Tensors are fake: they have a device, a dtype and a shape, and no contents. Some C++ tells torch's
CPU build that there is a CUDA device or, for cases named apple, an Apple GPU; without that,
backward would abort. Where devices or dtypes do not fit together, torch raises an error as it would
on a GPU. The result of a case is that error, or for each part of a step the lines at which the host
waits for the GPU, its attention kernels, and the dtypes of all results.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import traceback
import zlib
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DEVICE_THAT_DOES_NOTHING = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

template <c10::DeviceType kind>
struct Guard final : c10::impl::NoOpDeviceGuardImpl<kind> {
  const c10::Device gpu{kind, 0};
  c10::Stream stream() const noexcept { return c10::Stream(c10::Stream::DEFAULT, gpu); }
  c10::Device getDevice() const override { return gpu; }
  c10::Device exchangeDevice(c10::Device) const override { return gpu; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
namespace c10 {
C10_REGISTER_GUARD_IMPL(CUDA, ::Guard<DeviceType::CUDA>)
C10_REGISTER_GUARD_IMPL(MPS, ::Guard<DeviceType::MPS>)
}

bool apple = false;  // which of the two there is
extern "C" void use_apple(bool yes) { apple = yes; }

struct AppleHooks final : at::MPSHooksInterface {
  void init() const override {}
  bool hasMPS() const override { return apple; }
  bool isBuilt() const override { return apple; }
  bool isAvailable() const override { return apple; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return !apple; }
  bool isBuilt() const override { return !apple; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", ::Hooks)
C10_REGISTER_TYPED_CLASS(MPSHooksRegistry, "MPSHooks", ::AppleHooks)
}
"""


def load_device() -> None:
    """Build the C++ once for each torch, and load it: before torch, which asks only once."""
    torch_dir = Path(sysconfig.get_paths()["purelib"]) / "torch"
    lib, made = torch_dir / "lib", (torch_dir / "version.py").stat().st_mtime_ns
    key = f"{os.getuid()}-{made}-{zlib.crc32(DEVICE_THAT_DOES_NOTHING.encode())}"
    library = Path(tempfile.gettempdir()) / f"flatllama-fake-cuda-{key}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}")
        flags = f"-O0 -std=c++20 -shared -fPIC -I{torch_dir}/include -L{lib} -Wl,-rpath,{lib}"
        command = ["g++", "-x", "c++", "-", *flags.split(), "-ltorch_cpu", "-lc10", "-o", part]
        subprocess.run(command, input=DEVICE_THAT_DOES_NOTHING, text=True, check=True)
        part.rename(library)
    ctypes.CDLL(str(library)).use_apple("apple" in sys.argv)


load_device()
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
import torch.nn.attention.varlen as varlen
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE, LOW = torch.device("cuda", 0), torch.bfloat16
APPLE = torch.device("mps", 0)
MODERN = {"bfloat16": True, "triton": True}
GPU = dict(MODERN)  # what the device of a case can compute
FAKE = FakeTensorMode(allow_non_fake_inputs=True)

# ------------------------------------------------------------- what torch asks of its CUDA device


class Nothing:
    """A stream or an event of the device."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_: Nothing()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def made_fake(constructor):
    """Let a function that makes tensors on the device make fake ones, also outside of FAKE."""

    def make(*args, device=None, **options):
        on_gpu = device is not None and torch.device(device).type in ("cuda", "mps")
        with FAKE if on_gpu else contextlib.nullcontext():
            return constructor(*args, device=device, **options)

    return make


def pretend() -> None:
    cuda = torch.cuda
    torch.autograd.set_multithreading_enabled(False)  # a thread for the device would look for it
    torch.utils._device._device_constructors()  # keeps the constructors that are replaced below
    torch.empty, torch.zeros = made_fake(torch.empty), made_fake(torch.zeros)
    cuda.is_bf16_supported = lambda *_, **__: GPU["bfloat16"]
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.current_device = lambda: 0
    cuda.set_device = cuda.synchronize = lambda *_: None
    cuda.Stream = cuda.Event = Nothing
    cuda.current_stream, cuda.stream = lambda *_: Nothing(), lambda *_: contextlib.nullcontext()
    cuda.amp.common.amp_definitely_not_available = lambda: False
    FakeTensor.record_stream = lambda *_: None
    F.scaled_dot_product_attention = attention_kernel
    varlen.varlen_attn = partial(of_low_precision, varlen.varlen_attn)
    torch.Tensor.tolist = FakeTensor.tolist = tolist


ATTENTION = Counter()
attention_on_cpu = F.scaled_dot_product_attention


def attention_kernel(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
    """Attention by the kernel that a GPU takes: choosing it would read the device's properties."""
    if q.is_mps:
        ATTENTION["apple"] += 1
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v
    if not q.is_cuda:
        options = dict(is_causal=is_causal, enable_gqa=enable_gqa)
        return attention_on_cpu(q, k, v, attn_mask, **options)
    plans = attn_mask is not None and torch.backends.cuda.cudnn_sdp_enabled()
    flash = q.dtype == LOW and attn_mask is None
    math = q.dtype == torch.float64
    ATTENTION["cudnn" if plans else "flash" if flash else "math" if math else "efficient"] += 1
    if flash:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    if math:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v
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
    lines = [
        frame
        for frame in traceback.extract_stack()
        if "/tests/" not in frame.filename and "site-packages" not in frame.filename
        and Path(frame.filename).suffix == ".py" and "/lib/python" not in frame.filename
    ]  # fmt: skip
    return f"{Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else "?"


class Waits(TorchDispatchMode):
    """Notes operators for which the host waits for the GPU, and the lines that run them."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []
        self.dtypes: set[torch.dtype] = set()  # of all results on the GPU

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


WAITS = Waits()


def tolist(tensor: torch.Tensor) -> list:
    if not isinstance(tensor, FakeTensor):
        return REAL_TOLIST(tensor)
    if tensor.device.type != "cpu":
        WAITS.note("tolist")
    return ones(*tensor.shape)


def ones(*shape: int) -> list | float:
    return [ones(*shape[1:]) for _ in range(shape[0])] if shape else 1.0


# ------------------------------------------------------------------------------------ the cases

pretend()
from plumbing import devices

devices.has_triton = lambda device: device.type == "cuda" and GPU["triton"]
import parallel as parallel_py
from config import ParallelConfig
from lora import LoRA
from model import KVCache, LlamaConfig, Vocabulary
from parallel import parallelize, with_mesh
from perf.instruments import build_on_meta
from plumbing.processes import Process
from techniques.chunked_loss import chunked_loss
from techniques.context_parallel import share_sequences
from techniques.optimizers import make_optimizer
from text.batch import Batch
from train import accumulate, update

CONFIG = LlamaConfig(256, 2, 4, 2, 512, vocab_size=1024)  # widths that 8 and 4 bits take
FSDP, TP = dict(dp="fsdp", shard=2), dict(dp="fsdp", tp=2)
PP, CP = dict(dp="fsdp", pp=2), dict(dp="fsdp", shard=2, cp=2)
ADAPTERS, DORA = LoRA(8), LoRA(8, dora=True)
OLD = dict(dtype=torch.float32, gpu=dict(bfloat16=False, triton=False))  # such as a P100
CASES = {  # fields of ParallelConfig, in bfloat16 if not said; arguments of take_step
    "float32": dict(dtype=torch.float32),
    "float64": dict(dtype=torch.float64),
    "autocast": dict(),
    "packed": dict(packed=True),
    "qk norm": dict(qk_norm=True),
    "qk norm packed": dict(packed=True, qk_norm=True),
    "selective packed": dict(packed=True, checkpointing="selective"),
    "float32 packed": dict(dtype=torch.float32, packed=True),
    "moments": dict(moments="bfloat16"),
    "muon": dict(optimizer="muon"),
    "offload activations": dict(offload_activations=True, packed=True),
    "offload activations full": dict(offload_activations=True, checkpointing="full"),
    "fsdp": FSDP | dict(packed=True),
    "fsdp all": FSDP | dict(reshard="all", checkpointing="full"),
    "fsdp muon": FSDP | dict(optimizer="muon"),
    "hsdp": dict(dp="hsdp", shard=2, replicate=2),
    "zero1": dict(dp="zero1", replicate=4),
    "zero1 muon": dict(dp="zero1", replicate=4, optimizer="muon"),
    "tp": TP | dict(packed=True),
    "async tp full": TP | dict(async_tp=True, checkpointing="full"),
    "cp": CP,
    "cp packed": CP | dict(packed=True),
    "cp float32": CP | dict(dtype=torch.float32),
    "pp": PP | dict(packed=True),
    "pp last": PP | dict(rank=1),
    "pp zero-bubble": PP | dict(schedule="zero-bubble"),
    "pp interleaved": PP | dict(schedule="interleaved", stages_per_rank=2),
    "pp tp fsdp muon": PP | dict(tp=2, shard=2, optimizer="muon"),
    "tensorwise": dict(float8="tensorwise"),
    "tensorwise tp": TP | dict(float8="tensorwise"),
    "rowwise tp": TP | dict(float8="rowwise"),
    "tensorwise async tp": TP | dict(float8="tensorwise", async_tp=True),
    "lora dropout": dict(lora=LoRA(8, dropout=0.1)),
    "lora fsdp": FSDP | dict(lora=ADAPTERS, reshard="adapters"),
    "lora tp": TP | dict(lora=ADAPTERS),
    "dora fsdp tp": TP | dict(shard=2, lora=DORA),
    "nf4 dora full": dict(lora=DORA, bits=4, checkpointing="full"),
    "nf4 fsdp": FSDP | dict(lora=ADAPTERS, bits=4),
    "nf4 tp": TP | dict(lora=ADAPTERS, bits=4),
    "old fsdp muon": OLD | FSDP | dict(optimizer="muon"),
    "old moments": OLD | dict(moments="bfloat16"),
    "old nf4": OLD | dict(lora=ADAPTERS, bits=4),
    "apple": dict(dtype=torch.float32, device=APPLE, packed=True, optimizer="muon"),
    "apple lora": dict(dtype=torch.float32, device=APPLE, lora=ADAPTERS),
}


def take_step(
    lora: LoRA | None = None,
    bits: int = 16,
    packed: bool = False,
    rank: int = 0,
    gpu: dict | None = None,
    device: torch.device = DEVICE,
    qk_norm: bool = False,
    **options,
) -> dict:
    """Take two training steps; return the waits of the second's forward and backward and of its
    update, and the kernels of attention."""
    GPU.update(gpu or {})
    parallel = ParallelConfig(**dict(dtype=LOW) | options)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.size)
    world = with_mesh(Process(rank, parallel.size, 0, parallel.size, device), parallel)
    layers = parallel.pp * parallel.stages_per_rank + 1
    model = build_on_meta(replace(CONFIG, n_layers=layers, qk_norm=qk_norm), lora, base_bits=bits)
    runner = parallelize(model, world, lambda model: None)
    optimizer = make_optimizer(model, parallel)
    tokens = torch.zeros(4, 96, dtype=torch.int64)
    positions = torch.cat([torch.arange(n) for n in (32, 16, 48)]).repeat(4, 1)
    batch = Batch(tokens, tokens.clone(), positions if packed else None, 1)
    batch = share_sequences(batch, world)
    with FAKE, WAITS:
        batch = batch.to(device)
        WAITS.dtypes.clear()
        for step in (1, 2):
            WAITS.found, found = [], {}
            ATTENTION.clear()
            loss = accumulate(runner, batch, 2 if parallel.pp == 1 else 1, world)
            found["passes"], WAITS.found = WAITS.found, []
            update(optimizer, loss, batch, 1.0, world, step)
            found["update"] = WAITS.found
    by_lengths = parallel.dtype == LOW and (packed or parallel.cp > 1)
    found |= {"dtype": str(parallel.dtype), "by lengths": by_lengths}
    found["dtypes"] = sorted(map(str, WAITS.dtypes))
    return found | {"attention": sorted(ATTENTION)}


def generate() -> dict:
    """Compute a prompt and a token after it with a cache; return the kernels of attention."""
    model = build_on_meta(CONFIG)
    model.compute_dtype = LOW
    with FAKE:
        model.to_empty(device=DEVICE)
        ATTENTION.clear()
        cache, positions = KVCache(), torch.arange(9, device=DEVICE)[None]
        with torch.no_grad():
            for new in (positions[:, :8], positions[:, 8:]):
                model(new, positions=new, cache=cache)
    return {"attention": sorted(ATTENTION)}


class Moved(TorchDispatchMode):
    """Counts the bytes that operators read and write, except products and views."""

    nbytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        is_view = any(argument.alias_info and not argument.alias_info.is_write
                      for argument in op._schema.arguments)  # fmt: skip
        if op.namespace == "aten" and not is_view and not op._opname.startswith(("mm", "empty")):
            for values in ((args, kwargs), result):  # what is changed in place is in both
                leaves = {id(leaf): leaf for leaf in tree_leaves(values)}.values()
                self.nbytes += sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
        return result


def loss() -> dict:
    """Return the bytes that the loss of 4,096 tokens of Llama 3 8B and its gradients move."""
    with FAKE:
        empty = partial(torch.empty, device=DEVICE, requires_grad=True)
        hidden, weight = empty(4096, 4096), empty(128_256, 4096)
        targets = torch.zeros(4096, dtype=torch.int64, device=DEVICE)
        vocabulary = Vocabulary(128_256)
        with Moved() as moved, torch.autocast("cuda", LOW):
            chunked_loss(hidden, weight, targets, vocabulary).backward()
    return {"bytes": moved.nbytes}


OTHERS = {"generate": generate, "loss": loss}


def main() -> None:
    allocate = parallel_py.allocate

    def allocate_fake(model, device) -> None:
        with FAKE:
            allocate(model, device)

    parallel_py.allocate = allocate_fake
    torch.compile = lambda function, **_: function  # AdamW's kernel and NF4's: eager here
    results = {}
    for name in sys.argv[1:]:
        GPU.update(MODERN)
        try:
            results[name] = OTHERS[name]() if name in OTHERS else take_step(**CASES[name])
        except Exception as error:
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
