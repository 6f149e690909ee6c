"""How a training step is split over ranks (ParallelConfig), the step itself (Work), its results.

A field that is declared by knob(...) is its own flag: `cp` is --cp in every script that trains or
measures. The field also decides the flag's help, the command that a plan prints, the values that
tests combine, and whether a resumed run may change it. costs/plans.py lists what `bench.py plan`
searches.

A Work is one step of training: a model, how it is split, and the sequences of the step. Techniques
refuse a Work, costs/ predicts one, and bench.py measures one. Totals are the results of a step.
"""

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

import torch

from model import Llama
from plumbing import flags
from text.batch import kernel_widths

# What a flag changes. A resumed run may change its layout and speed, but not its arithmetic: that
# would be another experiment.
LAYOUT, SPEED, ARITHMETIC = "layout", "speed", "arithmetic"


@dataclass(frozen=True)
class Strategy:
    """One way for ranks with different sequences to share weights, gradients and AdamW's state."""

    wrapper: str  # what parallel.py puts around the model: ddp, zero1 or fsdp
    copy_spans: str  # who shares one copy of the weights: a "rank", "node" (or --shard), "world"
    sharded: dict[str, str] = field(default_factory=dict)  # kind of state -> mesh dimension
    automatic: bool = True  # --dp auto may choose it

    @property
    def uses_fsdp(self) -> bool:  # parameters are DTensors, sharded while the model is on meta
        return self.wrapper == "fsdp"

    def shard_size(self, data_ranks: int, in_node: int) -> int:
        """Return the size of shard for `data_ranks` ranks, if each node has `in_node` of them."""
        return {"rank": 1, "node": in_node, "world": data_ranks}[self.copy_spans]


EVERYTHING = {"parameters": "shard", "gradients": "shard", "optimizer": "shard"}  # FSDP
# ZeRO-1: all but parameters. Whole gradients exist until the last backward has sent them.
ZERO1_STATE = {"gradients": "replicate", "optimizer": "replicate"}
STRATEGIES = {  # --dp auto takes the first that fits
    "ddp": Strategy("ddp", "rank"),
    "zero1": Strategy("zero1", "rank", ZERO1_STATE, automatic=False),
    "hsdp": Strategy("fsdp", "node", EVERYTHING),
    "fsdp": Strategy("fsdp", "world", EVERYTHING),
}


def knob(default, kind: str, help: str, choices: Iterable[str] = (), **more):
    """Return a field of ParallelConfig that is a flag, too (plumbing/flags.py). Configurations that
    code builds have its `default`. A command line without the flag gives `unset`, an argument of
    `more`: None lets the run choose. So code has the `optimizer` "adamw", and a run from scratch
    chooses Muon."""
    plain = flags.flag(default, help, choices=choices, may_change=kind != ARITHMETIC, **more)
    return field(default=default, metadata={**plain.metadata, "kind": kind})


DTYPES = ("float32", "bfloat16", "float64")


def dtype_named(text: str) -> torch.dtype:
    """Argument type: a dtype of computation."""
    if text not in DTYPES:
        choices = ", ".join(map(repr, DTYPES))
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {choices})")
    return getattr(torch, text)


