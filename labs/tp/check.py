"""The check of labs/tp."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.machinery import compare, student
from labs.machinery.compare import Property
from labs.machinery.lab import drawn, plural
from labs.machinery.student import check_returned
from perf.instruments import Counted, Live

FUNCTION = "feed_forward"
ABOUT = "a feed-forward block over several ranks"
NEEDS = "`autograd.Function`, SwiGLU by hand"
POINT = "one collective forward, one backward, none between"
LEADS_TO = "parallel.py", "tensor_parallel"
SIZES = 2, 3, 4
BARRED = (
    *student.SHARDING,
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
FEW = (
    "There may be fewer features than ranks. chunk(n) can return fewer than n chunks; "
    "tensor_split(n) always returns n, and some may be empty."
)
ERRORS = {
    "cannot be multiplied": ALIKE,
    "must match the size of tensor": ALIKE,
    "tuple index out of range": FEW,
    "not enough values to unpack": FEW,
}
HOOKED = (
    "The first call is right, and the second with the same parts is not: a hook on a part stays "
    "there, and each call adds one."
)
LARGE = 1000  # times as large is x in the last call: exp of the gates is infinite, or 0
OVERFLOWS = "exp of a large number is infinite: use F.silu or torch.sigmoid."
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
    owned = torch.zeros(numbers.shape, dtype=torch.bool)
    for place in places:
        owned[place] = True

    def gradients_of(x: Tensor, parts: list[Tensor]) -> dict[str, Tensor]:
        gradients = torch.zeros_like(numbers)
        for place, part in zip(places, parts):
            if part.grad is not None:
                gradients[place] = part.grad.flatten()
        return {"x": x.grad} | split(gradients)

    gradients = gradients_of(x, kept)
    more = {}  # calls with the same parts, and one of a block with a single feature
    for name, factor in (("again", 1), ("large", LARGE)):
        for part in kept:
            part.grad = None
        scaled = (factor * x.detach()).requires_grad_()
        again = scaled + forward(scaled, *kept)
        (again**2 / 2).sum().backward()
        more[name] = again.detach(), gradients_of(scaled, kept)
    if student.AGAIN:  # what is right so far is checked with fewer features than ranks, too
        narrow = shard(*of_one_feature(*list(tensors(seed).values())[1:]))
        narrow = [part.detach().requires_grad_() for part in narrow]
        x_of_one = x.detach().clone().requires_grad_()
        of_one = x_of_one + forward(x_of_one, *narrow)
        (of_one**2 / 2).sum().backward()
        more["one feature"] = of_one.detach(), {"x": x_of_one.grad}
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in kept}
    nbytes = sum(storage.nbytes() for storage in storages.values())
    return {
        "out": out.detach(),
        "gradients": gradients,
        "more": more,
        "owned": split(owned),
        "bytes": nbytes,
        "beside": kept_in_all - nbytes if kept_in_all - nbytes > INDICES else 0,
        "forward": compare.by_kind(in_forward.sent),
        "backward": compare.by_kind(in_backward.sent),
    }


def of_one_feature(w1: Tensor, w2: Tensor, w3: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return w1[:1].clone(), w2[:, :1].clone(), w3[:1].clone()


def split(elements: Tensor) -> dict[str, Tensor]:
    """Return the three matrices whose elements follow each other. The first element is of none."""
    parts = elements[1:].split(FEATURES * WIDTH)
    return {name: part.view(shape) for part, (name, shape) in zip(parts, SHAPES.items())}


def block(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return F.silu(x @ w1.T) * (x @ w3.T) @ w2.T


def facts(size: int) -> dict:
    """Return what sentences of wrong.txt say of the ranks."""
    return {"features": FEATURES, "size": size}


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    x, *weights = (tensor.requires_grad_() for tensor in tensors(seed).values())
    owned = results["owned"]
    out = x + block(x, *weights)
    yield compare.tensors("output", results["out"], out.detach())
    (out**2 / 2).sum().backward()
    gradients = dict(zip(SHAPES, (weight.grad for weight in weights)))
    wanted = [{"x": x.grad} | {name: g * own[name] for name, g in gradients.items()}
              for own in owned]  # fmt: skip
    yield compare.tensors("gradients", results["gradients"], wanted)
    yield from check_more(results["more"], seed, owned)
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
    by_input = owned[0]["w1"].any(1).all()
    for direction in ("forward", "backward"):
        yield check_sent(direction, compare.unexpected(results[direction], ONE_SUM), by_input)


def check_more(more: list[dict], seed: int, owned: list[dict]) -> Iterator[Property]:
    """Yield whether the further calls are right."""
    mistakes = {"again": HOOKED, "large": OVERFLOWS, "one feature": FEW}
    for name in more[0]:
        mistake = mistakes[name]
        x, *weights = tensors(seed).values()
        x = (x * (LARGE if name == "large" else 1)).requires_grad_()
        weights = of_one_feature(*weights) if name == "one feature" else weights
        out = x + block(x, *(weight.requires_grad_() for weight in weights))
        (out**2 / 2).sum().backward()
        outs, gradients = ([of_rank[name][i] for of_rank in more] for i in (0, 1))
        wanted = [{"x": x.grad} for _ in owned]
        if name != "one feature":
            of_weights = dict(zip(SHAPES, (weight.grad for weight in weights)))
            wanted = [{"x": x.grad} | {key: g * own[key] for key, g in of_weights.items()}
                      for own in owned]  # fmt: skip
        found = [{"out": out} | of_rank for out, of_rank in zip(outs, gradients)]
        wanted = [{"out": out.detach()} | of_rank for of_rank in wanted]
        yield compare.tensors(name, found, wanted, otherwise=mistake)


def check_sent(direction: str, sent: dict[str, tuple[int, int]], by_input: bool) -> Property:
    """Return whether a rank has sent one sum. `by_input`: whether w1 is cut by input features."""
    is_forward = direction == "forward"
    calls, nbytes = map(sum, zip((0, 0), *sent.values()))
    one = ONE_SUM["all-reduce"][1]
    mistakes = {
        "Together they do what one all-reduce does: it adds up, and gives every rank the sum.": (
            set(sent) in AS_ONE
        ),
        "w1 and w3 are cut by input features, so their products are partial sums, which have to be "
        "added up before the nonlinearity. Cut by output features, they need no sum.": (
            is_forward and by_input
        ),
        "Nothing has to be gathered: w2 multiplies some features on each rank, and the outputs are "
        "added up.": is_forward and nbytes >= 2 * one,
        "Gate and up read the same x: add up their gradients on the rank first, and then over the "
        "ranks, once. The gradient of the output, which all ranks have, needs no sum.": (
            not is_forward and (calls, nbytes) == (2, 2 * one)
        ),
        "Only the gradient of x has to be added up.": not is_forward,
    }
    shown = ", ".join(f"{plural(n, kind)} of {b:,} bytes" for kind, (n, b) in sent.items())
    text = f"{shown or 'nothing'}; 1 all-reduce of {one:,} is wanted"
    return Property(f"sent {direction}", text, sent == ONE_SUM, mistakes)
