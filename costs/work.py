"""A training step: what costs/ predicts and bench.py measures."""

from dataclasses import dataclass

from model import Llama
from parallel import ParallelConfig
from text.batch import kernel_widths


@dataclass(frozen=True)
class Work:
    """A training step: a model, how it is split over ranks, and the sequences of the step.

    With another `parallel` or `microbatch` (dataclasses.replace), it is the same batch in other
    portions."""

    model: Llama  # whole, as it is before parallelize, and never changed; on `meta` or not
    parallel: ParallelConfig
    batch: int  # sequences of a step, over all ranks
    microbatch: int  # sequences that a rank computes at a time
    seq_len: int  # tokens of a whole sequence
    document: int = 0  # tokens of a document, to which attention is confined; 0: the sequence
    on_gpu: bool = False

    @property
    def sequences(self) -> int:
        """Sequences that a rank works on in a step, with others along cp or alone."""
        parallel = self.parallel
        return self.batch * parallel.cp // (parallel.replicate * parallel.shard)

    @property
    def microbatches(self) -> int:
        return self.sequences // self.microbatch

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a rank; ranks along tp have the same ones."""
        return self.microbatch * self.seq_len // self.parallel.cp

    @property
    def fused(self) -> bool:
        """Whether kernels need fewer intermediate results: on a GPU, or compiled."""
        return self.on_gpu or self.parallel.compile

    @property
    def mask_width(self) -> int:
        """Keys in attention's mask for each query: seq_len, or 0 where there is no mask, since each
        sequence is one document or a kernel needs none. With context parallelism a GPU without such
        a kernel always has one; chunks r and 2 cp - 1 - r read the keys up to their ends, on
        average (2 cp + 1) / (4 cp) of seq_len."""
        device, cp = "cuda" if self.on_gpu else "cpu", self.parallel.cp
        if self.model.config.head_dim in kernel_widths(device, self.parallel.dtype):
            return 0
        if cp > 1:
            has_mask = self.document or self.on_gpu
            return (2 * cp + 1) * self.seq_len // (4 * cp) if has_mask else 0
        return self.seq_len if self.document else 0
