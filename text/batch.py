"""A batch of token ids, where its documents begin, and attention that stays within them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model import IGNORE
from plumbing.devices import cast_by_autocast

DOCUMENT_KERNELS = {("cuda", torch.bfloat16): range(8, 257, 8)}  # -> head widths they take
LARGEST_R: dict[int, int] = {}  # tokens of a row -> the R of document_starts so far
VARLEN_TAKES_GQA = torch.__version__ >= "2.12"


def kernel_widths(device: str, dtype: torch.dtype) -> Collection[int]:
    """Return the widths of heads with which a kind of device has a kernel for documents."""
    return DOCUMENT_KERNELS.get((device, dtype), ())


class Documents(NamedTuple):
    """Where the documents of a microbatch are, for attention that computes nothing between them."""

    starts: Tensor  # [n + 1] int32, cu_seqlens: first token of each in the flattened rows, then N
    key_starts: Tensor  # the same of keys, of which there may be more than queries
    max_length: int  # no document has more queries; some may have none
    max_keys: int  # nor more keys. Both are a row's tokens: each value would be compiled

    def have_kernel(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Return whether `attention` can be used; if not, model.document_mask does the same."""
        return head_dim in kernel_widths(self.starts.device.type, dtype)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # which imports the compiler

        rows = (tensor.flatten(0, 1) for tensor in cast_by_autocast(q, k, v))  # [N, heads, E]
        gqa = dict(enable_gqa=q.shape[2] != k.shape[2]) if VARLEN_TAKES_GQA else {}
        return varlen_attn(*rows, *self, window_size=(-1, 0), **gqa).view_as(q)


@dataclass
class Batch:
    """B sequences of T tokens: one rank's share of a step's batch."""

    tokens: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64: the token that follows, IGNORE where there is no loss
    positions: Tensor | None  # [B, T] int64: index in the document; None without document mask
    text_bytes: int  # bytes of text in the targets
    starts: Tensor | None = None  # [B, R] int32: with positions, their document_starts
    # The loss of a microbatch, where it is no sum over tokens (preferences.py, rewards.py):
    objective: Callable | None = None  # (losses of the targets [B, T], Batch) -> a sum over units
    units: Tensor | None = None  # [B]: how many there are in a row; None: each target is one
    given: Tensor | None = None  # [B, ...]: what else the objective has to know

    def __post_init__(self):
        if self.positions is not None and self.starts is None:
            self.starts = document_starts(self.positions)

    @property
    def count(self) -> Tensor:
        """Return by what a step divides the sum of the losses: this rank's part of it."""
        return (self.targets != IGNORE).sum() if self.units is None else self.units.sum()

    def loss(self, computed: Tensor) -> Tensor:
        """Return the loss, a sum, of what a model's forward returned: the sum itself, or [B, T]."""
        return self.objective(*self.whole_rows(computed)) if computed.ndim else computed

    def whole_rows(self, losses: Tensor) -> tuple[Tensor, "Batch"]:
        """Return the losses of whole rows, and the batch of these rows, of which a rank may have a
        part of the tokens."""
        return losses, self

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
        `text_bytes` are those of the whole batch."""
        rows = (slice(start, start + size) for start in range(0, len(self.tokens), size))
        return [self._with_tensors(itemgetter(part)) for part in rows]

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device. From pinned memory, the copy runs while the GPU computes."""
        in_turn = dict(non_blocking=device.type == "cuda")  # with the GPU's other work
        return self._with_tensors(lambda tensor: tensor.to(device, **in_turn))

    def pinned(self) -> "Batch":
        """Copy to pinned memory, which a GPU can read directly."""
        return self._with_tensors(Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        tensors = {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})


def document_starts(positions: Tensor) -> Tensor:
    """Return the columns where documents start, [B, R] int32, filled up with T. R is a power of 2
    that only grows during a run, since a compiled model compiles again for each value.

    positions [B, T]: 0 starts a document, and so does a row."""
    T = positions.shape[1]
    is_start = F.pad(positions[:, 1:] == 0, (1, 0), value=True)
    number = is_start.cumsum(1)  # [B, T]: 1, 2, ... within a row
    most = 1 << (int(number.max()) - 1).bit_length()  # the next power of 2
    LARGEST_R[T] = max(LARGEST_R.get(T, 1), most)
    starts = positions.new_full((len(positions), LARGEST_R[T]), T)
    rows, columns = is_start.nonzero(as_tuple=True)
    starts[rows, number[rows, columns] - 1] = columns
    return starts.int()


def flat_starts(starts: Tensor, T: int) -> Tensor:
    """Return columns [B, R] of rows of T tokens as indices in the flattened rows, then B T."""
    first_of_row = torch.arange(0, len(starts) * T, T, dtype=torch.int32, device=starts.device)
    return F.pad((starts + first_of_row[:, None]).flatten(), (0, 1), value=len(starts) * T)
