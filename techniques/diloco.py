"""DiLoCo: replicas train by themselves and meet rarely (Douillard et al. 2023, arXiv:2311.08105).

    outer copy W, equal everywhere          what travels: the drift, once in H steps

            +-- step -- step -- .. -- step --> w0 --> W - w0 --+
    W = w --|             H steps                              |-- mean --> Nesterov --> new W = w
            +-- step -- step -- .. -- step --> w1 --> W - w1 --+

The replicas are HSDP's, by default one per node; FSDP shards each of them. Each has its own weights
w and optimizer, divides its gradient by its own number of targets, and clips it by its own norm.
Every H steps (--every) comes an outer step: SGD with Nesterov momentum on W, with the mean of the
drifts W - w as gradient. Then all go on from the new W. All replicas count alike in this mean.
With H = 1 and --outer-lr 1 --outer-momentum 0 each step ends with the mean of all w. With SGD as
inner optimizer, and equally many targets on each replica, that would be DDP.

Besides FSDP's state a rank holds W and its momentum, sharded like the weights: 2 P g / shard bytes
(P, g as in parallel.py).
Communication over replicate, every H steps: all-reduce of P g / shard bytes, in one call
for each parameter. Over shard, every step: as FSDP.
Evaluations come right after an outer step, so they score W. In a checkpoint weights/ holds W, and
optimizer/ each replica's weights and moments, so that a run resumes between outer steps too. A run
that goes on with fewer replicas loses what the others did since the last outer step. With more,
the new ones begin as copies. docs/cases.md shows a run that survives the loss of a node.
The defaults of the outer step are the paper's. As momentum builds up, they move W by up to
0.7 / (1 - 0.9) = 7 drifts.
In short runs from scratch the plain mean trained better: --outer-lr 1 --outer-momentum 0.
torchft's DiLoCo sends one part of the model after another while training goes on, and can quantize
the drifts. After a failure it loses only the steps since the last exchange. Here all ranks wait for
whole drifts, and a run that loses a rank has to be restarted.
Use when the link between nodes is so slow that HSDP waits for it. Avoid elsewhere: unlike all other
strategies it changes what is computed, and its loss is worse for the same tokens.
"""

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import ParallelConfig
from model import Llama
from plumbing.messages import UserError, print_rank_zero
from plumbing.shards import to_local
from techniques.technique import Technique

OWN = ".replica-"  # in a checkpoint NAME.replica-R is a tensor of replica R alone


def refuses(work) -> str:
    """Return one line that says why DiLoCo cannot train such a step, or ""."""
    parallel = work.parallel
    if parallel.dp != "diloco":
        return ""
    unsupported = {"--pp": parallel.pp > 1, "--offload": parallel.offload}
    for flag, is_given in unsupported.items():
        if is_given:
            return f"--dp diloco does not combine with {flag}: use --dp hsdp"
    if parallel.optimizer != "adamw":
        return "--dp diloco trains by AdamW: give --optimizer adamw"
    if any(not parameter.requires_grad for parameter in work.model.parameters()):
        return "--dp diloco is not for adapters, which send little: use --dp ddp"
    return ""


def holds(model: Llama, work) -> dict[str, float]:
    """A rank also keeps the outer copy and its momentum, sharded like the weights."""
    parallel = work.parallel
    if parallel.dp != "diloco":
        return {}
    elements = sum(p.numel() for p in model.parameters()) / parallel.shard / parallel.tp
    return {"kept": 2 * elements * parallel.grad_bytes}


def sends(model: Llama, work) -> Iterator[tuple]:
    """Drifts are sent once in H steps. They count as one call: no computation hides them."""
    parallel = work.parallel
    if parallel.dp == "diloco":
        elements = sum(p.numel() for p in model.parameters()) / parallel.shard / parallel.tp
        yield "replicate", "all-reduce", 1 / parallel.every, elements * parallel.grad_bytes


