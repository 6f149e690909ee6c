"""Keep activations in CPU memory between forward and backward: --offload-activations.

    forward     block 0 │ block 1 │ block 2          what a GPU computes
                        │ 0 to CPU│ 1 to CPU         copies beside it
    backward    block 2 │ block 1 │ block 0
                1 back  │ 0 back  │                  copies, one block ahead

For each tensor that an operator saves for backward, PyTorch calls a hook, `pack`, and keeps what it
returns; before backward uses it, another hook, `unpack`, turns that into the tensor again. Between
the two a tensor is copied to the CPU when its block has computed, and freed on the GPU when the
next block has computed. Copies run on a CUDA stream of their own, to and from pinned memory, which
a GPU can read and write without the CPU's help.

After forward the GPU holds what one block has saved, where otherwise it holds what all L have; in
backward it holds two blocks' share. What is saved outside of blocks stays: inputs and outputs of
the last norm, the loss. In each microbatch, what the blocks save is copied once to the CPU and once
back. Copies hide beside computation if the link to the CPU is fast enough. With full checkpointing
a block saves D w bytes a token (letters as in parallel.py) and computes about 100 D^2 FLOPs for it,
so that wide models hide them easily; without checkpointing it saves ten to twenty times as much. On
a CPU the copies are made as well, and save no memory. Compiled without checkpointing, a block also
copies what autocast made of its weights, which cannot be told from activations.
Use with --checkpointing full when sequences are so long that even the inputs of blocks do not fit.
Avoid when they fit.

torch's save_on_cpu has the same two hooks, but copies on the stream that computes, and weights too.
Left out against Megatron's offloading is a choice of layers: if the link is too slow for all that a
block saves, the GPU waits.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from model import Llama
from plumbing.shards import to_local
from techniques.technique import Technique

MIN_BYTES = 1 << 16  # smaller tensors stay: what they free is not worth a copy


@dataclass
class Saved:
    """The memory of a saved tensor and of its views: on the GPU, on the CPU, or on both."""

    on_gpu: Tensor | None  # [n]
    version: int  # its number of changes in place when it was saved
    device: torch.device  # the GPU
    on_cpu: Tensor | None = None

    def check(self) -> None:
        """Raise RuntimeError if it was changed since it was saved, as PyTorch does by itself."""
        if self.on_gpu is not None and self.on_gpu._version != self.version:
            raise RuntimeError("a block changed in place a tensor that it had saved for backward")


@dataclass
class SavedByBlock:
    """What one forward of a block has saved, until backward fetches it."""

    to: str  # device of the copies: cpu; or meta, for a model without contents
    stream: torch.cuda.Stream | None  # of the copies; None on a CPU
    previous: "SavedByBlock | None"  # of the block before, in the same forward of the model
    tensors: list[Saved] = field(default_factory=list)
    copied: torch.cuda.Event | None = None  # comes after the copies that were started last

    def to_cpu(self) -> None:
        """Start to copy everything to the CPU."""
        with self._copying():
            for saved in self.tensors:
                pin = self.stream is not None
                saved.on_cpu = torch.empty_like(saved.on_gpu, device=self.to, pin_memory=pin)
                saved.on_cpu.copy_(saved.on_gpu, non_blocking=True)

    def free(self) -> None:
        """Free on the GPU what has been copied to the CPU."""
        self._wait()
        for saved in self.tensors:
            saved.check()
            saved.on_gpu = None

    def fetch(self) -> None:
        """Start to copy back what is no longer on the GPU. Afterwards only operators of backward
        refer to these tensors, so that each is freed after its last use."""
        for saved in self.tensors:
            saved.check()
        missing = [saved for saved in self.tensors if saved.on_gpu is None]
        self.tensors = []
        # Allocated on the stream that computes. The stream of the copies then waits until whatever
        # used this memory before is done.
        for saved in missing:
            saved.on_gpu = torch.empty_like(saved.on_cpu, device=saved.device)
        if missing:
            with self._copying():
                for saved in missing:
                    saved.on_gpu.copy_(saved.on_cpu, non_blocking=True)

    def use(self, saved: Saved) -> Tensor:
        """Return to an operator of backward what it has saved. The first call for a block also
        fetches what the block before it has saved, which is needed next."""
        self.fetch()
        if self.previous:
            self.previous.fetch()
            self.previous = None
        self._wait()
        return saved.on_gpu

    @contextlib.contextmanager
    def _copying(self):
        """Within this context copies run on their own stream, after what the GPU computes now."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        self.copied = self.stream.record_event()

    def _wait(self) -> None:
        """Let what the GPU computes next wait for the copies that were started last."""
        if self.copied:
            torch.cuda.current_stream().wait_event(self.copied)


