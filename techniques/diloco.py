"""DiLoCo: replicas train by themselves and meet rarely (Douillard et al. 2023, arXiv:2311.08105).

    outer copy W, equal everywhere          what travels: the drift, once in H steps

            +-- step -- step -- .. -- step --> w0 --> W - w0 --+
    W = w --|             H steps                              |-- mean --> Nesterov --> new W = w
            +-- step -- step -- .. -- step --> w1 --> W - w1 --+

The replicas are HSDP's, by default one per node; FSDP shards each of them. Each has its own weights
w, optimizer and clipped norm, and divides its gradient by its own targets. Every H steps (--every)
the mean of the drifts W - w is the gradient of an outer step, Nesterov's SGD on W, and all go on
from the new W. Each replica has the same weight in this mean, even if it had more targets.
With H = 1 and --outer-lr 1 --outer-momentum 0 each step ends with the mean of all w. Were the inner
optimizer SGD, and targets equally many, that would be DDP.

State on a rank: that of FSDP, and W and its momentum, 2 P g / shard bytes, sharded like the weights
(P, g as in parallel.py).
Communication over replicate, every H steps: all-reduce of P g / shard bytes, in one call
for each parameter. Over shard, every step: as FSDP.
Evaluations come right after an outer step, so they are of W. A checkpoint's weights/ are W;
optimizer/ has each replica's weights and moments, so that a run resumes between outer steps too.
Resuming with fewer replicas loses the steps of the missing ones since the last outer step; with
more, new ones begin as copies. docs/cases.md shows a run that survives the loss of a node.
The defaults of the outer step are the paper's, and move W by up to 7 drifts,
0.7 / (1 - 0.9), as momentum builds up.
In short runs from scratch the plain mean has learnt more: --outer-lr 1 --outer-momentum 0.
torchft's DiLoCo sends the drifts of parts of the model in turns while training goes on, also
quantized, and after a failure loses only the steps since the last exchange. Here all wait for whole
drifts, and the loss of a rank needs a restart.
Use when the link between nodes is so slow that HSDP waits for it. Avoid elsewhere: as no other
strategy, it changes what is computed, and its loss is worse for the same tokens.
"""

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import ParallelConfig, Work
from model import Llama
from plumbing.processes import UserError, print_rank_zero
from plumbing.shards import to_local
from techniques.technique import Technique

OWN = ".replica-"  # in a checkpoint, between a name and the replica whose tensor it is


def refuses(work: Work) -> str:
    """Return why replicas cannot train such a step by themselves, in a line, or ""."""
    parallel = work.parallel
    if parallel.dp != "diloco":
        return ""
    others = {"--pp": parallel.pp > 1, "--offload": parallel.offload}
    for flag, is_given in others.items():
        if is_given:
            return f"--dp diloco does not combine with {flag}: use --dp hsdp"
    if parallel.optimizer != "adamw":
        return "--dp diloco trains by AdamW: give --optimizer adamw"
    if any(not parameter.requires_grad for parameter in work.model.parameters()):
        return "--dp diloco is not for adapters, which send little: use --dp ddp"
    return ""


def holds(model: Llama, work: Work) -> dict[str, float]:
    """The outer copy and its momentum, sharded as the weights."""
    parallel = work.parallel
    if parallel.dp != "diloco":
        return {}
    elements = sum(p.numel() for p in model.parameters()) / parallel.shard / parallel.tp
    return {"kept": 2 * elements * parallel.grad_bytes}


def sends(model: Llama, work: Work) -> Iterator[tuple]:
    """The drifts, once in H steps, as one call: nothing hides any of them."""
    parallel = work.parallel
    if parallel.dp == "diloco":
        elements = sum(p.numel() for p in model.parameters()) / parallel.shard / parallel.tp
        yield "replicate", "all-reduce", 1 / parallel.every, elements * parallel.grad_bytes


def check_meetings(args) -> None:
    """Raise UserError unless, with the flags of a run, replicas meet before each evaluation and at
    the end, so that the weights are the same on all of them."""
    if args.dp != "diloco":
        return
    every = args.every or ParallelConfig.every
    if met := [step for step in args.skip_steps if step % every == 0]:
        raise UserError(f"--skip-steps {met[0]} ends --every {every} steps: choose another --every")
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
    """Return the number of replicas that train apart, and which is this rank's; (1, 0) without
    DiLoCo."""
    if not world.parallel.strategy.own_steps:
        return 1, 0
    return world.parallel.replicate, world.mesh.get_local_rank("replicate")


@torch.no_grad()
def outer_step(optimizer: torch.optim.Optimizer, world, step: int) -> None:
    """After every H-th step, take the outer step. All ranks call it. labs/rarely writes it."""
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
        update = drift.add_(velocity, alpha=momentum)  # Nesterov's
        outer.sub_(update, alpha=lr)
        local.copy_(outer)


def replicas_in(names: Iterable[str]) -> int:
    """Return how many replicas have saved state of their own by these names; 0 without DiLoCo."""
    numbers = (name.rpartition(OWN)[2] for name in names if OWN in name)
    return 1 + max(map(int, numbers), default=-1)


def left_out(model: nn.Module, saved: int) -> tuple[str, ...]:
    """Return the endings of names of those of `saved` replicas that this run does not have."""
    world = getattr(model, "world", None)
    n = replicas_apart(world)[0] if world else saved
    return tuple(f"{OWN}{replica}" for replica in range(n, saved))


def named_for_checkpoint(
    model: nn.Module, weights: dict[str, Tensor], state: dict[str, Tensor], saved: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights and optimizer state by the names that a checkpoint gives them. With DiLoCo its
    weights are the outer copy, and what is a replica's own becomes NAME.replica-R. A checkpoint
    that is loaded has `saved` replicas: if this run has more, the others begin as copies."""
    world = getattr(model, "world", None)
    if not world or not world.parallel.strategy.own_steps:
        return weights, state
    n, replica = replicas_apart(world)
    named = dict(model.named_parameters())
    if saved not in (0, n):
        print_rank_zero(f"note: {saved} replicas were saved, and {n} go on")
        replica %= saved
    own = {f"{name}.local": tensor for name, tensor in weights.items()} | state
    own = {f"{name}{OWN}{replica}": tensor for name, tensor in own.items()}
    momenta = {f"{name}.outer_momentum": named[name].outer_momentum for name in weights}
    return {name: named[name].outer for name in weights}, momenta | own


TECHNIQUE = Technique("", refuses=refuses, holds=holds, sends=sends)  # each looks at --dp itself