def check_evaluations(args) -> None:
    """Raise UserError unless a run with these flags takes an outer step before each evaluation and
    at its end: only after an outer step are the weights of all replicas the same."""
    if args.dp != "diloco":
        return
    every = args.every or ParallelConfig.every
    if skipped := [step for step in args.skip_steps if step % every == 0]:
        problem = f"--skip-steps {skipped[0]} ends --every {every} steps"
        raise UserError(f"{problem}: choose another --every")
    for flag, given in (("--steps", args.steps), ("--eval-every", args.eval_every)):
        if given % every:
            multiple = math.ceil(given / every) * every
            raise UserError(f"{flag} must be a multiple of --every {every}: use {flag} {multiple}")


def keep_outer_copy(model: nn.Module, parallel) -> None:
    """Give each parameter of an initialized model its outer copy, and the outer momentum."""
    if parallel.strategy.own_steps:
        for parameter in model.parameters():
            parameter.outer = parameter.detach().clone()
            parameter.outer_momentum = torch.zeros_like(parameter.outer)


def replicas_apart(world) -> tuple[int, int]:
    """Return how many replicas train apart, and this rank's replica; (1, 0) without DiLoCo."""
    if not world.parallel.strategy.own_steps:
        return 1, 0
    return world.parallel.replicate, world.mesh.get_local_rank("replicate")


@torch.no_grad()
def outer_step(optimizer: torch.optim.Optimizer, world, step: int) -> None:
    """After every H-th step take the outer step. All ranks call it. labs/rarely does it by hand."""
    parallel = world.parallel
    if not parallel.strategy.own_steps or step % parallel.every:
        return
    lr, momentum = parallel.outer_lr, parallel.outer_momentum
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        local = to_local(parameter)
        outer, velocity = to_local(parameter.outer), to_local(parameter.outer_momentum)
        drift = outer - local
        if parallel.replicate > 1:
            dist.all_reduce(drift, group=world.mesh.get_group("replicate"))
        drift /= parallel.replicate
        velocity.mul_(momentum).add_(drift)
        update = drift.add_(velocity, alpha=momentum)  # Nesterov: momentum looks a step ahead
        outer.sub_(update, alpha=lr)
        local.copy_(outer)


def replicas_in(names: Iterable[str]) -> int:
    """Return how many replicas a checkpoint with these names of tensors has; 0 without DiLoCo."""
    numbers = (name.rpartition(OWN)[2] for name in names if OWN in name)
    return 1 + max(map(int, numbers), default=-1)


def left_out(model: nn.Module, saved: int) -> tuple[str, ...]:
    """Of the `saved` replicas of a checkpoint, return the name endings of those not in this run."""
    world = getattr(model, "world", None)
    n = replicas_apart(world)[0] if world else saved
    return tuple(f"{OWN}{replica}" for replica in range(n, saved))


def named_for_checkpoint(
    model: nn.Module, weights: dict[str, Tensor], state: dict[str, Tensor], saved: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights and optimizer state by their names in a checkpoint. With DiLoCo its weights
    are the outer copy, and the tensors of replica R alone are named NAME.replica-R. To load a
    checkpoint of `saved` replicas into a run with more, the additional ones begin as copies."""
    world = getattr(model, "world", None)
    if not world or not world.parallel.strategy.own_steps:
        return weights, state
    n, replica = replicas_apart(world)
    named = dict(model.named_parameters())
    if saved not in (0, n):
        print_rank_zero(f"note: {saved} replicas were saved, and {n} go on")
        replica %= saved  # the replica that an additional one copies
    tensors = {f"{name}.local": tensor for name, tensor in weights.items()} | state
    tensors = {f"{name}{OWN}{replica}": tensor for name, tensor in tensors.items()}
    momenta = {f"{name}.outer_momentum": named[name].outer_momentum for name in weights}
    return {name: named[name].outer for name in weights}, momenta | tensors


TECHNIQUE = Technique("", refuses=refuses, holds=holds, sends=sends)  # each checks --dp itself
