"""Check that model.py, as it may have been changed, computes the same on every split.

What splits a model knows a Llama's layers, but not what a change computes between them. So before
a run a small model with fixed weights is split as the run's model will be, by parallelize(). The
loss and the gradient of every parameter must be those of the same small model on one process."""

import math
import zlib
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DistError

from model import IGNORE, Llama, LlamaConfig
from parallel import ParallelConfig, World, gradient_sync, parallelize
from plumbing.processes import UserError
from plumbing.shards import assign_shard, to_local
from techniques.context_parallel import own_tokens, share_sequences
from techniques.pipeline import Pipeline
from techniques.schedules import lines_of, read_schedule
from techniques.zero1 import optimizer_parameters
from text.batch import Batch, kernel_widths

HINTS = {
    "tp": "from wq to wo a rank has some of the heads, from w1 to w2 some of the features, and in "
    "the loss some of the vocabulary",
    "pp": "each stage calls Llama.forward on its layers, and is given x alone, so move what you "
    "added there into a block, or do it only where the embedding or the output is",
    "cp": "let Llama.forward hand `documents` on to attend, and mix tokens nowhere else; what "
    "attend does to scores belongs in techniques/context_parallel.py, too",
}


def check_model(config: LlamaConfig, world: World) -> None:
    """Raise UserError on all ranks if a small model has another loss or gradient when it is split
    as the run's model is, in float64, or other logits by the kernel for documents. Only --tp, --pp
    and --cp are looked at: with replicas and FSDP each rank computes whole layers."""
    parallel, n_layers, rows = world.parallel, 4, 1
    pp, tp, cp = parallel.pp, parallel.tp, parallel.cp
    if pp > 1:
        n_layers = config.n_layers  # so that stages begin where those of the run do
        schedule = read_schedule(lines_of(parallel.schedule, pp, pp, parallel.stages_per_rank))
        rows = 1 + max(action.microbatch for order in schedule for action in order)
    # With cp, only long rows show a sliding window, whole or packed.
    cases = [(768, False), (768, True)] if cp > 1 else [(8, False)] * (pp * tp > 1)
    small = small_config(config, n_layers, tp)
    for length, packed in cases:
        T = math.ceil(length / (2 * cp * tp)) * 2 * cp * tp
        batch = sequences(rows, T, small, packed).to(world.device)
        if difference := difference_by_split(small, batch, world):
            flags = [flag for flag in HINTS if getattr(parallel, flag) > 1]
            raise UserError(
                f"{' with '.join(f'--{flag}' for flag in flags)} {difference}, since model.py was "
                f"changed: {'; '.join(HINTS[flag] for flag in flags)}"
            )
    check_documents(config, world)


def difference_by_split(config: LlamaConfig, batch: Batch, world: World) -> str:
    """Return what a split model computes otherwise than one process does, or "".

    Raises UserError where --async-tp cannot compute it."""
    plain = dict(compile=False, float8="none", offload=False, offload_activations=False)
    parallel = replace(world.parallel, dtype=torch.float64, **plain)
    alone = replace(world, size=1, parallel=ParallelConfig(dtype=torch.float64))
    expected_loss, expected = loss_and_gradients(config, batch, alone)
    try:
        loss, found = loss_and_gradients(config, batch, replace(world, parallel=parallel))
    except (TypeError, AttributeError, ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError | DistError) or "gloo" in str(error):
            raise  # not because of the model
        if parallel.async_tp:
            raise UserError(
                f"--async-tp lets the input of attention and feed-forward arrive while layers "
                f"multiply it, and this model does more with it ({error}): leave out --async-tp"
            )
        remedy = '; PLAN["layers.*.attention"] lists the inputs of attention' * (parallel.tp > 1)
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}{remedy}"
        return f"fails where one process does not ({reason})"
    # Ranks along cp compute parts of a sum, and DDP and FSDP average them.
    names, cp = list(expected), parallel.cp
    wrong = [names.index(n) for n in found if differs(found[n], expected[n] / cp)]
    rows = world.all_gather_scalars([loss, max(wrong, default=-1)])
    if differs(rows[:, 0].sum() / world.size * parallel.pp, expected_loss / cp):
        return "computes another loss than one process"
    last = int(rows[:, 1].max())  # backward goes from the last: those after a fault are right
    return f"computes another gradient of {names[last]} than one process" if last >= 0 else ""


@torch.no_grad()
def differs(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> bool:
    """Return whether a tensor, or this rank's shard of it, is not that of `expected`."""
    assign_shard(own := torch.empty_like(found), expected)
    return not to_local(found - own).norm() <= tolerance * expected.norm()  # NaN differs, too


def loss_and_gradients(config: LlamaConfig, batch: Batch, world: World) -> tuple[Tensor, dict]:
    """Return the loss of this rank's tokens, and the gradients of its parameters by name, of a
    model with fixed weights."""
    with torch.device("meta"):
        model = Llama(config)
    runner, loss = parallelize(model, world, with_fixed_weights), 0
    microbatches = share_sequences(batch, world).microbatches(1)
    if isinstance(runner, Pipeline):
        loss = runner.accumulate(microbatches)
    else:
        for part in microbatches:
            with gradient_sync(world.parallel, runner, last=True):
                (part_loss := runner(*part.inputs, documents=part.documents)).backward()
            loss += part_loss.detach()
    named = optimizer_parameters(model).items()
    return loss, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}