# fmt: off


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is split over ranks and computed there.

    As a command line gives it, `dp` and `reshard` may be "auto", and fields that are left to the
    run None. `decided` and costs/search.py put values in their place; only then it has a
    `strategy`."""

    dp: str = knob("ddp", LAYOUT, "data parallelism: which state each rank holds a shard of "
                   "(default: auto, by what fits in memory)", ["auto", *STRATEGIES], unset="auto")
    replicate: int = 1  # ranks along this dimension; the other sizes determine it
    shard: int = knob(1, LAYOUT, "ranks that share one copy of the model with --dp hsdp "
                      "(default: the ranks of a node)", unset=None)
    tp: int = knob(1, LAYOUT, "tensor parallelism: ranks that share every matrix product and see "
                   "the same sequences")
    cp: int = knob(1, LAYOUT, "context parallelism: ranks of data parallelism that share each "
                   "sequence, for long ones")
    ep: int = knob(1, LAYOUT, "expert parallelism: ranks that share one copy of a model's experts, "
                   "and send each other their tokens")
    pp: int = knob(1, LAYOUT, "pipeline parallelism: ranks that each hold some of the layers and "
                   "pass microbatches on")
    schedule: str = knob("1f1b", LAYOUT, "order of a pipeline's microbatches: gpipe, 1f1b, "
                         "interleaved, or a file with a line for each rank")
    stages_per_rank: int = knob(1, LAYOUT, "stages that each rank of a pipeline holds (default: 2 "
                                "with --schedule interleaved, else 1)", unset=None)
    reshard: str = knob("weights", LAYOUT, "what fsdp and hsdp shard again after use: none; "
                        "weights; all: weights, and gradients of each microbatch; adapters: a "
                        "frozen base stays whole (default: weights, or all if memory is short)",
                        ["auto", "none", "adapters", "weights", "all"], unset="auto")
    offload: bool = knob(False, LAYOUT, "keep parameters and optimizer state of fsdp and hsdp in "
                         "CPU memory")
    checkpointing: str = knob("none", LAYOUT, "activations that backward recomputes",
                              ["none", "products", "selective", "full"])
    offload_activations: bool = knob(False, LAYOUT, "with --checkpointing full: keep the inputs of "
                                     "blocks in CPU memory until backward")
    compile: bool = knob(False, SPEED, "compile the transformer blocks (default: on a GPU with "
                         "Triton)", unset=None)
    async_tp: bool = knob(False, SPEED, "with --tp: send chunks of the tokens while others are "
                          "multiplied")
    dtype: torch.dtype = knob(torch.float32, ARITHMETIC, "dtype of computation (default: bfloat16 "
                              "on a GPU that has it, else float32)", unset=None, type=dtype_named,
                              metavar=f"{{{','.join(DTYPES)}}}")
    float8: str = knob("none", ARITHMETIC, "multiply the blocks' matrices in 8 bits, a scale for "
                       "each tensor, row or 32 elements; emulated where a device cannot",
                       ["none", "tensorwise", "rowwise", "mxfp8"])
    optimizer: str = knob("adamw", ARITHMETIC, "muon: for the matrices of the blocks, and adamw "
                          "for the rest (default: muon where train.py or `bench.py step` begins "
                          "from scratch, else adamw)", ["muon", "adamw"], unset=None,
                          group="optimizer step")
    moments: str = knob("float32", ARITHMETIC, "dtype of the moments of --optimizer adamw: "
                        "training takes 16 bytes a parameter with float32, 12 with bfloat16",
                        ["float32", "bfloat16"], group="optimizer step")
    # fmt: on
    @property
    def strategy(self) -> Strategy:
        """The entry of STRATEGIES. DDP with tensor, expert or pipeline parallelism runs as HSDP
        with shard = 1: DDP takes no DTensors, and no microbatches that overlap."""
        splits = self.tp * self.ep * self.pp > 1
        return STRATEGIES["hsdp" if self.dp == "ddp" and splits else self.dp]

    @property
    def size(self) -> int:
        return self.pp * self.replicate * self.shard * self.tp

    @property
    def data_size(self) -> int:
        """Number of shares of a batch; ranks along tp, cp and pp work on one share together."""
        return max(1, self.replicate * self.shard // self.cp)  # too few ranks are refused later

    def padded(self, rows: int) -> int:
        """Return how many rows there are with padding that gives each share equally many."""
        return rows + -rows % self.data_size

    @property
    def multiple_of_tokens(self) -> int:
        """Ranks share a sequence evenly if it has a multiple of this many tokens."""
        return 2 * self.cp * self.tp

    @property
    def forwards_meet(self) -> bool:
        """Whether every forward sends tokens to ranks with other sequences."""
        return self.ep > 1

    @property
    def expert_shard(self) -> int:
        """Number of ranks over which FSDP shards the experts that --ep leaves on a rank. A copy of
        all else spans shard x tp ranks. A copy of the experts spans ep x expert_shard: as many, or
        ep if that is more."""
        return max(1, self.shard * self.tp // self.ep)

    @property
    def stack_shard(self) -> int:
        """Number of ranks that share a stack of matrices: the same matrix of all experts."""
        return self.ep * self.expert_shard

    @property
    def expert_replicate(self) -> int:
        return self.replicate * self.shard * self.tp // self.stack_shard

    def shards(self, kind: str, prefix: str = "") -> int:
        """Number of ranks that share one copy of "parameters", "gradients" or "optimizer" state.
        The dimensions that experts under --ep are sharded along have the prefix "expert_"."""
        dim = self.strategy.sharded.get(kind)
        return getattr(self, prefix + dim) if dim else 1

    @property
    def recomputes(self) -> bool:
        return self.checkpointing != "none"

    def group_size(self, dim: str) -> int:
        """Number of ranks in a group. `dim` is a key of PART_OF, "world", or "stage", which means
        all ranks with the same layers."""
        sizes = {"world": self.size, "stage": self.size // self.pp}
        return sizes.get(dim) or getattr(self, dim)

    def stride(self, dim: str) -> int:
        """How far apart neighbours in a group along `dim` are."""
        strides = dict(
            pp=self.size // self.pp,
            replicate=self.tp * self.shard,
            shard=self.tp,
            cp=self.tp,
            expert_replicate=self.stack_shard,
            expert_shard=self.ep,
        )
        return strides.get(dim, 1)

    @property
    def grad_bytes(self) -> int:
        return 8 if self.dtype == torch.float64 else 4

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight in matrix products. Trainable weights are stored in grad_bytes."""
        return self.dtype.itemsize

    @property
    def repeats_attention(self) -> bool:
        """Whether backward runs attention again. With --compile its output is saved."""
        return self.checkpointing == "full" and not self.compile

    def compiles_loss(self, on_gpu: bool) -> bool:
        """Return whether the loss is compiled: on a GPU, where a rank has the whole vocabulary."""
        return on_gpu and self.compile and self.tp == 1

    def fixes_shapes(self, on_gpu: bool) -> bool:
        """Return whether shapes within experts, too, are the same in every batch: one kernel takes
        the rows of all experts, and without --ep no rows are sent."""
        return on_gpu and self.dtype == torch.bfloat16 and self.ep == 1

    @property
    def moment_bytes(self) -> int:
        return 2 if self.moments == "bfloat16" else self.grad_bytes


