"""Check a model.py that may have been changed: right gradients, and the same loss on every mesh.

Before a run, a small model with fixed weights computes a loss and its gradients, as a step of the
run will: through parallelize() and train.py's `accumulate`, in float64. On one process each
gradient must be the slope of the loss. Split as the run's model will be, by --tp, --pp or --cp, the
small model must have the loss and the gradients that it has on one process."""

import math
import traceback
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DistError

from config import ParallelConfig
from files.published import fixed_weight, with_fixed_weights
from model import IGNORE, KVCache, Llama, LlamaConfig
from parallel import World, parallelize
from plumbing.processes import UserError
from plumbing.shards import assign_shard, to_local
from techniques.context_parallel import own_tokens, share_sequences
from techniques.schedules import lines_of, read_schedule
from techniques.zero1 import optimizer_parameters
from text.batch import Batch, kernel_widths

HINTS = {
    "tp": "from wq to wo a rank has some of the heads, from w1 to w2 some of the features, and in "
    "the loss some of the vocabulary",
    "pp": "each stage calls Llama.forward on its layers, and is given x alone, so move what you "
    "added there into a block, or do it only where the embedding or the output is",
    "cp": "let Llama.forward hand `documents` on to attend, and mix tokens nowhere else; if attend "
    "does something to scores, let SharedBatch.documents of techniques/context_parallel.py always "
    "make masks, with which it calls attend",
}


# What a changed model may raise.
MODEL_ERRORS = TypeError, AttributeError, ValueError, RuntimeError, LookupError
# accumulate(runner, batch, microbatch, world) runs forward and backward, and returns the loss.
Accumulate = Callable[[nn.Module, Batch, int, World], Tensor]


def check_model(config: LlamaConfig, world: World, accumulate: Accumulate) -> None:
    """Raise UserError on all ranks if a small model fails one of three checks: its gradients are
    the slope of its loss; --tp, --pp and --cp do not change loss or gradients (under DDP and FSDP
    each rank computes whole layers, so nothing is checked); and the kernel for documents computes
    the same logits as a mask."""
    if world.device.type == "mps":  # which has no float64
        world = replace(world, device=torch.device("cpu"))
    small = small_config(config, n_layers=2)
    try:
        Llama(small).init_weights()
    except ValueError as error:  # a parameter without an initial value
        raise UserError(str(error))
    check_gradients(small, world, accumulate)
    parallel, n_layers, rows = world.parallel, 4, 1
    pp, tp, cp = parallel.pp, parallel.tp, parallel.cp
    if pp > 1:
        n_layers = config.n_layers  # so that stages begin where those of the run do
        schedule = read_schedule(lines_of(parallel.schedule, pp, pp, parallel.stages_per_rank))
        rows = 1 + max(action.microbatch for order in schedule for action in order)
    # (tokens of a row, whether packed). Under --cp a sliding window changes long rows only.
    cases = [(768, False), (768, True)] if cp > 1 else [(8, False)] * (pp * tp > 1)
    small = small_config(config, n_layers, tp)
    for length, packed in cases:
        T = math.ceil(length / (2 * cp * tp)) * 2 * cp * tp
        batch = small_batch(rows, T, small, packed).to(world.device)
        if difference := difference_by_split(small, batch, world, accumulate):
            flags = [flag for flag in HINTS if getattr(parallel, flag) > 1]
            raise UserError(
                f"{' with '.join(f'--{flag}' for flag in flags)} {difference}, since model.py was "
                f"changed: {'; '.join(HINTS[flag] for flag in flags)}"
            )
    check_documents(config, world)


def one_process(world: World) -> World:
    """Return the world of this process without the others, in float64."""
    return replace(world, size=1, cp_mesh=None, parallel=ParallelConfig(dtype=torch.float64))


def check_gradients(config: LlamaConfig, world: World, accumulate: Accumulate) -> None:
    """Raise UserError if the gradient of a parameter is not the slope of the loss, as where the
    forward of an autograd.Function was changed and its backward was not; or if the loss is not a
    sum over the targets that are not IGNORE."""
    world, batch = one_process(world), small_batch(1, 8, config).to(world.device)
    model, runner = small_model(config, world)
    loss = accumulate(runner, batch, 1, world).item()
    gradients = gradients_of(model)
    without_targets = torch.full_like(batch.targets, IGNORE)
    twice = torch.cat([batch.tokens] * 2), torch.cat([batch.targets, without_targets])
    if not abs(runner(*twice).item() / loss - 1) < 1e-9:
        raise UserError(
            "another row without targets changes the loss, since model.py was changed: the loss "
            "must be a sum over targets, of which IGNORE does not count"
        )
    # Backward runs from the last parameter to the first: the first wrong gradient names the fault.
    for name, parameter in reversed(optimizer_parameters(model).items()):
        step, losses = fixed_weight(f"step of {name}", parameter).to(parameter), []
        step *= 1e-6 / step.norm()
        for sign in (1, -1):
            parameter.data.add_(step, alpha=sign)
            losses.append(runner(*batch.inputs).item())  # with gradients enabled, as in training
            parameter.data.sub_(step, alpha=sign)
        # The change of the loss along `step`, measured and as the gradient predicts it.
        slope, found = (losses[0] - losses[1]) / 2, (gradients[name] * step).sum().item()
        rounding = 1e-13 * abs(loss)
        if not abs(found - slope) <= 1e-5 * step.norm() * gradients[name].norm() + rounding:
            raise UserError(
                f"the gradient of {name} is not the slope of the loss, since model.py was changed: "
                f"if the change is in the forward of an autograd.Function, its backward needs it, "
                f"too; plain PyTorch needs none"
            )


