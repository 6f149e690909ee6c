"""Check that training computes what model.py says, which may have been changed.

    torchrun --nproc-per-node 2 bench.py equal --tp 2        model.py as it stands, other flags too

A step is taken twice from the same weights, in float64: by a Llama as model.py has it, on one
process, and by what parallelize() makes of it on this mesh. Compared are the output of every module
(forward), the loss, the gradient of every output (backward), the gradient of every parameter,
summed over ranks (reduction), and the weights after the optimizer's step (update). What differs
first is where to look: all that comes later only follows from it.

`bench.py equal` takes a step of a run's own sizes, and each rank also computes the whole step: so
choose a small --model. At the start of every run a small model takes a step, without an update."""

import logging
import math
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import DistError
from torch.distributed.tensor import DTensor

from config import ParallelConfig, in_float64
from files.published import with_fixed_weights
from model import IGNORE, Llama, LlamaConfig
from models.family import families
from parallel import World, parallelize
from plumbing.messages import UserError
from plumbing.shards import allocate, chunk_of, without_slope
from techniques.context_parallel import own_tokens, share_sequences
from techniques.optimizers import optimizer_parameters
from techniques.schedules import lines_of, read_schedule
from text.batch import Batch

# DTensor warns that gathering a matrix that is sharded twice is slow: here it need not be fast.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

TOLERANCE = 1e-9  # of relative differences; rounding in float64 causes about 1e-14
CAUSES_OF_FLAGS = {  # field of ParallelConfig, if above 1 -> usual cause of a difference
    "tp": "under --tp a rank has some of the heads from wq to wo (q.shape[2] of them, and its head "
    "0 is not the model's), some of the features from w1 to w2, some of the vocabulary in the loss "
    "(vocabulary.logsumexp, .sum and .size are of all)",
    "pp": "under --pp each stage calls Llama.forward on its layers, and is given x alone: move "
    "what you added there into a block, or do it only where the embedding or the output is",
    "cp": "under --cp a GPU computes attention by another kernel: if attend changes scores, let "
    "SharedBatch.documents always make masks. Tokens mix in attend alone, which is given "
    "`documents`, and a loss sees this rank's tokens",
}
CAUSES_OF_PHASES = {
    "loss": "a loss that depends on other tokens: it is computed for some of them at a time",
    "backward": "a .detach(), or a collective whose backward does not sum over ranks",
    "reduction": "a gradient that is not summed over tp or data ranks (see PLAN), or is scaled by "
    "their number; a microbatch that counts twice or not at all",
    "update": "an optimizer that takes a shard for the whole matrix; updates that are not gathered",
}
SHARED = "blocks that share a module or a parameter train with --dp ddp alone"
CAUSES_OF_ERRORS = {  # part of torch's message -> usual cause
    "mixed torch.Tensor and DTensor": "what COLUMNS returns are this rank's features, and x in a "
    "block is a DTensor, of all ranks: for outputs that every rank needs, as a router's, PLAN says "
    "NORM or ROWS, and a module of OfHeads() returns its `weight`, to be multiplied outside",
    "only support nn.Linear": "COLUMNS and ROWS are for nn.Linear: NORM is for other layers",
    "shared": SHARED,
    "overlapping meshes": SHARED,
    "already been applied": SHARED,
    "writes_to_stream": "name there the layers of that module whose output is added to x, () for "
    "none; in place of nn.Sequential write a module",
}
NOT_BY_THE_MODEL = UserError, DistError, torch.OutOfMemoryError  # errors with other causes


