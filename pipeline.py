r"""Pipeline parallelism: each rank has some of the layers, and microbatches pass through the ranks.

    python pipeline.py --stages 4 --microbatches 8 --schedule 1f1b              a schedule, drawn
    torchrun --nproc-per-node 4 train.py --pp 4 --microbatch 1 --out out/pp     trains by it

A model is cut into *stages* of consecutive layers. A stage sends its output to the next one, and in
backward the gradient of its input to the one before. A rank without work waits: the *bubble*. To
keep all ranks busy, a batch is cut into microbatches. A *schedule* says in which order each rank
computes them. It is text, a line for each rank, which perf/timeline.py checks and draws:

    F0 F1 B0 F2 B1 B2      F2 is the forward of microbatch 2, B2 its backward
    F0@0 F0@2 B0@2 B0@0    @2: at stage 2, where a rank has several stages
    F0 B0 F1 W0 B1 W1      B computes the gradient of the input alone, W those of the weights

Stage s lies on rank s % p. Letters: p ranks of a pipeline, v stages of a rank, m microbatches;
B, T, D, V as in model.py; w bytes of an element of the residual stream, g of a gradient.
Communication, of the ranks of a pipeline together, a step: 2 m (v p - 1) messages of B T D w bytes.
With tied embeddings the first and the last rank also exchange gradients of V D g bytes.
Use over slow links, where FSDP's all-gathers would take longer than these messages. Avoid with few
microbatches: ranks wait (p - 1) / (m + p - 1) of the time.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model import KVCache, Llama
from perf import timeline
from perf.timeline import Action, Schedule, check_schedule
from plumbing.parser import Parser, positive_int
from plumbing.processes import UserError, run
from plumbing.shards import to_local
from plumbing.split_backward import leave_for_later
from plumbing.stages import as_stream, empty_stream

# -------------------------------------------------------------------------------------- schedules


def gpipe(rank: int, p: int, m: int, v: int = 1) -> list[str]:
    """All forwards, then all backwards (Huang et al. 2018, arXiv:1811.06965). Holds m microbatches.

    rank 0 F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
    rank 1 .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .
    """
    return [f"F{i}" for i in range(m)] + [f"B{i}" for i in range(m)]


def one_f_one_b(rank: int, p: int, m: int, v: int = 1) -> list[str]:
    """Backwards as soon as possible, one after each forward (Narayanan et al. 2020,
    arXiv:2006.09503). The bubble is GPipe's, but a rank holds min(m, p - rank) microbatches.

        rank 0 F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
        rank 1 .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .
    """
    forwards, backwards = [f"F{i}" for i in range(m)], [f"B{i}" for i in range(m)]
    return alternate(forwards, backwards, first=min(m, p - 1 - rank))


def interleaved(rank: int, p: int, m: int, v: int = 2) -> list[str]:
    """1F1B with v stages on a rank: p microbatches pass through its first stage, then through its
    second, and so on (Narayanan et al. 2021, arXiv:2104.04473). The bubble is v times shorter, and
    v times as much is sent. m must be a multiple of p. Holds min(m v, 2 (p - 1 - rank) + (v - 1) p
    + 1) microbatches, each of one stage.

        rank 0 F0@0 F1@0 F0@2 F1@2 .    .    B0@2 B0@2 .    B1@2 B1@2 B0@0 B0@0 B1@0 B1@0
        rank 1 .    F0@1 F1@1 F0@3 B0@3 B0@3 F1@3 B1@3 B1@3 B0@1 B0@1 B1@1 B1@1 .    .
    """
    if m % p:
        raise UserError(f"interleaved takes a multiple of {p} microbatches, not {m}")
    turns = [(first + i, c) for first in range(0, m, p) for c in range(v) for i in range(p)]
    forwards = [f"F{i}@{c * p + rank}" for i, c in turns]
    backwards = [f"B{i}@{(v - 1 - c) * p + rank}" for i, c in turns]
    return alternate(forwards, backwards, first=min(m * v, 2 * (p - 1 - rank) + (v - 1) * p))


def zero_bubble(rank: int, p: int, m: int, v: int = 1) -> list[str]:
    """1F1B that splits backward: the rank before waits for B alone, and W fills the waiting (Qi et
    al. 2023, arXiv:2401.10241, ZB-H1). Rank r puts off W by r backwards. The bubble is a third of
    1F1B's, and every rank holds min(m, p) microbatches, until their W. labs/pipeline.py writes it.

        rank 0 F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
        rank 1 .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3
    """
    order, backwards = [], 0
    for action in one_f_one_b(rank, p, m):
        order.append(action)
        if action.startswith("B"):
            backwards += 1
            if backwards > rank:
                order.append(f"W{backwards - 1 - rank}")
    return order + [f"W{i}" for i in range(max(0, m - rank), m)]


def alternate(forwards: list[str], backwards: list[str], first: int) -> list[str]:
    """Return the `first` forwards, then a forward and a backward in turn, then what is left."""
    turns = [action for pair in zip(forwards[first:], backwards) for action in pair]
    return forwards[:first] + turns + backwards[len(forwards) - first :]


SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
STAGES = {"interleaved": 2}  # of a rank, where --stages-per-rank is not given; others have 1


def lines_of(name: str, p: int = 1, m: int = 1, v: int = 1) -> list[str]:
    """Return the text of a schedule, a line for each rank: by its name, or from a file."""
    if name in SCHEDULES:
        if v > 1 and name not in STAGES:
            raise UserError(f"{name} has one stage on each rank: --stages-per-rank 1")
        return [" ".join(SCHEDULES[name](rank, p, m, v)) for rank in range(p)]
    if not Path(name).is_file():
        raise UserError(f"no schedule '{name}': choose from {', '.join(SCHEDULES)}, or give a file")
    lines = [line.partition("#")[0] for line in Path(name).read_text().splitlines()]
    return [line for line in lines if line.strip()]


def has_w(name: str) -> bool:
    """Return whether a schedule splits backward."""
    return "W" in "".join(lines_of(name))


@functools.cache
def make_schedule(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """Return a schedule of m microbatches, by its name or from a file. Raises UserError for one
    that cannot be carried out."""
    if len(lines := lines_of(name, p, m, v)) != p:
        raise UserError(f"schedule {name} has {len(lines)} lines, and {p} ranks need one each")
    try:
        schedule = timeline.read_schedule(lines)
        check_schedule(schedule, m, p * v)
    except ValueError as error:
        raise UserError(f"schedule {name}: {error}")
    return schedule


# ----------------------------------------------------------------------------------------- runner


class Pipeline(nn.Module):
    """One rank of a pipeline, which computes the steps of training by a schedule.

    All ranks go through the ticks of a schedule in one order, and after each post what they send
    and receive. A rank waits only for what it has posted already, so no two wait for each other,
    with gloo, which matches sends and receives in pairs, and with NCCL, which runs them in order.
    torch.distributed.pipelining has the same schedules. But in torch 2.13, with FSDP, zero-bubble
    loses gradients without an error, and 1F1B refuses fewer microbatches than stages.
    """

    def __init__(
        self,
        model: Llama,
        stages: list[Llama],
        world,
        gradient_sync: Callable[[Llama, bool], contextlib.AbstractContextManager],
    ):
        """`stages` are those of `model`, as stages_of returns them, sharded by FSDP. `world` is a
        World of parallel.py. gradient_sync(stage, last) is a context for a backward, which
        communicates gradients if it is the last of a step."""
        super().__init__()
        self.parallel, self.gradient_sync = world.parallel, gradient_sync
        self.splits = has_w(self.parallel.schedule)
        self.group, self.tp = world.mesh.get_group("pp"), world.mesh["tp"]
        self.message = partial(dist.P2POp, group=self.group)
        width, dtype = model.config.dim, world.parallel.dtype
        self.empty_stream = partial(empty_stream, tp=self.tp, width=width, dtype=dtype)
        self.rank, self.p = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.stages = dict(zip(range(self.rank, self.p * len(stages), self.p), stages))
        self.last = self.p * len(stages) - 1  # the last stage of all
        self.model, embedding = model, model.tok_embeddings  # on the first and, tied, the last rank
        self.tied = model.config.tie_embeddings and embedding and embedding.weight.requires_grad
        if self.tied:
            embedding.weight.copies = 2  # each counts half in the gradient norm
        self.deferred: dict[tuple, list[Callable]] = {}  # (microbatch, stage) -> what W computes
        model.forward = self.forward  # for evaluation and generation
        for blocks in (list(stage.layers.values()) for stage in stages):
            # In backward FSDP prefetches the block whose forward came before. For block 0 that is a
            # block of another microbatch; so it names itself, which does nothing.
            for before, block in zip([blocks[0], *blocks], blocks):
                block.set_modules_to_backward_prefetch([before])
        self.ticks = functools.cache(self.make_ticks)
        dist.barrier(self.group)  # NCCL wants all ranks in the first call of a group

    def make_ticks(self, m: int) -> list[dict[int, Action]]:
        """Return for each tick in which an action ends: rank -> action."""
        schedule = make_schedule(self.parallel.schedule, self.p, m, len(self.stages))
        ticks = defaultdict(dict)  # time -> rank -> action
        for rank, spans in enumerate(check_schedule(schedule, m, self.last + 1)):
            for action, _, end in spans:
                ticks[end][rank] = action
        return [ticks[end] for end in sorted(ticks)]

    def accumulate(self, microbatches: list) -> Tensor:
        """Run forward and backward of all microbatches, Batches of data.py; gradients add up. All
        ranks of a pipeline have the same microbatches. Returns the sum of the losses on the rank
        with the last stage, 0 on the others."""
        ticks = self.ticks(len(microbatches))
        self.microbatches, self.kept = microbatches, {}
        self.inbox = {}  # action -> what it needs of another rank, and the works to wait for
        self.loss = torch.zeros((), dtype=torch.float64, device=microbatches[0].tokens.device)
        self.unfinished = dict.fromkeys(self.stages, len(microbatches))
        posted = []
        for tick in ticks:
            action = tick.get(self.rank)
            received, works = self.inbox.pop(action, (None, []))
            wait(works)
            result = action and self.compute(action, received)
            posted.append(self.exchange(tick, result))
            if len(posted) > self.p:  # sent by now: waiting lets go of the tensors
                wait(posted.pop(0))
        for works in posted:
            wait(works)
        if self.tied:
            self.sum_tied_gradients()
        return self.loss

    def compute(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Run an action on what another rank has sent for it. Return what the next stage, or the
        one before, waits for."""
        kind, i, stage = action
        microbatch, module = self.microbatches[i], self.stages[stage]
        if kind == "F":
            x = microbatch.tokens if stage == 0 else received.requires_grad_()
            targets = microbatch.targets if stage == self.last else None
            stream = as_stream(x, microbatch.tokens, self.tp)
            y = module(stream, targets, microbatch.positions, documents=microbatch.documents)
            if stage == self.last:
                self.loss += y.detach()
            self.kept[i, stage] = x, y
            return to_local(y).detach()

        x, y = self.kept.pop((i, stage))
        if kind == "B" and self.splits:
            self.kept[i, stage] = None, y  # for W
        else:
            self.unfinished[stage] -= 1
        is_last = self.unfinished[stage] == 0
        with self.gradient_sync(module, is_last):
            # Embedding and output stay unsharded until the last, as other microbatches need them.
            module.set_reshard_after_backward(is_last, recurse=False)
            if kind == "W":
                for add_gradient in self.deferred.pop((i, stage)):
                    add_gradient()
                # FSDP takes gradients at the end of a backward, and W has none. So run one that
                # computes nothing, from y to itself: y has the hook with which FSDP begins.
                torch.autograd.grad(y, y, torch.zeros_like(y))
            else:
                leave = leave_for_later(self.deferred, (i, stage))
                with leave if self.splits else contextlib.nullcontext():
                    to_local(y).backward(received)
        return x.grad if kind == "B" else None

    def exchange(self, tick: dict[int, Action], result: Tensor | None) -> list[dist.Work]:
        """Send this rank's result of a tick, and receive what others computed for it."""
        operations, expected = [], {}
        for source, (kind, i, stage) in sorted(tick.items()):
            receiver = stage + 1 if kind == "F" else stage - 1  # a stage
            if kind == "W" or not 0 <= receiver <= self.last:
                continue
            target = receiver % self.p
            if source == self.rank:
                operations.append(self.message(dist.isend, result.contiguous(), group_peer=target))
            elif target == self.rank:
                buffer = self.empty_stream(self.microbatches[i].tokens)
                operations.append(self.message(dist.irecv, buffer, group_peer=source))
                expected[Action(kind, i, receiver)] = buffer
        works = dist.batch_isend_irecv(operations) if operations else []
        self.inbox |= {action: (buffer, works) for action, buffer in expected.items()}
        return works

    @torch.no_grad()
    def sum_tied_gradients(self) -> None:
        """Add the gradients of the embedding, on the first rank, and of the output, on the last."""
        own = to_local(self.model.tok_embeddings.weight.grad)
        other, peer = torch.empty_like(own), self.p - 1 - self.rank
        pairs = (dist.isend, own.contiguous()), (dist.irecv, other)
        wait(dist.batch_isend_irecv([self.message(*pair, group_peer=peer) for pair in pairs]))
        own += other

    @torch.no_grad()
    def forward(self, tokens, targets=None, positions=None, cache=None, documents=None) -> Tensor:
        """Compute what the whole model would, stage by stage, for evaluation and generation. All
        ranks have the logits; the rank with the last stage has the loss, the others 0."""
        caches = cache and vars(cache).setdefault("of_stages", {s: KVCache() for s in self.stages})
        x = tokens
        for stage in range(self.last + 1):
            here, there = stage % self.p, (stage + 1) % self.p
            if here == self.rank:
                given = as_stream(x, tokens, self.tp), targets if stage == self.last else None
                x = self.stages[stage](*given, positions, caches and caches[stage], documents)
                if stage < self.last:
                    dist.send(to_local(x).contiguous(), group=self.group, group_dst=there)
            elif there == self.rank and stage < self.last:
                x = self.empty_stream(tokens)
                dist.recv(x, group=self.group, group_src=here)
        is_last = self.last in self.stages
        if targets is not None:
            return x if is_last else torch.zeros((), dtype=torch.float64, device=tokens.device)
        if not is_last:  # with a cache, logits are those of the last token
            T = tokens.shape[1] if cache is None else 1
            shape = len(tokens), T, self.model.config.vocab_size
            x = torch.empty(shape, dtype=self.parallel.dtype, device=tokens.device)
        dist.broadcast(x, group=self.group, group_src=self.p - 1)
        return x