def difference_by_split(
    config: LlamaConfig, batch: Batch, world: World, accumulate: Accumulate
) -> str:
    """Return in words how the split model differs from the same model on one process, or "".

    Raises UserError where --async-tp cannot compute it."""
    plain = dict(compile=False, float8="none", offload=False, offload_activations=False)
    parallel = replace(world.parallel, dtype=torch.float64, **plain)
    expected_loss, expected = loss_and_gradients(config, batch, one_process(world), accumulate)
    split = replace(world, parallel=parallel)
    try:
        loss, found = loss_and_gradients(config, batch, split, accumulate)
    except MODEL_ERRORS as error:
        if isinstance(error, torch.OutOfMemoryError | DistError) or "gloo" in str(error):
            raise  # not because of the model
        if parallel.async_tp:
            raise UserError(
                f"--async-tp lets the input of attention and feed-forward arrive while layers "
                f"multiply it, and this model does more with it ({error}): leave out --async-tp"
            )
        remedy = '; PLAN["layers.*.attention"] lists the inputs of attention' * (parallel.tp > 1)
        return f"fails where one process does not ({describe(error)}{remedy})"
    # Ranks along cp compute partial sums, which DDP and FSDP average.
    names, cp = list(expected), parallel.cp
    wrong = [names.index(n) for n in found if differs(found[n], expected[n] / cp)]
    rows = world.all_gather_scalars([loss, max(wrong, default=-1)])
    if differs(rows[:, 0].sum() / world.size * parallel.pp, expected_loss / cp):
        return "computes another loss than one process"
    last = int(rows[:, 1].max())  # the first that backward computes
    return f"computes another gradient of {names[last]} than one process" if last >= 0 else ""


@torch.no_grad()
def differs(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> bool:
    """Return whether a tensor, or this rank's shard of it, differs from that of `expected`."""
    assign_shard(own := torch.empty_like(found), expected)
    return not to_local(found - own).norm() <= tolerance * expected.norm()  # NaN differs, too


def describe(error: Exception) -> str:
    """Return an error as one line, with the line of model.py in which it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f" in line {f.lineno} of model.py" for f in frames if f.filename.endswith("/model.py")]
    return f"{type(error).__name__}{''.join(lines[-1:])}: {str(error).splitlines()[0]}"


def loss_and_gradients(
    config: LlamaConfig, batch: Batch, world: World, accumulate: Accumulate
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of this rank's tokens and the gradients of its parameters by name, for a
    model with fixed weights."""
    model, runner = small_model(config, world)
    loss = accumulate(runner, share_sequences(batch, world), 1, world)
    return loss, gradients_of(model)


def small_model(config: LlamaConfig, world: World) -> tuple[Llama, nn.Module]:
    """Return a model with fixed weights, and what parallelize makes of it, as in a run."""
    with torch.device("meta"):
        model = Llama(config)
    return model, parallelize(model, world, with_fixed_weights)


def gradients_of(model: Llama) -> dict[str, Tensor]:
    """Return the gradient of each parameter by name, zeros where it has none."""
    named = optimizer_parameters(model).items()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}


@torch.no_grad()
def check_documents(config: LlamaConfig, world: World) -> None:
    """Raise UserError if a small model has different logits with document_mask and with the kernel
    that replaces it in training on a GPU; or if that kernel, which --cp needs there, does not take
    heads of this width."""
    device, dtype, cp = world.device, world.parallel.dtype, world.parallel.cp
    if config.head_dim not in (widths := kernel_widths(device.type, dtype)):
        if widths and cp > 1:
            raise UserError(
                f"--cp needs heads of a width in {widths} on this device, and they have "
                f"{config.head_dim}: choose other --dim or --n-heads, or --dtype float32"
            )
        return
    model = with_fixed_weights(Llama(small := small_config(config, 4)).double()).to(device)
    if world.parallel.strategy.uses_fsdp or dtype != torch.bfloat16:
        model.to(dtype)
    else:  # autocast: a change of model.py may give the kernel another dtype
        model.float().compute_dtype = dtype
    rank = world.cp_mesh.get_local_rank() if cp > 1 else 0
    for packed in (False, True) if cp > 1 else (True,):
        batch = small_batch(1, math.ceil(512 / cp) * 2 * cp, small, packed).to(device)
        own = share_sequences(batch, world)
        found = model(own.tokens, positions=own.positions, documents=own.documents)
        expected = own_tokens(model(batch.tokens, positions=batch.positions), rank, cp)
        if differs(found, expected, tolerance=0.03):  # bfloat16's roundings add up
            raise UserError(
                "Documents.attention and document_mask give other logits, since model.py was "
                "changed: change both alike, or remove the entry of DOCUMENT_KERNELS"
            )


