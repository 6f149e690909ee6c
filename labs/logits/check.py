"""The check of labs/logits."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labs.machinery import compare, student
from labs.machinery.compare import Property
from labs.machinery.student import check_returned
from labs.machinery.training import Run
from model import IGNORE, Vocabulary
from perf.instruments import Counted, Live
from techniques import chunked_loss

FUNCTION = "cross_entropy"
ABOUT = "the loss of logits that nobody has whole"
NEEDS = "softmax and its gradient, `all_reduce` with MAX"
POINT = "three numbers a token instead of the vocabulary"
LEADS_TO = "parallel.py", "ShardedVocabulary"
SIZES = 2, 3, 4
BARRED = (
    *student.SHARDING,
    "torch.distributed.tensor.parallel.loss_parallel",
    "parallel.ShardedVocabulary",
    "techniques.chunked_loss.chunked_loss",
    "model.sum_of_losses",
)
HINTS = (
    "Look at the docstring of `ShardedVocabulary` in parallel.py: what do ranks exchange?",
    "Write -log softmax of the target as a difference. Which of its terms are sums over the "
    "vocabulary, and what does a rank add that does not have the target? Then count the numbers a "
    "token that ranks exchange.",
    "A Function. Forward: the largest logit over all ranks; exponentials; their sums and the "
    "target's logit, or 0, added up over all ranks; softmax minus onehot, which backward scales.",
)
ERRORS = {
    "out of bounds": "Most targets lie in another rank's part of the vocabulary: they are no index "
    "of these logits.",
    "only for scalar outputs": "The sum over all targets is one number.",
    "does not require grad": "The loss does not depend on logits as far as autograd knows: write a "
    "Function, whose backward gives their gradient.",
}
TOKENS, VOCABULARY = 24, 101  # no number of ranks divides the vocabulary
SCALE = 0.3  # the gradient of the loss that backward starts with
NUMBERS = 4  # that a rank may send for each token


def tensors(seed: int) -> tuple[list[Tensor], Tensor]:
    """Return two tensors of logits, the second of them with large ones, and the targets."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    parts = [part for size in SIZES for part in torch.arange(VOCABULARY).chunk(size)]
    borders = torch.tensor(sorted({int(part[i]) for part in parts for i in (0, -1)}))
    targets[: len(borders)] = borders  # the first and the last entry of each rank's part
    targets[-5:] = IGNORE
    logits = torch.randn(2, TOKENS, VOCABULARY, generator=generator, dtype=torch.float64)
    large = logits[1]
    large[0::3] *= 1e4
    large[1::3] += 1000  # exp of which is infinite
    large[2::3] -= 1000  # and of which is 0
    return list(logits), targets


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Compute loss and gradient of both. Return them, with the largest tensor and what was sent."""
    both, targets = tensors(seed)
    starts = [int(part[0]) for part in torch.arange(VOCABULARY).chunk(size)]
    losses, gradients, kept = [], [], []
    cross_entropy = load()
    for whole in both:
        logits = whole.chunk(size, 1)[rank].clone().requires_grad_()
        with LargestTensor() as largest, Counted(None) as counted:
            with Live([logits, targets]) as live:
                before = live.now
                loss = cross_entropy(logits, targets, starts[rank])
                check_returned(loss, Tensor, "the loss, a tensor")
                kept.append((live.now - before) / logits.nbytes)
            scaled = loss * SCALE
            if student.AGAIN:  # what backward needs is still there after a backward
                torch.autograd.grad(scaled, logits, retain_graph=True)
            scaled.backward()
        losses.append(loss.detach().squeeze())
        gradients.append(logits.grad)
    return {
        "losses": losses,
        "gradients": gradients,
        "largest": largest.shape,
        "sent": compare.by_kind(counted.sent),
        "kept": max(kept),
    }


class LargestTensor(TorchDispatchMode):
    """A context that notes the shape of the largest tensor that an operator returns."""

    shape = torch.Size([0])

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        shapes = [leaf.shape for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.shape = max([self.shape, *shapes], key=torch.Size.numel)
        return result


def known_losses(logits: Tensor, targets: Tensor, size: int) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield sentences, each with the loss that its mistake gives on every rank."""
    counts, parts = targets != IGNORE, logits.chunk(size, 1)
    starts = [int(part[0]) for part in torch.arange(VOCABULARY).chunk(size)]

    def logit(part: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return a rank's logits of targets, 0 where it has none, if its part begins at `start`;
        and where it has one."""
        column = targets - start
        here = counts & (0 <= column) & (column < part.shape[1])
        return part.gather(1, torch.where(here, column, 0)[:, None])[:, 0] * here, here

    def total(of_tokens: Tensor) -> Tensor:
        return of_tokens[counts].sum()

    of_target, is_here = zip(*map(logit, parts, starts))
    target = sum(of_target)
    lse, own = logits.logsumexp(1), [part.logsumexp(1) for part in parts]
    largest = [part.amax(1) for part in parts]
    own_part = (
        "Each rank normalizes over its own part of the vocabulary: the sum of exponentials has to "
        "be that over all of it."
    )
    yield own_part, [total(o - t) for o, t in zip(own, of_target)]
    of_own = [(o - t)[here].sum() for o, t, here in zip(own, of_target, is_here)]
    yield own_part, of_own
    yield own_part, [sum(of_own)] * size
    yield (
        "The logit of the target is missing on ranks that do not have it: add it up as well.",
        [total(lse - t) for t in of_target],
    )
    yield (
        "Only targets of rank 0's part have their logit in the loss. The others' parts begin at "
        "vocab_start.",
        [total(lse - of_target[0])] * size,
    )
    widths = [[part.shape[1] for part in parts], [VOCABULARY // size] * size]
    for wrong in ([rank * width for rank, width in enumerate(of)] for of in widths):
        at_wrong = sum(t for t, _ in map(logit, parts, wrong))
        yield (
            f"The ranks look for targets from {wrong} on, and their parts begin at {starts}: that "
            f"is vocab_start.",
            [total(lse - at_wrong)] * size,
        )
    first = sum(torch.where(here, target, part[:, 0]) for here, part in zip(is_here, parts))
    yield (
        "A rank that does not have the target adds the logit of another entry: it has to add 0.",
        [total(lse - first)] * size,
    )
    yield "Tokens whose target is IGNORE are in the loss.", [(lse - target).sum()] * size
    yield "This is the mean: the sum is wanted.", [total(lse - target) / counts.sum()] * size
    exponentials = sum((o - m).exp() for o, m in zip(own, largest))
    shifted = sum((target - m) * here for here, m in zip(is_here, largest))
    yield (
        "Ranks have subtracted different numbers from their logits: their exponentials can be "
        "added up if all subtract the same one.",
        [total(exponentials.log() - shifted)] * size,
    )


def known_gradients(logits: Tensor, targets: Tensor, size: int) -> dict[str, Tensor]:
    """Return the gradient of all logits, "", and those of mistakes, by sentence."""
    counts, entries = (targets != IGNORE)[:, None], torch.arange(VOCABULARY)
    rank_of = torch.cat([torch.full_like(p, rank) for rank, p in enumerate(entries.chunk(size))])
    is_first = torch.cat([p == p[0] for p in entries.chunk(size)])  # of its rank's entries
    has_target = counts & (rank_of[targets.clamp(0)][:, None] == rank_of)
    onehot = (targets[:, None] == entries).double()
    softmax = SCALE * logits.softmax(1)
    whole = (softmax - SCALE * onehot) * counts
    own = torch.cat([part.softmax(1) for part in logits.chunk(size, 1)], 1)
    return {
        "": whole,
        "This is the softmax alone: where the target is, 1 has to be subtracted.": softmax * counts,
        "Tokens whose target is IGNORE have a gradient.": softmax - SCALE * onehot,
        "Every rank subtracts 1 from one of its entries: only the rank that has the target does.": (
            whole - SCALE * (counts & ~has_target & is_first).double()
        ),
        "A rank has a gradient only for targets in its own part: but its logits lower the "
        "probability of every target.": whole * has_target,
        "Each rank normalizes over its own part of the vocabulary.": (
            SCALE * (own - onehot) * counts
        ),
        "Backward is given the gradient of the loss, which is not 1: multiply by it.": (
            whole / SCALE
        ),
        "The gradient is counted once for each rank, and all have the same loss: once is enough.": (
            whole * size
        ),
    }


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    both, targets = tensors(seed)
    for i, (whole, kind) in enumerate(zip(both, ("", "large "))):
        found, gradients = ([of[i] for of in results[key]] for key in ("losses", "gradients"))
        right = F.cross_entropy(whole, targets, ignore_index=IGNORE, reduction="sum")
        if not torch.stack(found).isfinite().all():
            mistake = (
                "exp of a large logit is infinite, and of a very negative one 0: subtract the "
                "largest logit of the token first, that over all ranks."
            )
            text = f"{found[0]:.10g} on rank 0, and {right:.10g} in one process"
            yield Property(f"{kind}loss", text, False, mistake)
            return
        known = (pair for shift in (0, whole.amax(1, keepdim=True))
                 for pair in known_losses(whole - shift, targets, size))  # fmt: skip
        yield compare.numbers(f"{kind}loss", found, right, known)
        known = {text: list(g.chunk(size, 1))
                 for text, g in known_gradients(whole, targets, size).items()}  # fmt: skip
        yield compare.tensors(f"{kind}gradients", gradients, known.pop(""), known)
    width = -(-VOCABULARY // size)
    shape = max(results["largest"], key=torch.Size.numel)
    yield Property(
        "largest tensor",
        f"{list(shape)}; logits of a rank have up to [{TOKENS}, {width}]",
        shape.numel() <= TOKENS * width,
        "A tensor has the logits of the whole vocabulary: then each rank needs as much memory as "
        "without tensor parallelism.",
    )
    limit = NUMBERS * TOKENS * 8  # of what a rank puts in; an all-gather puts out that of all
    sent = max(sum(nbytes // (size if kind == "all-gather" else 1)
                   for kind, (_, nbytes) in own.items()) for own in results["sent"])  # fmt: skip
    mistakes = {
        "Here the numbers of whole parts of the vocabulary are sent. What others need of a part is "
        "its largest logit, its sum of exponentials, and the target's logit.": (
            sent >= TOKENS * width * 8
        ),
        "Each rank needs of a token the largest logit, the sum of exponentials, and the target's "
        "logit, each once.": sent > 0,
    }
    text = f"{sent:,}; {NUMBERS} numbers a token are {limit:,}"
    yield Property("bytes", text, 0 < sent <= limit, mistakes)
    yield compare.at_most(
        "collectives",
        [sum(calls for calls, _ in of_rank.values()) for of_rank in results["sent"]],
        2 * NUMBERS,
        "{}, and at most {}",
        "Each collective takes time to start: send the numbers of all tokens at once.",
    )
    yield compare.at_most(
        "kept",
        results["kept"],
        2.5,
        "{:.1f} times the bytes of a rank's logits between forward and backward",
        "What backward needs is of the size of the logits once, softmax minus onehot: more is kept "
        "for nothing.",
    )


RUN = Run(flags="--tp 2 --microbatch 6")


def install(cross_entropy: Callable) -> None:
    """Let tensor parallelism compute all logits of a rank at once, and give them to the student."""

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
        logits = hidden.flatten(0, 1) @ weight.T
        return cross_entropy(logits, targets.flatten(), vocabulary.vocab_start)

    chunked_loss.chunked_loss = loss
