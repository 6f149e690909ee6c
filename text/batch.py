"""A batch of token ids, where its documents begin, and attention that stays within them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model import IGNORE
from plumbing.devices import cast_by_autocast

DOCUMENT_KERNELS = {("cuda", torch.bfloat16): range(8, 257, 8)}  # device, dtype -> head widths
MOST_STARTS: dict[int, int] = {}  # T -> columns of the widest document_starts in this run
VARLEN_TAKES_GQA = torch.__version__ >= "2.12"  # torch compares numbers, not text


def kernel_widths(device: str, dtype: torch.dtype) -> Collection[int]:
    """Return the widths of heads with which a kind of device has a kernel for documents."""
    return DOCUMENT_KERNELS.get((device, dtype), ())


class Documents(NamedTuple):
    """Where the documents of a microbatch are, for attention that computes nothing between them."""

    # [n + 1] int32, cu_seqlens: the first query of each document in the flattened rows, then N.
    # Unused places have N, too, and so are empty documents.
    starts: Tensor
    key_starts: Tensor  # the same for keys: with --cp also those of other ranks' tokens
    max_queries: int  # an upper bound for one document: T, as other values would compile again
    max_keys: int  # the same for keys

    def have_kernel(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Return whether `attention` can be used; if not, model.document_mask does the same."""
        return head_dim in kernel_widths(self.starts.device.type, dtype)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # here, since it imports the compiler

        rows = [tensor.flatten(0, 1) for tensor in cast_by_autocast(q, k, v)]  # [N, heads, E]
        earlier = window - 1 if window else -1  # tokens; -1: all
        options = {"window_size": (earlier, 0)}  # no later ones: causal
        if VARLEN_TAKES_GQA:
            options["enable_gqa"] = q.shape[2] != k.shape[2]
        return varlen_attn(*rows, *self, **options).view_as(q)


@dataclass
class Batch:
    """B sequences of T tokens: one rank's share of a step's batch."""

    tokens: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64: the token that follows, IGNORE where there is no loss
    positions: Tensor | None  # [B, T] int64: index in the document; None without document mask
    text_bytes: int  # bytes of text in the targets
    # The tokens of each document; without document mask, of each sequence. Padding of packed
    # rows is left out.
    lengths: Collection[int] = ()
    starts: Tensor | None = None  # [B, R] int32: with positions, their document_starts
    # What a task's loss has to know of each target, by name: [B, T] each.
    target_values: dict[str, Tensor] = field(default_factory=dict)
    before_forward: Callable[["Batch"], None] | None = None

    def prepare(self) -> None:
        """Is called before forward of this microbatch. By it a task tells layers or its loss what
        the arguments of forward do not (rewards.py, distill.py)."""
        if self.before_forward:
            self.before_forward(self)

    def __post_init__(self):
        if self.positions is not None and self.starts is None:
            self.starts = document_starts(self.positions)

    def count(self) -> Tensor:
        """Return the number of targets."""
        return (self.targets != IGNORE).sum()

    def sums_of_documents(self, x: Tensor) -> Tensor:
        """Return the sum of x [B, T] over each document, [B, R], of rows that begin with one."""
        return x.new_zeros(self.starts.shape).scatter_add(1, self.document_numbers, x)

    @property
    def document_numbers(self) -> Tensor:
        return (self.positions == 0).cumsum(1) - 1  # [B, T]: 0, 1, ... within a row

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the first arguments of a model's forward."""
        return self.tokens, self.targets, self.positions

    @property
    def documents(self) -> Documents | None:
        """Return where the documents are, as a model's forward takes it; None without positions."""
        if self.positions is None:
            return None
        T = self.tokens.shape[1]
        starts = flat_starts(self.starts, T)
        return Documents(starts, starts, T, T)

    def microbatches(self, size: int) -> list["Batch"]:
        """Return microbatches of `size` sequences, the last of which may have fewer. Their
        `text_bytes` and `lengths` are those of the whole batch."""
        parts = []
        for start in range(0, len(self.tokens), size):
            rows = slice(start, start + size)
            parts.append(self._with_tensors(itemgetter(rows)))
        return parts

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device. From pinned memory, the copy runs while the GPU computes."""
        is_gpu = device.type == "cuda"
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=is_gpu))

    def pinned(self) -> "Batch":
        """Copy to pinned memory, which a GPU can read directly."""
        return self._with_tensors(Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changed[name] = change(value)
        target_values = {name: change(value) for name, value in self.target_values.items()}
        return replace(self, **changed, target_values=target_values)


def document_starts(positions: Tensor) -> Tensor:
    """Return the columns where documents start, [B, R] int32. Rows with fewer are filled up with T.
    R is a power of 2 that only grows during a run: a compiled model compiles again for each value.

    positions [B, T]: 0 starts a document, and so does a row."""
    T = positions.shape[1]
    is_start = F.pad(positions[:, 1:] == 0, (1, 0), value=True)
    number = is_start.cumsum(1)  # [B, T]: 1, 2, ... within a row
    R = 1 << (int(number.max()) - 1).bit_length()  # rounded up to a power of 2
    R = max(R, MOST_STARTS.get(T, 1))
    MOST_STARTS[T] = R
    starts = positions.new_full((len(positions), R), T)
    rows, columns = is_start.nonzero(as_tuple=True)
    starts[rows, number[rows, columns] - 1] = columns
    return starts.int()


def flat_starts(starts: Tensor, T: int) -> Tensor:
    """Return columns [B, R] of rows of T tokens as indices in the flattened rows, then B T."""
    N = len(starts) * T
    first_of_row = torch.arange(0, N, T, dtype=torch.int32, device=starts.device)
    return F.pad((starts + first_of_row[:, None]).flatten(), (0, 1), value=N)