def wait(works: list[dist.Work]) -> None:
    """Wait for works and remove them from the list, which others share: gloo would take a second
    wait for one of another message."""
    while works:
        works.pop().wait()


def main() -> None:
    parser = Parser(description="Draw a schedule.")
    parser.add_argument("--stages", type=positive_int, default=4, help="stages (default: 4)")
    parser.add_argument("--microbatches", type=positive_int, default=8, help="(default: 8)")
    parser.add_argument("--schedule", default="1f1b", help=f"{', '.join(SCHEDULES)}, or a file")
    parser.add_argument("--stages-per-rank", type=positive_int, help="(default: 1; interleaved: 2)")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw it there, too")
    args = parser.parse_args()
    v = args.stages_per_rank or STAGES.get(args.schedule, 1)
    p, rest = divmod(args.stages, v)
    if rest:
        raise UserError(f"--stages {args.stages} is no multiple of --stages-per-rank {v}")
    schedule = make_schedule(args.schedule, p, args.microbatches, v)
    spans = check_schedule(schedule, args.microbatches, args.stages)
    print(timeline.draw_text(spans))
    most = ", ".join(str(timeline.held(order)) for order in schedule)
    waits = f"{timeline.bubble(spans):.1%} of the time is waiting, if backward takes two forwards"
    print(f"{waits}; ranks hold {most} microbatches{' of a stage each' * (v > 1)}")
    if args.plot:
        args.plot.write_text(timeline.draw_svg(spans, f"{args.schedule}: {waits}"))


if __name__ == "__main__":
    run(main)