def take_step(
    model: Llama, runner: nn.Module, batch: Batch, world: World, accumulate: Callable, update
) -> dict[tuple[str, str], Tensor]:
    """Train a model for one step. Return its tensors by phase and name, in the order of computing.
    `runner` is the model or what parallelize made of it; for the functions see compare_steps."""
    outputs = {}  # of each module, one for each microbatch

    def keep(name: str, module: nn.Module, inputs: tuple, output) -> None:
        recomputes = torch._C._current_graph_task_id() != -1  # in backward, with checkpointing
        is_compared = isinstance(output, Tensor) and output.ndim > 2  # [B, T, ...]
        if is_compared and output.requires_grad and not recomputes:
            output.retain_grad()
            outputs.setdefault(name, []).append(output)

    for name, module in model.named_modules():
        module.register_forward_hook(partial(keep, name))
    batch, parallel = batch.to(world.device), world.parallel
    loss = accumulate(runner, batch, world=world)
    # Compare the mean over targets. Ranks along tp all have the loss and the targets; along pp all
    # have the targets, and one the loss. DDP and FSDP have averaged the gradients over the others.
    sums = world.all_gather_scalars([loss, (batch.targets != IGNORE).sum()]).sum(0) / parallel.tp
    targets = sums[1] / parallel.pp
    scale = parallel.replicate * parallel.shard / targets
    step = {("forward", f"output of {name}"): whole_tensor(*kept) for name, kept in outputs.items()}
    step["loss", "loss"] = sums[:1] / targets
    for name, kept in reversed(outputs.items()):
        if gradients := [output.grad for output in kept if output.grad is not None]:
            step["backward", f"gradient of the output of {name}"] = whole_tensor(*gradients)
    for name, parameter in reversed(optimizer_parameters(model).items()):
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        step["reduction", f"gradient of {name}"] = whole_tensor(gradient) * scale
    if update:
        norm = update(model, loss, batch, world).grad_norm
        step["update", "norm of the gradient"] = sums.new_tensor(norm)
        for name, parameter in model.named_parameters():
            step["update", f"weight {name}"] = whole_tensor(parameter)
    return step


@torch.no_grad()
def whole_tensor(*parts: Tensor) -> Tensor:
    """Return one copy of a tensor that is given in parts: gather DTensors, then concatenate."""
    parts = [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]
    return torch.cat(parts) if parts[0].ndim else parts[0].clone()


def own_part(expected: Tensor, found: Tensor, world: World) -> Tensor:
    """Return the part of `expected` [B, T, ...] that this rank computes as `found`: its rows, its
    tokens along cp and, unless `found` was gathered over tp, its features or heads."""
    for dim, (n, own) in enumerate(zip(expected.shape, found.shape)):
        if n != own and dim == 0:
            expected = expected[world.data_rank * own :][:own]
        elif n != own and dim == 1 and world.cp_mesh:
            expected = own_tokens(expected, world.cp_mesh.get_local_rank(), world.parallel.cp)
        elif n != own:
            expected = chunk_of(expected, world.mesh["tp"], 0, dim)
    return expected


def relative_difference(found: Tensor, expected: Tensor) -> Tensor:
    """Return the norm of the difference over that of `expected`."""
    return (found - expected).norm() / expected.norm().clamp(min=1e-6)  # below 1e-6 is rounding


def is_random(model: Llama, batch: Batch) -> bool:
    """Return whether a model draws random numbers, as in training with dropout, or has another loss
    each time. Then it is compared in evaluation, without what stands under `if self.training`."""
    losses, state = set(), random_state(batch.tokens.device)
    for _ in range(2):
        losses.add(model(*batch.inputs).item())
    return len(losses) > 1 or not torch.equal(state, random_state(batch.tokens.device))