# Groups of ranks that communicate, those whose ranks are farthest apart first.
DIMS = ("pp", "replicate", "shard", "cp", "ep", "tp")
OWN_GROUPS = ("cp", "ep")  # no dimensions of the mesh, but neighbours along several of them
# Group -> where a table counts it: FSDP shards experts along expert_shard, which counts as shard.
PART_OF = {dim: dim for dim in DIMS} | {"expert_replicate": "replicate", "expert_shard": "shard"}
FLAGS = {f.name: f for f in fields(ParallelConfig) if f.metadata}
LAYOUTS = [name for name, f in FLAGS.items() if f.metadata["kind"] == LAYOUT]
MAY_CHANGE = [name for name, f in FLAGS.items() if f.metadata["kind"] != ARITHMETIC]


def decided(asked: ParallelConfig, **chosen) -> ParallelConfig:
    """Return a configuration in which nothing is None: fields that the command line left open have
    the `chosen` values, or their defaults. `shard` is 1 until the mesh is known."""
    values = {name: getattr(asked, name) for name in FLAGS}
    left_open = [name for name, value in values.items() if value is None]
    if values["schedule"] == "interleaved":
        chosen = {"stages_per_rank": 2} | chosen  # as STAGES of techniques/schedules.py
    for name in left_open:
        values[name] = chosen.get(name, FLAGS[name].default)
    return ParallelConfig(**values | {"shard": 1})


def in_float64(parallel: ParallelConfig) -> ParallelConfig:
    """Return the same layout computed exactly: in float64, nothing compiled or offloaded."""
    changes = {name: f.default for name, f in FLAGS.items() if f.metadata["kind"] == ARITHMETIC}
    changes |= dict(dtype=torch.float64, compile=False, offload=False, offload_activations=False)
    return replace(parallel, **changes)


def with_optimizer_of(other: ParallelConfig, parallel: ParallelConfig) -> ParallelConfig:
    """Return `parallel` with the optimizer of another configuration."""
    return replace(parallel, optimizer=other.optimizer, moments=other.moments)


