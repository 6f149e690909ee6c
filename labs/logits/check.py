"""The check of labs/logits."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.machinery import compare, student
from labs.machinery.compare import Property
from labs.machinery.lab import LargestTensor
from labs.machinery.student import check_returned
from model import IGNORE
from perf.instruments import Counted, Live

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
# Name of a line -> which logits, and which targets. The first two calls have the same logits.
CASES = {"{}": (0, 0), "{} again": (0, 0), "large {}": (1, 0), "{} of one": (0, 1)}
HOOKED = (
    "The first call is right, and the second with the same logits is not: a hook on logits stays "
    "there, and so does what a call keeps."
)
OF_ONE = "All targets lie in rank 0's part. The others have no target, and take part all the same."


def tensors(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return two tensors of logits, the second of them with large ones, and two of targets, the
    second of them with targets in rank 0's part alone."""
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
    of_one = torch.where(targets == IGNORE, IGNORE, targets % 5)
    return list(logits), [targets, of_one]


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Compute loss and gradient of all cases. Return them, with the largest tensor and what was
    sent."""
    both, of_cases = tensors(seed)
    both = [whole.chunk(size, 1)[rank].clone().requires_grad_() for whole in both]
    losses = []
    gradients = []
    kept = []
    cross_entropy = load()
    for of_logits, of_targets in CASES.values():
        logits, targets = both[of_logits], of_cases[of_targets]
        logits.grad = None
        with LargestTensor() as largest, Counted(None) as counted:
            with Live([logits, targets]) as live:
                before = live.now
                loss = cross_entropy(logits, targets, facts(size)["starts"][rank])
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


def facts(size: int) -> dict:
    """Return where the ranks' parts of the vocabulary begin, and where rank * v is."""
    parts = torch.arange(VOCABULARY).chunk(size)
    own_widths = [rank * len(part) for rank, part in enumerate(parts)]
    return {"starts": [int(part[0]) for part in parts], "own_widths": own_widths}


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    both, of_cases = tensors(seed)
    mistakes = {"{} again": HOOKED, "{} of one": OF_ONE}
    for i, (name, (of_logits, of_targets)) in enumerate(CASES.items()):
        losses, gradients = ([of[i] for of in results[key]] for key in ("losses", "gradients"))
        whole = both[of_logits].clone().requires_grad_()
        targets = of_cases[of_targets]
        right = F.cross_entropy(whole, targets, ignore_index=IGNORE, reduction="sum")
        mistake = mistakes.get(name, "")
        yield compare.numbers(name.format("loss"), losses, right.item(), mistake)
        (SCALE * right).backward()
        wanted = list(whole.grad.chunk(size, 1))
        yield compare.tensors(name.format("gradients"), gradients, wanted, otherwise=mistake)
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
        "logit, each once.": True,
    }
    text = f"{{:,}}; {NUMBERS} numbers a token are {{:,}}"
    yield compare.at_most("bytes", [sent], limit, text, mistakes)
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
