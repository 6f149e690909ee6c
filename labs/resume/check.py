"""The check of labs/resume.

The ranks of `on_rank` train and save, and resume in the same processes. Then `properties` starts
ranks again and again, each time to go on, and kills one of them in the middle of a save.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.machinery import compare
from labs.machinery.compare import Property
from labs.machinery.crashes import WRITES, Watched, write
from labs.machinery.ranks import Ended, run_ranks
from labs.machinery.student import Misuse, check_returned, load_function

FUNCTION = "checkpointing"
ABOUT = "`save` and `resume`, for ranks that are killed"
NEEDS = "`barrier`, random state, `os.rename`"
POINT = "a complete checkpoint at any instant, nothing forgotten"
LEADS_TO = "checkpoint.py", "Saver"
SIZES = 2, 3
NEEDS_BARRIERS = True
BARRED = (
    "checkpoint.Saver",
    "checkpoint.resume",
    "torch.distributed.checkpoint.save",
    "torch.distributed.checkpoint.load",
)
HINTS = (
    "Look at the head of checkpoint.py: under which name does a save write, and when does a "
    "checkpoint get its own?",
    "List what the next step depends on: what does a rank hold, and what does it draw? Then go "
    "through your save line by line: what is on disk if a rank is killed before this line?",
    "save: rank 0 makes a new directory; barrier; each rank writes its file; barrier; rank 0 "
    "renames the directory, and removes older ones. resume: the newest directory of that name.",
)
HALF = (
    "A file that was half written is taken for a checkpoint: write under another name, and rename "
    "when all ranks have written."
)
EARLY = (
    "A directory is used before it is there, or renamed before all ranks have written: a barrier "
    "lets ranks wait for each other."
)
ERRORS = {
    "PytorchStreamReader": HALF,
    "Parent directory": EARLY,
    "No such file": EARLY,
    "File exists": "It is there already: another rank has made it, or a run that was killed.",
    "Directory not empty": "A directory cannot be renamed to one that has files. Is the name new, "
    "and did resume take the newest? Names are compared as strings: step-10 before step-5.",
}
ELSEWHERE = (
    "All is there after resume, and the next steps are others: put it back into the same tensors "
    "and generators, which the optimizer and the model use."
)
STEPS, EVERY = 60, 5  # of a run, and between two saves
FIRST = 30  # steps before the first resume
KILLS = 5
SCRATCH = tempfile.TemporaryDirectory()  # removed at the end, also if ranks are killed


def new_directory() -> Path:
    """Return a new directory in SCRATCH; or in the only one in which a submission may write."""
    is_graded = not Path(SCRATCH.name).is_relative_to(tempfile.gettempdir())
    place = tempfile.gettempdir() if is_graded else SCRATCH.name
    return Path(tempfile.mkdtemp(dir=place)).resolve()


# ------------------------------------------------------------------------------------ a small run


class Training:
    """A rank's shard of a model, its AdamW and its data."""

    def __init__(self, seed: int, rank: int):
        torch.manual_seed(100 * seed + rank)
        layers = nn.Linear(5, 13), nn.Tanh(), nn.Dropout(0.2), nn.Linear(13, 1)
        self.model = nn.Sequential(*layers).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.order = torch.Generator().manual_seed(100 * seed + rank)

    def start(self, checkpointing: Callable, directory: Path) -> tuple[Callable, Callable]:
        functions = checkpointing(directory, self.model, self.optimizer, self.order)
        check_returned(functions, (Callable, Callable), "two functions: save and resume")
        save, resume = functions
        return save, lambda: check_returned(resume(), int, "a step from resume, an int")

    def step(self) -> float:
        """Train a step together with all ranks, and return the sum of their losses."""
        self.optimizer.zero_grad()
        x = torch.randn(4, 5, dtype=torch.float64, generator=self.order)
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        of_ranks = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, loss.detach())
        self.optimizer.step()
        return float(sum(of_ranks))

    def state(self) -> dict[str, list[float]]:
        """Return what the next steps depend on: of a generator, the numbers that come next."""
        states = self.optimizer.state_dict()["state"].values()
        parts = {
            "weights": list(self.model.parameters()),
            "moments": [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")],
            "count": [state["step"] for state in states],
            "order": [next_numbers(self.order.get_state())],
            "dropout": [next_numbers(torch.get_rng_state())],
        }
        return {name: [number for tensor in tensors for number in tensor.flatten().tolist()]
                for name, tensors in parts.items()}  # fmt: skip


def next_numbers(state: Tensor) -> Tensor:
    generator = torch.Generator()
    generator.set_state(state)
    return torch.rand(3, generator=generator)


# -------------------------------------------------------------------------------- what ranks do


def on_rank(load: Callable, size: int, seed: int, rank: int) -> dict:
    """Train without saving; train and save; resume and go on. Return losses, what the next steps
    depend on, and what a save changes on disk."""
    training = Training(seed, rank)
    history = [training.state()]
    losses = []
    for _ in range(STEPS):
        losses.append(training.step())
        history.append(training.state())
    path, _ = load.args  # the student's file, for runs that are killed
    found = {"path": path, "history": history, "losses": losses, "disk": []}
    shared = [new_directory() if rank == 0 else None]
    dist.broadcast_object_list(shared)
    (directory,), training = shared, Training(seed, rank)
    watched = Watched(directory)
    checkpointing = load()
    save, resume = training.start(checkpointing, directory)
    found["nothing"] = resume()
    for step in range(1, FIRST + 1):
        training.step()
        if step % EVERY == 0:
            watched.begin()
            save(step)
            watched.end()
            dist.barrier()
            files = [file for file in directory.rglob("*") if file.is_file()]
            found["disk"].append(sum(file.stat().st_size for file in files))
            dist.barrier()
    found["changes"] = of_ranks = [None] * size
    dist.all_gather_object(of_ranks, watched.changes)
    if twice := written_twice(of_ranks):
        raise Misuse(
            f"Several ranks write {twice}, and the last one wins: each needs its own file."
        )
    training = Training(seed, rank)
    _, resume = training.start(checkpointing, directory)
    resume()
    training.step()
    found |= {"done": resume(), "state": training.state()}  # once more, into the same tensors
    found["after"] = [training.step() for _ in range(FIRST, STEPS)]
    return found


def written_twice(changes: list[list[str]]) -> str:
    """Return a file that several ranks write, or ""."""
    writers = Counter()
    for of_rank in changes:
        written = [change for change in of_rank if change.startswith(WRITES)]
        writers.update({change.partition(" ")[2] for change in written})
    return next((name for name, ranks in writers.items() if ranks > 1), "")


def instants(changes: list[list[str]], seed: int) -> list[tuple[int, int]]:
    """Return when to kill, as (rank, number of a change in its save): just after a rename, in the
    middle of two writes, and at others, all of them drawn."""
    every = [(rank, i) for rank, of_rank in enumerate(changes) for i in range(len(of_rank))]
    Random(seed).shuffle(every)

    def those(*what: str) -> list[tuple[int, int]]:
        return [(rank, i) for rank, i in every if changes[rank][i].startswith(what)]

    after_renames = [(rank, i + 1) for rank, i in those("renames")]
    chosen = [*after_renames[:1], *those(*WRITES)[:2], *every]
    return [*dict.fromkeys(chosen)][:KILLS]


def live(
    path: Path, seed: int, directory: Path, notes: Path, at: tuple[int, int] | None, rank: int
) -> None:
    """Resume, and train: until a rank is killed in the second save, or else to the last step."""
    with open(notes / f"{rank}", "w", buffering=1) as file:
        training = Training(seed, rank)
        watched = Watched(directory, file)
        save, resume = training.start(load_function(path, FUNCTION), directory)
        done = resume()
        write(file, "resumed", done, training.state())
        for step in range(done + 1, STEPS + 1):
            training.step()
            if step % EVERY == 0:
                is_last = at and rank == at[0] and step == done + 2 * EVERY
                watched.begin(fatal=at[1] if is_last else None)
                save(step)
                watched.end()


# --------------------------------------------------------------------------------- what is checked


def properties(results: dict[str, list], size: int, seed: int) -> Iterator[Property]:
    losses, path = results["losses"][0], results["path"][0]
    as_tensor = partial(torch.tensor, dtype=torch.float64)
    changes, histories = results["changes"][0], results["history"]
    yield compare.exactly(
        "resume returns",
        list(zip(results["nothing"], results["done"])),
        (0, FIRST),
        f"{{}}; {{}} are wanted, before any save and after save({FIRST})",
        "resume returns the step of the last save, and 0 where nothing was saved.",
    )
    for name in histories[0][FIRST]:
        found = [as_tensor(state[name]) for state in results["state"]]
        expected = [as_tensor(history[FIRST][name]) for history in histories]
        yield compare.tensors(name, found, expected, f"what ranks had after step {FIRST}")
    after, expected = results["after"][0], losses[FIRST:]
    equal = sum(loss == other for loss, other in zip(after, expected))
    text = f"{equal} of {len(after)} after a resume equal those of a run that went through"
    yield Property("loss", text, after == expected, ELSEWHERE)
    one, *_, all_saves = results["disk"][0]
    yield Property(
        "on disk",
        f"{all_saves:,} bytes after save({FIRST}), {one:,} after save({EVERY})",
        all_saves < 1.5 * one,
        "Old checkpoints fill the disk: remove them.",
    )
    directory = new_directory()
    saved = 0
    last_kill = ""
    if not (kills := instants(changes, seed)):
        sentence = "The check has to see your files as they are written: by torch.save or open."
        yield Property("killed", "no rank", False, sentence)
    for at in [*kills, None]:
        notes = new_directory()
        ended = run_ranks(partial(live, path, seed, directory, notes, at), size, path)
        of_ranks = [[json.loads(line) for line in (notes / f"{rank}").read_text().splitlines()]
                    for rank in range(size)]  # fmt: skip
        mistake = mistake_of(ended, of_ranks, saved, last_kill, histories)
        if mistake or last_kill:
            goes_on = "" if mistake else f"; goes on from {of_ranks[0][0][1]}"
            yield Property("killed", (last_kill or "no rank yet") + goes_on, not mistake, mistake)
        if at:
            (_, done, _), (_, change) = of_ranks[at[0]]
            saved = done + EVERY
            last_kill = f"as rank {at[0]} {change} in step {done + 2 * EVERY}"


def mistake_of(
    ended: Ended, notes: list[list], saved: int, last_kill: str, histories: list[list[dict]]
) -> str:
    """Return what went wrong after the last kill, by the ranks' notes; "" if nothing did. `saved`
    is the last step that was saved on all ranks before it."""
    starts = [of_rank[0] for of_rank in notes if of_rank]
    dones = [done for _, done, _ in starts]
    if len(set(dones)) > 1:
        return (
            f"Ranks go on from different steps, {dones}: a checkpoint is complete when the files "
            f"of all ranks are."
        )
    killed = any(of_rank[-1][0] == "killed" for of_rank in notes if of_rank)
    if ended.hangs and not killed:
        return "Ranks wait for each other, after a run that was killed."
    if (error := ended.error) and not killed:
        known = [text for part, text in ERRORS.items() if part in error.message]
        if len(starts) < len(notes) and any(word in last_kill for word in WRITES):
            known.append(HALF)
        where = f" in line {error.line}" if error.line else ""
        failed = f"Rank {error.rank} failed{where}: {error.kind}: {error.message}"
        return " ".join([*known[:1], failed])
    if dones[0] < saved:
        return (
            f"It goes on from {dones[0]}, though step {saved} was saved. The old checkpoint was "
            f"removed before the new one was complete."
        )
    for rank, (_, done, state) in enumerate(starts):
        for name, numbers in histories[rank][done].items():
            if state[name] != numbers:
                return f"On rank {rank} this is not as it was after step {done}: {name}."
    return ""
