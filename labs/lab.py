"""What the checks of all labs share: the student's function, a small model and its batch, and how
a property that was checked is written down."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from data import Batch
from model import IGNORE, Llama, LlamaConfig
from parallel import ParallelConfig, World, with_mesh
from plumbing.processes import Process

CONFIG = LlamaConfig(16, 2, 4, 2, 24, vocab_size=101, tie_embeddings=True)
ROWS, SEQ = 12, 13  # of a step's batch; 2, 3 and 4 ranks divide the rows
TOLERANCE = 1e-12


class Property(NamedTuple):
    """One line of a check's output: what was checked, what was found, and if that is wrong, why."""

    name: str
    found: str
    ok: bool
    mistake: str = ""  # the sentence for a recognized mistake


class Mistake(NamedTuple):
    """What a known mistake would give, and the sentence for it."""

    value: object
    sentence: str


class Barred(Exception):
    """The student used what the lab is to replace."""


def load_function(path: Path, name: str) -> Callable:
    """Return a function of the student's file. Raises AttributeError if it is not there."""
    spec = importlib.util.spec_from_file_location("student", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@contextlib.contextmanager
def barred(*places: str) -> Iterator[None]:
    """Within this context, what stands at `places`, as "module.name", raises Barred when called."""
    originals = []
    for place in places:
        path, _, name = place.rpartition(".")
        module = importlib.import_module(path)
        originals.append((module, name, getattr(module, name)))

        def refuse(*args, name=name, **kwargs):
            raise Barred(f"{name} is what you are to write")

        setattr(module, name, refuse)
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


def world_of(rank: int, size: int) -> World:
    """Return the ranks as replicas, on this machine."""
    process = Process(rank, size, rank, size, torch.device("cpu"))
    return with_mesh(process, ParallelConfig(dtype=torch.float64, replicate=size))


def small_model(seed: int) -> Llama:
    """Return a model in float64, the same on each rank."""
    model = Llama(CONFIG).double()
    model.init_weights(seed)
    return model


def batch_of(seed: int) -> Batch:
    """Return a step's batch, in whose rows 1 to 13 tokens count."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CONFIG.vocab_size, (ROWS, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(ROWS):
        targets[row, 1 + row % SEQ :] = IGNORE
    return Batch(tokens[:, :-1].contiguous(), targets, None, text_bytes=1)


def share_of(batch: Batch, rank: int, size: int) -> Batch:
    """Return a rank's rows. Those of the last rank have most targets."""
    return batch.microbatches(ROWS // size)[rank]


def summed_gradients(model: Llama, batch: Batch) -> tuple[float, int, dict[str, Tensor]]:
    """Return the sum of a batch's losses, its number of targets, and the gradient of the sum."""
    model.zero_grad()
    loss = model(*batch.inputs)
    loss.backward()
    count = int((batch.targets != IGNORE).sum())
    named = model.named_parameters()
    return loss.item(), count, {name: p.grad.clone() for name, p in named if p.requires_grad}


def norm_of(gradients: dict[str, Tensor]) -> float:
    return torch.stack([g.norm() for g in gradients.values()]).norm().item()


def same(found: Tensor | float, expected: Tensor | float) -> bool:
    if not isinstance(found, Tensor | float | int):
        return False
    found, expected = (torch.as_tensor(v, dtype=torch.float64) for v in (found, expected))
    if found.shape != expected.shape:
        return False
    return bool((found - expected).norm() <= TOLERANCE * max(expected.norm(), 1e-300))


def compare_gradients(
    found: list[dict[str, Tensor]],
    expected: list[dict[str, Tensor]],
    mistakes: list[Mistake],
    reference: str = "those of one process",
    name: str = "gradients",
) -> Property:
    """Return whether each rank has the tensors that are expected there, those of `reference`. The
    value of a mistake is a list of the tensors of each rank, too."""
    wrong = [(rank, key) for rank, of_rank in enumerate(expected) for key in of_rank
             if not same(found[rank][key], of_rank[key])]  # fmt: skip
    if not wrong:
        return Property(name, f"{reference}, on all ranks", True)
    rank, key = wrong[0]
    text = f"{len(wrong)} differ from {reference}; first: {key} on rank {rank}"
    for mistake in mistakes:
        if all(same(of_rank[k], value[k]) for of_rank, value in zip(found, mistake.value)
               for k in value):  # fmt: skip
            return Property(name, text, False, mistake.sentence)
    one, other = found[rank][key], expected[rank][key]
    if not isinstance(one, Tensor):
        return Property(name, f"{text}, which is {one}", False)
    if one.shape != other.shape:
        return Property(name, f"{text}, {list(one.shape)} for {list(other.shape)}", False)
    ratio = (one * other).sum() / other.norm() ** 2
    relation = f"{ratio:.4g} times as large" if same(one, ratio * other) else "no multiple"
    return Property(name, f"{text}, {relation}", False)


def compare_numbers(
    name: str, found: list[float], expected: list[float], mistakes: list[Mistake]
) -> Property:
    """Return whether each rank has the number that is expected there. The value of a mistake is the
    number of each rank, too."""
    if all(map(same, found, expected)):
        return Property(name, f"that of one process, {expected[0]:.6g} on rank 0", True)
    rank = next(r for r, value in enumerate(found) if not same(value, expected[r]))
    text = f"{found[rank]:.6g} on rank {rank}, and {expected[rank]:.6g} in one process"
    recognized = (mistake.sentence for mistake in mistakes if all(map(same, found, mistake.value)))
    return Property(name, text, False, next(recognized, ""))
