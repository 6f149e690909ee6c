"""The check of labs/tp."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import runs.setup
from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import drawn, plural
from labs.machinery.student import SHARDING, check_returned
from labs.machinery.training import Run
from model import Llama
from parallel import World
from perf.instruments import Counted, Live
from plumbing.shards import allocate

FUNCTION = "feed_forward"
ABOUT = "a feed-forward block over several ranks"
NEEDS = "`autograd.Function`, SwiGLU by hand"
POINT = "one collective forward, one backward, none between"
LEADS_TO = "parallel.py", "tensor_parallel"
SIZES = 2, 3, 4
BARRED = (
    *SHARDING,
    "torch.distributed.tensor.parallel.parallelize_module",
    "torch.distributed.tensor.parallel.ColwiseParallel",
    "torch.distributed.tensor.parallel.RowwiseParallel",
    "parallel.tensor_parallel",
)
HINTS = (
    "Look at the picture in `tensor_parallel` of parallel.py. Its gathers and scatters are there "
    "because it also shards the sequence: here x is whole on every rank.",
    "Follow one hidden feature: which row of w1, which row of w3 and which column of w2 does it "
    "use? Then count the tensors that ranks have to add up, in forward and in backward.",
    "Two Functions: one does nothing in forward and sums in backward, the other does the opposite. "
    "The first is applied to x, once, and the second to the product with w2.",
)
ALIKE = (
    "Shapes do not fit. Of w1 and w3 a rank needs rows, of w2 columns, of the same features; "
    "forward gets them in the order in which shard returns them, and multiplies by their "
    "transposes."
)
AS_ONE_MATRIX = (
    "w1 and w3 were cut as one matrix: some ranks have gates alone, others ups alone, and each "
    "gate is to be multiplied by its own up."
)
ERRORS = {"cannot be multiplied": ALIKE, "must match the size of tensor": ALIKE}
TOKENS, WIDTH, FEATURES = 5, 12, 26  # N, D and F; neither 3 nor 4 ranks divide F
SHAPES = {"w1": (FEATURES, WIDTH), "w2": (WIDTH, FEATURES), "w3": (FEATURES, WIDTH)}
ONE_SUM = {"all-reduce": (1, TOKENS * WIDTH * 8)}
AS_ONE = {"reduce", "broadcast"}, {"reduce-scatter", "all-gather"}  # what an all-reduce does, too
INDICES = 3 * FEATURES * 8  # bytes that a rank may keep beside the parts, to find its features


def tensors(seed: int) -> dict[str, Tensor]:
    shapes = {"x": (TOKENS, WIDTH)} | SHAPES
    return dict(zip(shapes, drawn(seed, *shapes.values())))


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Run forward and backward of x + the block. Return output, gradients, what was kept and sent.
    Gradients of kept parts lie in tensors of the whole shape, with zeros elsewhere."""
    x, *weights = tensors(seed).values()
    what = "two functions: shard and forward"
    shard, forward = check_returned(load()(), (Callable,) * 2, what)
    live = Live(weights)
    with live:
        parts = check_returned(shard(*weights), list | tuple, "a list of tensors from shard")
    del weights  # from here on they live only if the student keeps them
    kept_in_all = live.now
    kept = [part.detach().requires_grad_() for part in parts]
    x.requires_grad_()
    with Counted(None) as in_forward:
        out = forward(x, *kept)
        check_returned(out, Tensor, "the output of the block from forward, a tensor")
        if out.shape != x.shape:
            raise TypeError(f"forward gives {list(out.shape)}, and not {list(x.shape)}")
    out = x + out
    with Counted(None) as in_backward:
        (out**2 / 2).sum().backward()
    # Which elements this rank keeps, found by giving shard the numbers 1, 2, 3 ... in their
    # place. A student who pads has 0 there.
    numbers = torch.arange(1 + 3 * FEATURES * WIDTH, dtype=torch.float64)
    places = [part.long().flatten() for part in shard(*split(numbers).values())]
    gradients, owned = torch.zeros_like(numbers), torch.zeros(numbers.shape, dtype=torch.bool)
    for place, part in zip(places, kept):
        owned[place] = True
        if part.grad is not None:
            gradients[place] = part.grad.flatten()
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in kept}
    nbytes = sum(storage.nbytes() for storage in storages.values())
    return {
        "out": out.detach(),
        "gradients": {"x": x.grad} | split(gradients),
        "without": sum(part.grad is None for part in kept),
        "owned": split(owned),
        "bytes": nbytes,
        "beside": kept_in_all - nbytes if kept_in_all - nbytes > INDICES else 0,
        "forward": compare.by_kind(in_forward.sent),
        "backward": compare.by_kind(in_backward.sent),
    }