@torch.no_grad()
def check_documents(config: LlamaConfig, world: World) -> None:
    """Raise UserError if a small model computes other logits with a mask than by the kernel for
    documents, which in training takes the place of document_mask, where there is one; or if --cp
    has none for heads of this width."""
    device, dtype, cp = world.device, world.parallel.dtype, world.parallel.cp
    if config.head_dim not in (widths := kernel_widths(device.type, dtype)):
        if widths and cp > 1:
            raise UserError(
                f"--cp needs heads of a width in {widths} on this device, and they have "
                f"{config.head_dim}: choose other --dim or --n-heads, or --dtype float32"
            )
        return
    model = with_fixed_weights(Llama(small := small_config(config, 4)).double()).to(device, dtype)
    rank = world.cp_mesh.get_local_rank() if cp > 1 else 0
    for packed in (False, True) if cp > 1 else (True,):
        batch = sequences(1, math.ceil(512 / cp) * 2 * cp, small, packed).to(device)
        own = share_sequences(batch, world)
        found = model(own.tokens, positions=own.positions, documents=own.documents)
        expected = own_tokens(model(batch.tokens, positions=batch.positions), rank, cp)
        if differs(found, expected, tolerance=0.03):  # bfloat16's roundings add up
            raise UserError(
                "Documents.attention and document_mask give other logits, since model.py was "
                "changed: change both alike, or remove the entry of DOCUMENT_KERNELS"
            )


def small_config(config: LlamaConfig, n_layers: int = 1, tp: int = 1) -> LlamaConfig:
    """Return small sizes, which tp divides."""
    sizes = dict(dim=32 * tp, n_heads=2 * tp, n_kv_heads=tp, ffn_dim=6 * tp, vocab_size=5 * tp)
    return replace(config, n_layers=n_layers, **sizes)


def sequences(rows: int, T: int, config: LlamaConfig, packed: bool = False) -> Batch:
    """Return rows of T tokens, a third of them without a target. If packed, a row has three
    documents, the second of one token."""
    index = torch.arange(rows * T).view(rows, T)
    tokens = index**2 % 61 % config.vocab_size
    targets = tokens.roll(-1, 1).masked_fill(index % 3 == 0, IGNORE)
    positions = torch.cat([torch.arange(n) for n in (T // 3, 1, T)])[:T].repeat(rows, 1)
    return Batch(tokens, targets, positions if packed else None, text_bytes=0)


@torch.no_grad()
def with_fixed_weights(model: Llama) -> Llama:
    """Set the weights of a model, and let it evaluate: dropout would be random."""
    for name, parameter in model.named_parameters():
        assign_shard(parameter, fixed_weight(name, parameter))
    return model.eval()


def fixed_weight(name: str, like: Tensor) -> Tensor:
    """Return weights in float64 that depend on nothing but the parameter's name and shape, and are
    large enough for attention and activations to be far from linear."""
    phase = zlib.crc32(name.encode()) % 1000
    waves = (torch.arange(like.numel(), dtype=torch.float64) ** 2 + phase).sin().view(like.shape)
    return 1 + waves / 2 if like.ndim == 1 else waves / 2


@torch.no_grad()
def layers_caveat(whole: Llama, float8: str) -> str:
    """Return a one-line warning if adapters or 8 bits, which replace linear layers, have no effect
    somewhere, since a small model does not call the layer; else ""."""
    if float8 == "none" and all(parameter.requires_grad for parameter in whole.parameters()):
        return ""
    model = with_fixed_weights(Llama(small := small_config(whole.config)).double())
    layers = {name: m for name, m in model.layers.named_modules() if isinstance(m, nn.Linear)}
    not_called = set(layers)
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda *_, name=name: not_called.discard(name))
    model(sequences(1, 4, small).tokens)
    if not not_called:
        return ""
    name = min(not_called).partition(".")[2]  # without the number of the block
    return (
        f"note: adapters and 8 bits have no effect in {name}, which model.py did not call in a "
        f"trial: it has to write {name.rpartition('.')[2]}(x), not F.linear(x, its weight)"
    )


@torch.no_grad()
def loss_caveat(config: LlamaConfig) -> str:
    """Return a one-line warning if the loss in validation is not the cross entropy of the logits
    that generation uses, else "". Both are computed from the output matrix, each in its own way."""
    model = with_fixed_weights(Llama(small := small_config(config)).double())
    tokens = sequences(1, 4, small).tokens
    expected = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum")
    if torch.isclose(model(tokens, targets=tokens), expected, rtol=1e-9):
        return ""
    return (
        "note: the loss in validation is not the cross entropy of the logits that generation uses: "
        "a change to logits belongs in logits_of"
    )


@torch.no_grad()
def check_equal_replicas(model: nn.Module, world: World) -> None:
    """Raise UserError where ranks that should have the same weights have different ones, as with
    other files on a second node or weights drawn differently. Compares norms, and sums of codes."""
    local = [to_local(p) for p in model.parameters()]
    norm = torch.nn.utils.get_total_norm([p for p in local if p.is_floating_point()])
    codes = sum(p.sum() for p in local if not p.is_floating_point())  # of matrices in 4 bits
    parallel = world.parallel
    of_replica = parallel.shard * parallel.tp
    norms = world.all_gather_scalars([norm, codes])
    norms = norms.view(parallel.pp, parallel.replicate, of_replica, 2)
    different = ((norms - norms[:, :1]).abs() > 1e-6 * norms[:, :1]).nonzero().tolist()
    if different:
        stage, replica, place, _ = different[0]
        first = stage * parallel.replicate * of_replica + place
        raise UserError(
            f"rank {first + replica * of_replica} begins with other weights than rank {first}: "
            f"give every node the same files, and draw weights from generator_for(name, seed) as "
            f"Llama.init_weights does"
        )