def offload_activations(model: Llama, world) -> None:
    """Let each block offload what it saves for backward.

    Hooks of a module run around its forward, not around what checkpointing runs again: that is not
    offloaded."""
    to = "meta" if world.device.type == "meta" else "cpu"
    stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
    latest: SavedByBlock | None = None  # of the block that has computed last
    recording = contextlib.ExitStack()

    def before(block: nn.Module, inputs: tuple) -> None:
        nonlocal latest
        if torch.is_grad_enabled():
            previous = None if block is model.layers["0"] else latest
            current = SavedByBlock(to, stream, previous)
            recording.enter_context(recorded(block, inputs, current))
            if latest:  # is freed before the copies start: the last entered ends first
                recording.callback(latest.free)
            latest = current

    for block in model.layers.values():
        block.register_forward_pre_hook(before)
        block.register_forward_hook(lambda *_: recording.close(), always_call=True)


@contextlib.contextmanager
def recorded(block: nn.Module, inputs: tuple, current: SavedByBlock) -> Iterator[None]:
    """Within this context record what a block saves for backward, and at its end start to copy it.
    `inputs` are the block's: x, cos, sin, mask, cache."""
    parameters = [to_local(parameter) for parameter in block.parameters()]
    # FSDP frees parameters itself; cos, sin and mask belong to all blocks.
    kept_on_gpu = [*parameters, *(value for value in inputs[1:] if isinstance(value, Tensor))]
    kept_storages = {tensor.untyped_storage()._cdata for tensor in kept_on_gpu}
    # Of a module that FSDP gathers by itself, as experts under --ep, weights are not yet there.
    later = [m for m in block.modules() if isinstance(m, FSDPModule) and m is not block]
    transposed_shapes = {p.shape[::-1] for p in parameters if p.ndim == 2}
    known: dict[tuple, Saved] = {}  # so that memory that several operators save is copied once

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        local = to_local(tensor.detach())  # without the graph, which would refer to itself
        if isinstance(local, AsyncCollectiveTensor):  # an all-gather under way
            local = local.wait()
        storage = local.untyped_storage()
        gathered = (to_local(p) for module in later for p in module.parameters())
        kept_storages.update(p.untyped_storage()._cdata for p in gathered)
        # A weight that autocast has cast is saved transposed, and belongs to all microbatches.
        is_weight = local.shape in transposed_shapes and local.stride(0) == 1
        if storage._cdata in kept_storages or is_weight or local.nbytes < MIN_BYTES:
            return tensor
        key = storage._cdata, local.dtype
        if key not in known:
            all_of_it = local.as_strided((storage.nbytes() // local.itemsize,), (1,), 0)
            known[key] = Saved(all_of_it, local._version, local.device)
            current.tensors.append(known[key])
        saved, view = known[key], (local.shape, local.stride(), local.storage_offset())
        if not isinstance(tensor, DTensor):
            return lambda: current.use(saved).as_strided(*view)
        spec = dict(run_check=False, shape=tensor.shape, stride=tensor.stride())
        mesh, placements = tensor.device_mesh, tensor.placements
        return lambda: DTensor.from_local(
            current.use(saved).as_strided(*view), mesh, placements, **spec
        )

    def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    current.to_cpu()


def refuses(work) -> str:
    if work.parallel.pp > 1:
        return "--pp does not combine with --offload-activations: give one of them"
    if (kind := work.parallel.checkpointing) in ("none", "full"):
        return ""
    return (
        f"--offload-activations does not see what --checkpointing {kind} saves: use "
        f"--checkpointing full or none"
    )


def suggests(facts) -> str:
    is_used = facts.parallel.offload_activations
    note = facts.fit_note(offload_activations=False) if is_used else ""
    return f"without --offload-activations nothing is copied, and a step {note}" if note else ""


TECHNIQUE = Technique("offload_activations", offload_activations, refuses, suggests=suggests)