def split(elements: Tensor) -> dict[str, Tensor]:
    """Return the three matrices whose elements follow each other. The first element is of none."""
    parts = elements[1:].split(FEATURES * WIDTH)
    return {name: part.view(shape) for part, (name, shape) in zip(parts, SHAPES.items())}


def block(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return F.silu(x @ w1.T) * (x @ w3.T) @ w2.T


def problem_with_cut(owned: list[dict[str, Tensor]]) -> str:
    """Return the sentence for a cut that gives wrong numbers; "" if there is none."""
    for name in SHAPES:
        ranks = sum(own[name].int() for own in owned)
        missing, several = int((ranks == 0).sum()), int((ranks > 1).sum())
        if missing:
            absent = f"No rank has {plural(missing, 'element')} of {name}"
            return f"{absent}: F is no multiple of {len(owned)}."
        if several:
            many = f"Several ranks have {plural(several, 'element')} of {name}"
            return f"{many}: each belongs on exactly one."
    features = [(o["w1"].any(1), o["w3"].any(1), o["w2"].any(0)) for o in owned]
    for rank, (gate, up, down) in enumerate(features):
        if not (gate.any() and up.any()):
            return AS_ONE_MATRIX
        if not gate.equal(up):
            return (
                f"Rank {rank} has other features of w1 than of w3: each gate is to be multiplied "
                f"by its own up."
            )
        if not gate.equal(down) and not gate.all():
            return (
                f"Rank {rank} has other features of w1 than of w2, which multiplies them: it needs "
                f"the columns of w2 for the rows that it has of w1."
            )
    return ""


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    x, *weights = (tensor.requires_grad_() for tensor in tensors(seed).values())
    w1, w2, w3 = weights
    owned = results["owned"]
    features = [own["w2"].any(0) for own in owned]
    shares = [block(x, w1[f], w2[:, f], w3[f]) for f in features]  # of ranks, in the output
    right = block(x, *weights)
    out = (x + right).detach()  # also the gradient that backward starts with
    columns = torch.arange(WIDTH).chunk(size)
    too_late = sum(F.silu(x[:, c] @ w1[:, c].T) * (x[:, c] @ w3[:, c].T) for c in columns) @ w2.T
    problem = problem_with_cut(owned)
    mistakes = {
        "Each rank has the part of the output that comes from its own features: add them up.": [
            x + share for share in shares
        ],
        compare.AVERAGED: x + right / size,
        "The sum is taken after the nonlinearity, and silu(a + b) is not silu(a) + silu(b).": (
            x + too_late
        ),
    }
    yield compare.tensors("output", results["out"], out, mistakes, otherwise=problem)
    if without := max(results["without"]):
        mistake = compare.NOT_RECORDED + "the sum needs a Function, whose backward you write."
        yield Property("gradients", f"none for {plural(without, 'kept tensor')}", False, mistake)
        return
    through = [torch.autograd.grad(share, x, out, retain_graph=True)[0] for share in shares]
    of_weights = dict(zip(SHAPES, torch.autograd.grad(right, weights, out, retain_graph=True)))
    (through_all,) = torch.autograd.grad(right, x, out)
    wanted = [{name: g * own[name] for name, g in of_weights.items()} for own in owned]
    mistakes = {
        "Each rank has the gradient of x through its own features: backward has to add them up. "
        "The layers before would learn something else on each rank.": [
            {"x": out + one} for one in through
        ],
        compare.AVERAGED: {"x": out + through_all / size},
        f"The gradient of the output was summed over the ranks, which all had it already: "
        f"gradients are {size} times as large.": compare.times(wanted, size),
        "This sums also what reached x past the block, by the residual connection, which every "
        "rank had already: sum what comes from the block alone.": {"x": size * out + through_all},
    }
    yield compare.tensors(
        "gradients",
        results["gradients"],
        [{"x": out + through_all} | of_rank for of_rank in wanted],
        {} if problem else mistakes,
        otherwise=problem,
    )
    limit = 3 * WIDTH * -(-FEATURES // size) * 8
    elements = max(sum(int(m.sum()) for m in own.values()) for own in owned)
    mistakes = {
        "A rank keeps tensors beside those that shard returns, in a variable that outlives the "
        "call: it may keep its parts alone.": any(results["beside"]),
        "A chunk is a view: as long as it lives, so does the whole matrix. Keep a copy of the "
        "part.": elements * 8 <= limit,
        "Every rank keeps whole matrices: what ranks share are the matrices.": True,
    }
    kept = list(map(sum, zip(results["bytes"], results["beside"])))
    text = "{:,} bytes on a rank, and may be {:,}"
    yield compare.at_most("kept", kept, limit, text, mistakes)
    one, by_input = ONE_SUM["all-reduce"][1], owned[0]["w1"].any(1).all()
    mistakes = {
        "forward": {
            "w1 and w3 are cut by input features, so their products are partial sums, which have "
            "to be added up before the nonlinearity. Cut by output features, they need no "
            "sum.": by_input,
            "Nothing has to be gathered: w2 multiplies some features on each rank, and the outputs "
            "are added up.": sum(n for _, n in results["forward"][0].values()) >= 2 * one,
        },
        "backward": {
            "Gate and up read the same x: add up their gradients on the rank first, and then over "
            "the ranks, once. The gradient of the output, which all ranks have, needs no "
            "sum.": results["backward"][0] == {"all-reduce": (2, 2 * one)},
            "Only the gradient of x has to be added up.": True,
        },
    }
    for direction, mistake in mistakes.items():
        sent = compare.unexpected(results[direction], ONE_SUM)
        text = ", ".join(f"{plural(n, name)} of {b:,} bytes"
                         for name, (n, b) in sent.items())  # fmt: skip
        if set(sent) in AS_ONE:
            mistake = (
                f"A {' and a '.join(sorted(sent, reverse=True))} do what one all-reduce does: it "
                f"adds up, and gives every rank the sum."
            )
        yield Property(
            f"sent {direction}",
            f"{text or 'nothing'}; 1 all-reduce of {ONE_SUM['all-reduce'][1]:,} is wanted",
            sent == ONE_SUM,
            mistake,
        )


# The lab says nothing about the norm of sharded gradients, so nothing is clipped.
RUN = Run(flags="--tp 2 --clip 0 --microbatch 6")


class Parts(nn.Module):
    """A block's feed-forward, of which this rank keeps parts."""

    def __init__(self, kept: list[Tensor], forward: Callable):
        super().__init__()
        self.kept, self.function = nn.ParameterList(kept), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x.flatten(0, 1), *self.kept).view_as(x)


def install(feed_forward: Callable) -> None:
    """Let both ranks compute all of the model but the feed-forward, which they share."""

    def parallelize(model: Llama, world: World, initialize: Callable[[Llama], None]) -> Llama:
        allocate(model.double(), world.device)
        initialize(model)
        shard, forward = feed_forward()
        for layer in model.layers.values():
            whole = [getattr(layer.feed_forward, name).weight.detach() for name in SHAPES]
            layer.feed_forward = Parts(shard(*whole), forward)
        return model

    runs.setup.parallelize = parallelize
