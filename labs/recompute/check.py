"""The check of labs/recompute."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from config import ParallelConfig
from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import CONFIG, batch_of, share_of
from labs.machinery.student import check_returned
from model import IGNORE, Llama
from parallel import parallelize, with_mesh
from perf.instruments import Counted, Live
from plumbing.processes import Process
from plumbing.shards import assign_shard

FUNCTION = "recompute"
ABOUT = "activation checkpointing"
NEEDS = "`autograd.Function`, random state"
POINT = "time is paid for in memory; twice is too often"
LEADS_TO = "techniques/recompute.py", "recompute"
SIZES = 2, 3, 4
BARRED = (
    "torch.utils.checkpoint.checkpoint",
    "torch.utils.checkpoint.checkpoint_sequential",
    "torch.utils.checkpoint.CheckpointFunction",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.torch_utils_checkpoint",
    "techniques.recompute.recompute",
)
HINTS = (
    "Look for torch.autograd.Function, and for ctx.save_for_backward, in PyTorch's documentation.",
    "Count how often attention runs, and which tensors are alive between forward and backward.",
    "A Function whose forward saves x alone. In backward: x without its graph, the random state of "
    "then, the same forward with gradients enabled, and torch.autograd.backward of its result.",
)
ERRORS = {
    "Connection": "Ranks did not send alike in backward. FSDP sends the gradients of a block on "
    "all ranks, zeros, too: recompute, and run backward, whatever the gradient is."
}
DROPOUT = 0.2
LEFT = (
    "Activations stay in memory after backward, for ever: a tensor of the second forward holds its "
    "graph, and hooks of that graph hold the tensor. Keep tensor.detach()."
)


STEPS = 3  # on the same blocks; in the last one rank 0 has no targets
AGAIN = (
    "The first step is right, and a later one with the same blocks is not: what a call keeps for "
    "its backward, in a list or a dict, has to be its own, and gone afterwards."
)


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Train under FSDP without recomputation, with PyTorch's, and with the student's. Return the
    gradients of all steps, and of the first: attention forwards, all-gathers, and the bytes at the
    peak and afterwards."""
    share = share_of(batch_of(seed), rank, size)
    no_targets = share.inputs[0], torch.full_like(share.inputs[1], IGNORE), *share.inputs[2:]
    process = Process(rank, size, rank, size, torch.device("cpu"))
    parallel = ParallelConfig(dp="fsdp", shard=size, dtype=torch.float64)
    world = with_mesh(process, parallel)

    def train(wrap: Callable) -> dict:
        with torch.device("meta"):
            model = Llama(CONFIG)
        runner = parallelize(model, world, lambda m: m.init_weights(seed, assign_shard))
        for block in model.layers.values():
            block.forward = wrap(partial(with_dropout, block.forward))
            check_returned(block.forward, Callable, "a function")
        torch.manual_seed(seed)
        with Live(model.parameters()) as live, Counted(world) as counted:
            loss = runner(*share.inputs)
            after_forward = torch.get_rng_state()
            loss.backward()
            left = live.now
        gathers, _ = counted.sent["shard", "all-gather"]
        found = {
            "after forward": after_forward,
            "random state": torch.get_rng_state(),
            "gradients": [gradients_of(model)],
            "attentions": counted.attentions,
            "gathers": gathers,
            "peak": live.peak,
            "left": left,
        }
        with live:
            for step in range(1, STEPS):
                model.zero_grad()
                is_empty = step == STEPS - 1 and rank == 0
                runner(*(no_targets if is_empty else share.inputs)).backward()
                found["gradients"].append(gradients_of(model))
            model.zero_grad()
            found["left at the end"] = live.now
        return found

    return {
        "plain": train(lambda forward: forward),
        "torch": train(lambda forward: partial(checkpoint, forward, use_reentrant=False)),
        "yours": train(load()),
    }


def gradients_of(model: Llama) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.full_tensor()
            for name, p in model.named_parameters()}  # fmt: skip


def with_dropout(forward: Callable, *inputs) -> Tensor:
    return F.dropout(forward(*inputs), DROPOUT)


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    yours, plain, of_torch = (compare.by_name(results[key]) for key in ("yours", "plain", "torch"))

    def same_state(name: str) -> bool:
        """Return whether the generator's state is that of a step without recomputation."""
        return all(map(torch.equal, yours[name], plain[name]))

    yield Property(
        "drawn",
        "in forward, what is drawn without recomputation",
        same_state("after forward"),
        "Your forward changes the generator of random numbers: only the block may draw from it.",
    )
    names = "gradients", "gradients again", "gradients empty"
    steps = [step_of(yours, plain, step, name) for step, name in enumerate(names)]
    yield steps[0]
    yield compare.exactly(
        "attention runs",
        [runs // CONFIG.n_layers for runs in yours["attentions"]],
        2,
        "{} a layer; {} are wanted",
        {
            1: "Attention runs once a layer, so nothing is recomputed, and everything is saved.",
            3: "Attention runs three times a layer: there is a checkpoint within a checkpoint.",
        },
    )
    yield compare.exactly(
        "all-gathers",
        yours["gathers"],
        plain["gathers"][0],
        "{}; FSDP has {} without recomputation",
        "Backward gathers a block's weights anyway: recompute within the block, not around FSDP.",
    )
    yield Property(
        "random state",
        "after backward that of a step without recomputation",
        same_state("random state"),
        "Backward leaves the generator where forward was: what is drawn next is drawn twice.",
    )
    yield from steps[1:]
    bounds = [round(1.05 * peak) for peak in of_torch["peak"]]
    peak, bound = max(zip(yours["peak"], bounds), key=lambda pair: pair[0] / pair[1])
    text = f"{peak:,} bytes at most; {plain['peak'][0]:,} without recomputation"
    left = max(yours["left"]) > 2 * max(plain["left"])
    grows = max(yours["left at the end"]) > 2 * max(plain["left at the end"])
    mistakes = {
        LEFT: left or grows,
        f"Saving x alone takes {bound:,} bytes at most.": True,
    }
    yield Property("live memory", text, peak <= bound and not grows, mistakes)


def step_of(yours: dict, plain: dict, step: int, name: str) -> Property:
    """Return whether the gradients of a step are those of a step without recomputation."""
    found = [of_rank[step] for of_rank in yours["gradients"]]
    expected = [of_rank[step] for of_rank in plain["gradients"]]
    mistake = AGAIN if step else ""
    return compare.tensors(name, found, expected, "those without recomputation", mistake)
