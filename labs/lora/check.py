"""The check of labs/lora."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.lab import ROWS, batch_of, share_of, small_model, summed_gradients, world_of
from labs.machinery.student import check_returned
from lora import LoRA, adapters, add_adapters, init_adapters
from model import IGNORE, Llama
from perf.instruments import Counted
from text.batch import Batch

FUNCTION = "prepare"
ABOUT = "what is trained, sharded and left alone"
NEEDS = "`requires_grad`, `fully_shard`"
POINT = "what never learns need not travel"
LEADS_TO = "parallel.py", "fsdp"
SIZES = 2, 3, 4
BARRED = "parallel.parallelize", "parallel.fsdp", "parallel.ddp"
HINTS = (
    "Look at the last value of `reshard` in the docstring of `fsdp` in parallel.py.",
    "Count the bytes of a step's all-gathers, and compare them with those of the adapters.",
    "Freeze what is no factor; give the factors their values; fully_shard of each block and of the "
    "model, which ignores what is frozen; AdamW for the rest.",
)
STEPS, LR = 5, 0.01
IDLE = 2  # the step in which rank 0 has no targets


def model_with_adapters(seed: int) -> Llama:
    model = small_model(seed)
    add_adapters(model, LoRA(rank=3))
    model.requires_grad_(True)
    return model


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Train a few steps. Return the parameters at both ends, what was sent, and what is kept."""
    world = world_of(rank, size)
    model = model_with_adapters(seed)
    optimizer = load()(model, world.mesh["replicate"], seed + 1)
    check_returned(optimizer, torch.optim.AdamW, "an AdamW")
    start = {name: whole(p).detach().clone() for name, p in adapters(model).items()}
    for step in range(STEPS):
        share = share_of(batch_in(step, seed, size), rank, size)
        optimizer.zero_grad()
        with Counted(world) as counted:
            model(*share.inputs).backward()
        optimizer.step()
    frozen = {name: p for name, p in model.named_parameters() if "lora_" not in name}
    return {
        "start": start,
        "end": {name: whole(p).detach() for name, p in adapters(model).items()},
        "base": {name: whole(p).detach() for name, p in frozen.items()},
        "with gradients": [name for name, p in frozen.items() if p.grad is not None],
        "sent": counted.sent,
    }


def batch_in(step: int, seed: int, size: int) -> Batch:
    batch = batch_of(seed)
    if step == IDLE:
        batch.targets[: ROWS // size] = IGNORE
    return batch


def train_in_one_process(seed: int, size: int) -> dict[str, Tensor]:
    """Return the adapters after the same steps, without ranks. FSDP averages gradients."""
    model = model_with_adapters(seed)
    init_adapters(model, seed + 1)
    factors = adapters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name in factors
    optimizer = torch.optim.AdamW(factors.values(), lr=LR, weight_decay=0.0)
    for step in range(STEPS):
        _, _, sums = summed_gradients(model, batch_in(step, seed, size))
        for name, factor in factors.items():
            factor.grad = sums[name] / size
        optimizer.step()
    return {name: factor.detach() for name, factor in factors.items()}


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    model = model_with_adapters(seed)
    init_adapters(model, seed + 1)
    factors = {name: p.detach() for name, p in adapters(model).items()}
    base = {name: p.detach() for name, p in model.named_parameters() if name not in factors}
    mistake = "The factors do not start with the values that init_adapters(model, seed) gives them."
    yield compare.tensors("start", results["start"], factors, "those of init_adapters", mistake)
    mistake = "The base has changed: only the factors are to be trained."
    text = f"as it was, after {STEPS} steps"
    yield compare.tensors("base", results["base"], base, text, mistake)
    right = train_in_one_process(seed, size)
    text = f"those of one process after {STEPS} steps"
    yield compare.tensors("adapters", results["end"], right, text)
    with_gradients = max(results["with gradients"], key=len)
    yield Property(
        "frozen base",
        f"{len(with_gradients)} of its {len(base)} parameters have a gradient",
        not with_gradients,
        "The base is frozen, and has gradients: backward computes and keeps them for nothing.",
    )
    # In forward, in backward, and reduce-scattered; rounded up to equal slices.
    wanted = 3 * sum(-(-len(p) // size) * size * p[0].nbytes for p in factors.values())
    sent = compare.unexpected(map(compare.nbytes_of, results["sent"]), wanted)
    mistakes = {
        f"{100 * (1 - wanted / max(sent, 1)):.0f} % of what you send never learns: FSDP gathers "
        f"the frozen base.": sent > wanted,
        "Each block gathers its factors twice and reduce-scatters them once, as by default.": True,
    }
    text = f"{sent:,}; three times the factors, padded, are {wanted:,}"
    yield Property("bytes a step", text, sent == wanted, mistakes)