def small_config(config: LlamaConfig, n_layers: int = 1, tp: int = 1) -> LlamaConfig:
    """Return `config` with small sizes, which tp divides."""
    sizes = dict(dim=32 * tp, n_heads=2 * tp, n_kv_heads=tp, ffn_dim=6 * tp, vocab_size=5 * tp)
    return replace(config, n_layers=n_layers, **sizes)


def small_batch(rows: int, T: int, config: LlamaConfig, packed: bool = False) -> Batch:
    """Return rows of T tokens, a third of them without a target. If packed, a row has three
    documents, the second of one token."""
    index = torch.arange(rows * T).view(rows, T)
    tokens = index**2 % 61 % config.vocab_size
    targets = tokens.roll(-1, 1).masked_fill(index % 3 == 0, IGNORE)
    positions = torch.cat([torch.arange(n) for n in (T // 3, 1, T)])[:T].repeat(rows, 1)
    return Batch(tokens, targets, positions if packed else None, text_bytes=0)


@torch.no_grad()
def layers_caveat(whole: Llama, float8: str) -> str:
    """Return a one-line warning if model.py does not call some linear layer, so that what replaces
    it, an adapter or a layer in 8 bits, has no effect; else ""."""
    if float8 == "none" and all(parameter.requires_grad for parameter in whole.parameters()):
        return ""
    model = with_fixed_weights(Llama(small := small_config(whole.config)).double())
    layers = {name: m for name, m in model.layers.named_modules() if isinstance(m, nn.Linear)}
    not_called = set(layers)
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda *_, name=name: not_called.discard(name))
    model(small_batch(1, 4, small).tokens)
    if not not_called:
        return ""
    name = min(not_called).partition(".")[2]  # without the number of the block
    return (
        f"note: adapters and 8 bits have no effect in {name}, which model.py did not call in a "
        f"trial: it has to write {name.rpartition('.')[2]}(x), not F.linear(x, its weight)"
    )


@torch.no_grad()
def generation_caveat(config: LlamaConfig) -> str:
    """Return a line for each way in which generation differs from training, or "": the loss in
    validation is not the cross entropy of its logits; a cache changes the logits."""
    model = with_fixed_weights(Llama(small := small_config(config, n_layers=4)).double())
    tokens, cache, notes = small_batch(2, 6, small).tokens, KVCache(), []
    logits, positions = model(tokens), torch.arange(6).repeat(2, 1)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
    if not torch.isclose(model(tokens, targets=tokens), loss, rtol=1e-9):
        notes.append(
            "note: the loss in validation is not the cross entropy of the logits that generation "
            "uses: a change to logits belongs in logits_of"
        )
    try:
        for part in (slice(0, 4), slice(4, 5), slice(5, 6)):
            last = model(tokens[:, part], positions=positions[:, part], cache=cache)
        problem = "computes other logits than training" * differs(last[:, 0], logits[:, -1])
    except MODEL_ERRORS as error:
        problem = f"fails ({describe(error)})"
    if problem:
        notes.append(
            f"note: generation {problem}: only attention has a cache, and another layer that mixes "
            f"tokens needs one of its own"
        )
    return "\n".join(notes)


@torch.no_grad()
def check_equal_replicas(model: nn.Module, world: World) -> None:
    """Raise UserError where ranks that should have the same weights have different ones, as with
    other files on a second node or weights drawn differently. Compares norms, and sums of codes."""
    local = [to_local(p) for p in model.parameters()]
    norm = torch.nn.utils.get_total_norm([p for p in local if p.is_floating_point()])
    codes = sum(p.sum() for p in local if not p.is_floating_point())  # NF4
    parallel = world.parallel
    of_replica = parallel.shard * parallel.tp
    norms = world.all_gather_scalars([norm, codes])
    norms = norms.view(parallel.pp, parallel.replicate, of_replica, 2)
    if different := ((norms - norms[:, :1]).abs() > 1e-6 * norms[:, :1]).nonzero().tolist():
        stage, replica, place, _ = different[0]
        first = stage * parallel.replicate * of_replica + place
        raise UserError(
            f"rank {first + replica * of_replica} begins with other weights than rank {first}: "
            f"give every node the same files, and draw weights from generator_for(name, seed) as "
            f"Llama.init_weights does"
        )
