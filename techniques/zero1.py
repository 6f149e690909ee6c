"""ZeRO-1: DDP whose AdamW state and summed gradients are sharded (Rajbhandari et al. 2020,
arXiv:1910.02054).

    rank 0  [ weights ] [ 1st half: gradients, AdamW ]      sequences 0..b-1
    rank 1  [ weights ] [ 2nd half: gradients, AdamW ]      sequences b..2b-1

Each rank updates one slice of every parameter (along dimension 0, like FSDP) with the same slice of
the mean gradient, and sends the new slice to the others. Whole gradients exist until the last
microbatch's backward has reduce-scattered them.
Communication over replicate, in a step: a reduce-scatter of P g bytes while the last backward
computes, and an all-gather of P g bytes after the update, both in one call for each parameter.
Together they send as much as DDP's all-reduce.
Use when DDP nearly fits: AdamW's state takes 8 P / replicate bytes instead of 8 P. Avoid when
DDP fits: the all-gather overlaps with nothing, and many small calls are slow.
DeepSpeed's stage 1 also flattens parameters and gradients into a few large buckets, and sends
these. That is left out here.
"""

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from model import Llama
from plumbing.shards import chunk_of
from techniques.technique import Technique


class ZeRO1(nn.Module):
    """A model whose optimizer updates this rank's slice of each parameter. Gradients are
    reduce-scattered to these slices (labs/zero1 takes such a step by hand)."""

    def __init__(self, model: Llama, world):
        """`world` is a World of parallel.py."""
        super().__init__()
        self.model = model
        self.mesh = world.mesh["replicate"]
        self.is_last_microbatch = True
        self.pending: list[tuple[DTensor, DTensor]] = []  # a slice, its gradient when it arrives
        for parameter in model.parameters():
            if parameter.requires_grad:
                # Slices are views of the parameter's memory.
                rows = chunk_of(parameter.detach(), self.mesh, mesh_dim=0, dim=0)
                whole = dict(shape=parameter.shape, stride=parameter.stride())
                parameter.optimizer_slice = DTensor.from_local(rows, self.mesh, [Shard(0)], **whole)
                parameter.register_post_accumulate_grad_hook(self.reduce_scatter)

    def forward(self, *inputs, **options):
        return self.model(*inputs, **options)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context backward leaves gradients on the rank, as DDP's no_sync does."""
        self.is_last_microbatch = False
        yield
        self.is_last_microbatch = True

    def reduce_scatter(self, parameter: Tensor) -> None:
        """Start to sum a whole gradient over the ranks. Each will receive its slice of the sum."""
        if self.is_last_microbatch:
            gradient = DTensor.from_local(parameter.grad, self.mesh, [Partial()])
            gradient = gradient.redistribute(placements=[Shard(0)], async_op=True)
            self.pending.append((parameter.optimizer_slice, gradient))
            parameter.grad = None

    def finish_gradients(self) -> None:
        """Wait for the sums and turn them into averages, as in DDP and FSDP."""
        for optimizer_slice, gradient in self.pending:
            optimizer_slice.grad = gradient / self.mesh.size()
        self.pending.clear()


def refuses(work) -> str:
    """Return one line that says why ZeRO-1 cannot do such a step, or ""."""
    parallel = work.parallel
    if parallel.dp != "zero1":
        return ""
    for name in ("tp", "pp"):
        if getattr(parallel, name) > 1:
            return f"--dp zero1 does not combine with --{name}: use --dp fsdp"
    return ""


def suggests(facts) -> str:
    """Return advice to use DDP where it fits, from Facts of perf/verdict.py, or ""."""
    if facts.parallel.dp != "zero1":
        return ""
    note = facts.fit_note(dp="ddp")
    if not note:
        return ""
    remedy = f"--dp ddp sends only gradients, and a whole copy {note}"
    return facts.takes("optimizer", "updates and all-gathers weights", remedy, least=0.15)


def all_gather_updates(model: Llama, *_) -> None:
    """After an optimizer's step, all-gather each parameter from the slices that the ranks have
    updated. While one is copied, the next arrives: no more than two are whole twice."""
    before = None  # a parameter, and its new value, which arrives
    for parameter in model.parameters():
        if hasattr(parameter, "optimizer_slice"):
            updated = parameter.optimizer_slice.detach()
            arriving = updated.redistribute(placements=[Replicate()], async_op=True)
            finish(before)
            before = parameter, arriving
    finish(before)


def finish(arrival: tuple[Tensor, DTensor] | None) -> None:
    if arrival:
        parameter, value = arrival
        parameter.data.copy_(value.to_local())


TECHNIQUE = Technique("dp", refuses=refuses, suggests=suggests, value="zero1")
