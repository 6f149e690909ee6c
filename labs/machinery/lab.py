"""What the checks of all labs share.

A lab is a folder with a page, README.md, its picture, and answer.py: the solution between marks,
from which the starter is made, and patches of it that are wrong (answers.py). Its check.py has:

    FUNCTION    name of the student's function
    SIZES       numbers of ranks to check it on
    HINTS       three: where to look, what to count, the shape of the code; no numbers
    ABOUT, NEEDS, POINT    the lab's cells of the tables in labs/README.md
    LEADS_TO    file and function of the project that do the same; its docstring names the lab
    ERRORS      (may be left out) part of an exception's message -> the sentence for that mistake
    BARRED      (may be left out) "module.name" of what the function is to replace
    NEEDS_BARRIERS    (may be left out) True where a barrier is no mistake
    on_rank     (load, size, seed, rank) -> what the student's function gave, sent and held there;
                load() returns the function
    properties  (results of all ranks, size, seed) -> yields a Property for each line of the report
    picture     (may be left out) the same -> a text that is shown below these lines
    drawing     (may be left out) the same -> an SVG for --plot, or ""
    RUN, install    (may be left out) how train.py runs with the function: see training.py

run.py lists the labs in ORDER.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from model import IGNORE, Llama, LlamaConfig
from parallel import ParallelConfig, World, parallelize, with_mesh
from perf.instruments import all_reduce_at_once, build_on_meta
from plumbing.processes import Process
from plumbing.shards import assign_shard
from text.batch import Batch

CONFIG = LlamaConfig(16, 2, 4, 2, 24, vocab_size=101, tie_embeddings=True)
ROWS, SEQ = 12, 13  # of a step's batch; 2, 3 and 4 ranks divide the rows
TOLERANCE = 1e-12
NEAR = 1e-5  # of a number: what float32 somewhere makes of one in float64
ROUNDED = (
    "Nearly right: something was rounded to float32 on the way. All is float64 here, but "
    "torch.full, zeros, ones and tensor make float32 if no dtype is given."
)


class Property(NamedTuple):
    """A line of a check's report: what was checked, what was found, and if that is wrong, why."""

    name: str
    text: str
    ok: bool
    mistake: str = ""  # the sentence for it, shown if it is not ok


def world_of(rank: int, size: int) -> World:
    """Return the ranks as replicas, on this machine."""
    process = Process(rank, size, rank, size, torch.device("cpu"))
    return with_mesh(process, ParallelConfig(dtype=torch.float64, replicate=size))


@contextlib.contextmanager
def first_rank(config: LlamaConfig, parallel: ParallelConfig) -> Iterator[tuple]:
    """Within this context, have a model in real tensors on rank 0 of a fake process group: nothing
    is sent, and what it receives is garbage. Yields (model, runner, world)."""
    size = parallel.size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        world = with_mesh(Process(0, size, 0, size, torch.device("cpu")), parallel)
        model = build_on_meta(config)
        runner = parallelize(model, world, partial(Llama.init_weights, assign=assign_shard))
        if isinstance(runner, DistributedDataParallel):
            runner.register_comm_hook(world.mesh.get_group("replicate"), all_reduce_at_once)
        yield model, runner, world
    finally:
        dist.destroy_process_group()


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
    """Return the norm of all gradients together."""
    return torch.stack([g.norm() for g in gradients.values()]).norm().item()


def plural(n: int, noun: str) -> str:
    """Return a number with its noun, such as "1 block" or "2 microbatches"."""
    ending = "" if n == 1 else "es" if noun.endswith("ch") else "s"
    return f"{n} {noun}{ending}"


def same(found: object, expected: Tensor | float) -> bool:
    """Return whether a tensor or number is the expected one, up to rounding in float64."""
    if not isinstance(found, Tensor | float | int):
        return False
    found, expected = (torch.as_tensor(v, dtype=torch.float64) for v in (found, expected))
    if found.shape != expected.shape:
        return False
    return bool((found - expected).norm() <= TOLERANCE * max(expected.norm(), 1e-300))


def exactly(
    name: str, found: list, expected: object, text: str, mistakes: dict | str = ""
) -> Property:
    """Return whether each rank has what is expected. `text` is a format of what was found and what
    was expected; `mistakes` is the sentence for it, or maps what was found to one."""
    value = unexpected(found, expected)
    mistake = mistakes if isinstance(mistakes, str) else mistakes.get(value, "")
    return Property(name, text.format(value, expected), value == expected, mistake)