def random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def compare_steps(
    config: LlamaConfig, initialize, batch: Batch, own: Batch, world: World, accumulate, update=None
) -> str:
    """Compare a step on `batch` in this process with one on the mesh, where `own` is this rank's
    share. Return where they first differ, and usual causes; "" if they are equal.

    initialize(model) sets weights; accumulate(runner, batch, world=) runs forward and backward, and
    returns the loss; update(model, loss, batch, world), if any, takes the optimizer's step, and
    returns its Totals."""
    with torch.device("meta"):
        plain, model = config.build().double(), config.build()
    allocate(plain, world.device)
    initialize(plain)
    for module in (*plain.modules(), *model.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # so that what stands under `if self.training` is compared, too
    is_trained = not is_random(plain.train(), small_batch(1, 8, config).to(world.device))
    alone = replace(world, size=1, parallel=ParallelConfig(dtype=torch.float64))
    plain.train(is_trained)
    expected = take_step(plain, plain, batch, alone, accumulate, update)
    runner = parallelize(model, world, initialize)
    model.train(is_trained)
    found = take_step(model, runner, own, world, accumulate, update)
    errors = []
    for key, tensor in expected.items():
        mine = found.get(key, tensor)  # missing: another stage of the pipeline compares it
        part = own_part(tensor, mine, world)
        errors.append(relative_difference(mine, part) if part.shape == mine.shape else torch.inf)
    worst = world.all_gather_scalars(errors).max(0).values.tolist()  # of all ranks; NaN, if any is
    wrong = [(*key, error) for key, error in zip(expected, worst) if not error <= TOLERANCE]
    # Other outputs alone are no error: a layer may divide its work over ranks in its own way. They
    # tell the place once the loss, or the gradient of a parameter, differs.
    if all(phase in ("forward", "backward") for phase, _, _ in wrong):
        return ""
    phase, name, error = wrong[0]
    where = f"first in {phase}: the {name}, relative difference {error:.2g}"
    return f"{where}; usual causes: {causes(phase, world.parallel)}"


def causes(phase: str, parallel: ParallelConfig) -> str:
    """Return the usual causes of a difference in a phase; with "", those of any difference."""
    usual = [cause for flag, cause in CAUSES_OF_FLAGS.items() if getattr(parallel, flag) > 1]
    return "; ".join(filter(None, [*usual, CAUSES_OF_PHASES.get(phase)]))


# ------------------------------------------------------------------------- at the start of a run


def check_model(config: LlamaConfig, seq_len: int, world: World, accumulate: Callable) -> None:
    """Raise UserError on all ranks if the gradients of a small model are not the slope of its loss,
    or if it does not train as model.py says."""
    if world.device.type == "mps":  # which has no float64
        world = replace(world, device=torch.device("cpu"))
    parallel = in_float64(world.parallel)
    pp, tp, cp = parallel.pp, parallel.tp, parallel.cp
    try:
        check_gradients(small_config(config, config.n_layers), world.device)
        if cp > 1:
            from runs.unseen import check_attend  # here, since it imports this file

            check_attend(small_config(config), "leave out --cp")
    except Exception as error:
        if isinstance(error, NOT_BY_THE_MODEL):
            raise
        raise UserError(f"model.py fails with small sizes: {describe(error)}")
    rows, layers = 1, min(config.n_layers, 4)
    cases = [(layers, 521, False)]  # longer than a chunk of the loss, and than a small window
    if pp > 1:  # stages begin where those of the run do, and many microbatches would take seconds
        schedule = read_schedule(lines_of(parallel.schedule, pp, pp, parallel.stages_per_rank))
        rows = 1 + max(action.microbatch for order in schedule for action in order)
        layers = config.n_layers
        cases = [(layers, 8, False)]
    elif layers < config.n_layers:  # later layers may differ from the first
        cases.append((config.n_layers, 8, False))
    if cp > 1:  # other code masks documents there, and a rank sees a part of the run's length
        cases += [(layers, min(seq_len, 2048), False), (layers, 521, True)]
    world = replace(world, parallel=parallel)
    one_by_one = partial(accumulate, microbatch=1)
    for n_layers, length, packed in cases:
        small = small_config(config, n_layers, tp)
        T = math.ceil(length / parallel.multiple_of_tokens) * parallel.multiple_of_tokens
        batch = small_batch(rows, T, small, packed).to(world.device)
        own = share_sequences(batch, world)
        try:
            first = compare_steps(small, with_fixed_weights, batch, own, world, one_by_one)
        except Exception as error:
            if isinstance(error, NOT_BY_THE_MODEL) or "gloo" in str(error):  # a lost rank
                raise
            first = f"an error ({describe(error)}); usual causes: {causes('', parallel)}"
        if first:
            raise UserError(f"training does not compute what the changed model.py does, {first}")


def describe(error: Exception) -> str:
    """Return an error of model.py, or of a student's file, as one line: the last line of it that
    the error came from, in which module, and what usually causes it."""
    where, said = "", str(error).partition("\n")[0]
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename).name
        if file in ("model.py", *families()):
            where = f" in line {line} of {file}"
            if module := frame.f_locals.get("self"):
                where += f", {type(module).__name__}"
    usual = [cause for part, cause in CAUSES_OF_ERRORS.items() if part in said]
    return ": ".join([f"{type(error).__name__}{where}", said, *usual])