def flags_of(parallel: ParallelConfig, before: ParallelConfig | None = None) -> str:
    """Return the flags that ask for `parallel` on its processes: those not at their defaults, and
    those that a run chooses by itself if they are missing. Given `before`, those that differ."""
    names = {"dp", "dtype", "compile", "optimizer"} | ({"reshard"} if parallel.shard > 1 else set())
    # Only these strategies take --shard; with others its size follows from the processes.
    has_shard = parallel.dp in STRATEGIES and STRATEGIES[parallel.dp].copy_spans == "node"
    options = []
    for name in FLAGS:
        value = getattr(parallel, name)
        differs = value != getattr(before or ParallelConfig(), name)
        is_shown = name in names and not before
        if name == "shard":
            differs = has_shard and (differs or not before)
        if not differs and not is_shown:
            continue
        option = name.replace("_", "-")
        if value is False and FLAGS[name].metadata["flag"].unset is not None:
            continue  # there is no --no-NAME: it can only be left out
        if isinstance(value, bool):
            options.append(f"--{option}" if value else f"--no-{option}")
        else:
            options.append(f"--{option} {str(value).removeprefix('torch.')}")
    return " ".join(options)


# ------------------------------------------------------------------------------------------ a step


@dataclass(frozen=True)
class Work:
    """A training step: a model, how it is split over ranks, and the sequences of the step.

    dataclasses.replace(work, parallel=..., microbatch=...) computes the same batch in other
    portions."""

    model: Llama  # whole, as it is before parallelize, and never changed; on `meta` or not
    parallel: ParallelConfig
    batch: int  # sequences of a step, over all ranks
    microbatch: int  # sequences that a rank computes at a time
    seq_len: int  # tokens of a whole sequence
    document: int = 0  # most tokens of a document in packed rows; 0: rows are whole sequences
    on_gpu: bool = False
    references: int = 0  # forwards without gradients, as of a base (preferences.py)
    updates: int = 1  # of the optimizer in a step, each on one of so many parts of the batch
    teacher: Llama | None = None  # whole: its forward precedes a step (distill.py)

    @property
    def sequences(self) -> int:
        """Sequences that a rank works on in an update; ranks along cp share theirs."""
        return self.batch // self.updates // self.parallel.data_size

    @property
    def microbatches(self) -> int:
        return self.sequences // self.microbatch

    @property
    def length(self) -> int:
        """Tokens of a sequence on a rank; ranks along tp have the same ones."""
        return self.seq_len // self.parallel.cp

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a rank."""
        return self.microbatch * self.length

    @property
    def fused(self) -> bool:
        """Whether kernels need fewer intermediate results: on a GPU, or compiled."""
        return self.on_gpu or self.parallel.compile

    @property
    def mask_width(self) -> int:
        """Number of keys in a query's mask; 0 if there is none. A kernel that reads the documents
        needs no mask. Without that kernel, sequences of several documents need one, and with
        --cp all sequences do. Under --cp a rank has chunks r and 2 cp - 1 - r of 2 cp, and the keys
        end with the chunk: on average they are (2 cp + 1) / (4 cp) of seq_len."""
        device, cp = "cuda" if self.on_gpu else "cpu", self.parallel.cp
        if self.model.config.head_dim in kernel_widths(device, self.parallel.dtype):
            return 0
        if cp > 1:
            return (2 * cp + 1) * self.seq_len // (4 * cp)
        return self.seq_len if self.document else 0


@dataclass(frozen=True)
class Totals:
    """Results of a step or of an evaluation, over all ranks."""

    loss: float  # the sum of the losses of all target tokens, in nats; or what else a task adds up
    count: int  # the divisor of the loss: the target tokens, or the pairs or answers of a task
    text_bytes: int  # bytes of text that the target tokens stand for
    tokens: int = 0  # of a step, without padding
    flops: int = 0  # to train on them
    grad_norm: float = 0.0
    signal: int = 0  # the largest number of a signal that a rank received; 0: the run goes on

    @property
    def mean_loss(self) -> float:
        return self.loss / self.count

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits per byte of text, comparable between tokenizers."""
        return self.loss / math.log(2) / max(self.text_bytes, 1)