def at_most(name: str, found: list, limit: float, text: str, mistake: str = "") -> Property:
    """Return whether no rank has more than a limit. `text` is a format of the most and of that."""
    most = max(found)
    return Property(name, text.format(most, limit), most <= limit, mistake)


def unexpected(values: list, expected: object) -> object:
    """Return the first of the ranks' values that is not the expected one, or else that one."""
    return next((value for value in values if value != expected), expected)


def sentence(cases: dict[str, object]) -> str:
    """Return the first sentence whose condition holds, "" if none does."""
    return next((text for text, holds in cases.items() if holds), "")


def by_kind(sent: dict[tuple, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return what was sent, (group, collective) -> (calls, bytes), by collective alone."""
    return {kind: total for (_, kind), total in sent.items()}


def nbytes_of(sent: dict[tuple, tuple[int, int]]) -> int:
    """Return the bytes of all that was sent."""
    return sum(nbytes for _, nbytes in sent.values())


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return tensors of these shapes with normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


Values = list[dict[str, Tensor]]  # of each rank: name -> tensor
# Of each rank a tensor, or several by name; or, where all ranks have the same, that alone.
Given = list[Tensor | dict[str, Tensor]] | Tensor | dict[str, Tensor]


def of_ranks(given: Given, name: str, size: int) -> Values:
    given = given if isinstance(given, list) else [given] * size
    return [one if isinstance(one, dict) else {name: one} for one in given]


def compare_tensors(
    name: str,
    found: list,
    expected: Given,
    mistakes: dict[str, Given] | None = None,
    reference: str = "those of one process",
    otherwise: str = "",
) -> Property:
    """Return whether each rank has the tensors that are expected there, those of `reference`.

    `mistakes` maps a sentence to what the mistake gives on each rank; `otherwise` is the sentence
    for values that none of them gives."""
    found, expected = (of_ranks(given, name, len(found)) for given in (found, expected))
    wrong = [(rank, key) for rank, of_rank in enumerate(expected) for key in of_rank
             if not same(found[rank][key], of_rank[key])
             or found[rank][key].dtype != of_rank[key].dtype]  # fmt: skip
    if not wrong:
        return Property(name, f"{reference}, on all ranks", True)
    rank, key = wrong[0]
    keys, ranks = len({key for _, key in wrong}), len({rank for rank, _ in wrong})
    differ = "differs" if keys == 1 else "differ"
    text = f"{keys} of {len(expected[0])} {differ}, on {ranks} of {len(expected)} ranks"
    for mistake, given in (mistakes or {}).items():
        pairs = zip(found, of_ranks(given, name, len(found)))
        if all(same(ours[k], theirs[k]) for ours, theirs in pairs for k in theirs):
            return Property(name, text, False, mistake)
    one, other = found[rank][key], expected[rank][key]
    where = f"{key} on rank {rank}"
    if not isinstance(one, Tensor):
        return Property(name, f"{where} is {one}", False, otherwise)
    if one.dtype != other.dtype:
        return Property(name, f"{where} is in {one.dtype}, not in {other.dtype}", False, otherwise)
    if one.shape != other.shape:
        text = f"{where} has shape {list(one.shape)}, and should have {list(other.shape)}"
        return Property(name, text, False, otherwise)
    apart = float((one - other).norm() / other.norm())
    if apart < NEAR:
        return Property(name, f"{text}; {where} is off by {apart:.0e} of it", False, ROUNDED)
    ratio = float((one * other).sum() / other.norm() ** 2)
    if same(one, ratio * other):
        text += f"; {where} is {ratio:.10g} times as large"
    else:
        text += f"; {where} is no multiple of the right one"
    return Property(name, text, False, otherwise)


def compare_numbers(
    name: str,
    found: list[float],
    expected: list[float] | float,
    mistakes: dict[str, list[float] | float],
) -> Property:
    """Return whether each rank has the number that is expected there. `mistakes` maps a sentence to
    what the mistake gives on each rank, or on all."""
    expected, *known = (given if isinstance(given, list) else [given] * len(found)
                        for given in (expected, *mistakes.values()))  # fmt: skip
    if all(map(same, found, expected)):
        return Property(name, f"that of one process, {expected[0]:.6g} on rank 0", True)
    rank = next(r for r, value in enumerate(found) if not same(value, expected[r]))
    text = f"{found[rank]:.10g} on rank {rank}, and {expected[rank]:.10g} in one process"
    recognized = (mistake for mistake, numbers in zip(mistakes, known)
                  if all(map(same, found, numbers)))  # fmt: skip
    near = all(abs(one - other) < NEAR * abs(other) for one, other in zip(found, expected))
    return Property(name, text, False, next(recognized, ROUNDED * near))