def check_gradients(config: LlamaConfig, device: torch.device) -> None:
    """Raise UserError if the gradient of a parameter is not the slope of the loss, as where the
    forward of an autograd.Function was changed and its backward was not; or if the loss is random
    in evaluation, or no sum over rows and over the targets that are not IGNORE."""
    model = config.build().double()
    model.init_weights()  # raises for a parameter without an initial value
    with_fixed_weights(model).to(device)
    batch = small_batch(2, 8, config).to(device)
    tokens, targets, _ = batch.inputs
    if is_random(model.train(), batch) and is_random(model.eval(), batch):
        raise UserError(
            "model.py computes another loss each time, in evaluation, too: give its dropout the "
            "condition self.training, as nn.Dropout has it, and keep nothing from call to call"
        )
    loss = model(tokens, targets)
    first, second = (model(tokens[i : i + 1], targets[i : i + 1]) for i in (0, 1))  # rows alone
    one_ignored = model(tokens, torch.stack([targets[0], torch.full_like(targets[1], IGNORE)]))
    for found, expected, what in (one_ignored, first, "without"), (loss, first + second, "with"):
        if not relative_difference(found, expected) < TOLERANCE:
            raise UserError(
                f"beside a row {what} targets the loss is {found:.4g} and not {expected:.4g}, "
                f"since model.py was changed: it must be a sum over targets, no mean, IGNORE is no "
                f"target, and rows do not depend on each other"
            )
    loss.backward()
    trained = {}
    no_slope = without_slope(model)
    for name, parameter in reversed([*model.named_parameters()]):
        if not parameter.requires_grad or name in no_slope:
            continue
        trained[name] = parameter
        if parameter.grad is None:
            raise UserError(
                f"{name} of model.py got no gradient: use it in every microbatch without .detach() "
                f"and no_grad, or remove it"
            )
    # A right gradient's error is rounding, about 1e-8, and curvature, of which a tenth of the step
    # has a hundredth. A wrong gradient's error stays.
    if any(slope_error(model, batch, [*trained.values()], size) <= 1e-6 for size in (1e-6, 1e-7)):
        return
    # Backward runs from the last parameter to the first: the first wrong gradient names the fault.
    # Slopes of one parameter may cancel, and then rounding is a larger part of them.
    wrong = (
        name for name, p in trained.items() if not slope_error(model, batch, [p], 1e-6) <= 1e-3
    )
    name = next(wrong, "some parameter")
    raise UserError(
        f"the gradient of {name} is not the slope of the loss, since model.py was changed: leave "
        f"out .detach(); an autograd.Function needs a backward of the same function"
    )


def slope_error(model: Llama, batch: Batch, parameters: list[nn.Parameter], size: float) -> float:
    """Return |loss(x + s) - loss(x - s) - 2 s gradient| for a step s of `size` from the parameters
    x, relative to the sum of |s gradient| over parameters.

    Not by gradcheck, which gives a parameter to the forward alone: a block that checkpoints would
    recompute with another."""
    size /= len(parameters)
    steps = [torch.ones_like(p).cumsum(0).sin() * size for p in parameters]  # no two rows alike
    losses = []
    for factor in (1, -2):  # a step forward, and one back from where it was
        for parameter, step in zip(parameters, steps):
            parameter.data.add_(step, alpha=factor)
        losses.append(model(batch.tokens, batch.targets).detach())
    for parameter, step in zip(parameters, steps):
        parameter.data.add_(step)
    slopes = torch.stack([(p.grad * step).sum() for p, step in zip(parameters, steps)])
    error = losses[0] - losses[1] - 2 * slopes.sum()
    least = 10 * size  # of which rounding is less than a millionth, where there is no slope
    return (error.abs() / (slopes.abs().sum() + least)).item()


def small_config(config: LlamaConfig, n_layers: int = 1, tp: int = 1) -> LlamaConfig:
    """Return `config` with small sizes. tp divides them, and so do 3, 5, 7 and 9 if they divide the
    large sizes, as groups of features may need. head_dim stays, since it decides which kernel
    computes attention."""
    dim, ffn_dim = (math.gcd(size, 9 * 5 * 7) for size in (config.dim, config.ffn_dim))
    sizes = dict(dim=32 * tp * dim, n_heads=2 * tp, n_kv_heads=tp, ffn_dim=6 * tp * ffn_dim)
    return replace(config, n_layers=n_layers, vocab_size=64 * tp, **sizes)


def small_batch(rows: int, T: int, config: LlamaConfig, packed: bool = False) -> Batch:
    """Return rows of T tokens, a ninth of them without a target. If packed, a row has three
    documents, the second of one token. There are targets on both sides of each cut by --cp."""
    index = torch.arange(rows * T).view(rows, T)
    tokens = index**2 % 61 % config.vocab_size
    targets = tokens.roll(-1, 1).masked_fill(index % 9 == 2, IGNORE)
    positions = torch.cat([torch.arange(n) for n in (T // 3, 1, T)])[:T].repeat(rows, 1)
    return Batch(tokens, targets, positions if packed else None, text_bytes=0)
