"""The check of labs/hang.

The logs are those of simulated runs: each rank is a generator of the collectives that a small
training loop would call, and a rank goes on when its collectives have met those of the others. In
most runs some ranks have a fault. Which call is at fault comes from the same run without it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import zip_longest
from random import Random
from typing import NamedTuple

from labs.machinery.compare import Property
from labs.machinery.student import Misuse, check_returned

FUNCTION = "culprit"
ABOUT = "who is at fault, from the logs of all ranks"
NEEDS = "process groups, `Counter`"
POINT = "who waits is not at fault"
LEADS_TO = "labs/machinery/checking.py", "where_they_parted"
SIZES = (1,)  # of the process that reads the logs
HINTS = (
    "Look at one group alone: which of its calls is the first that not all of its ranks have made "
    "alike? And what about the calls after it?",
    "Count, for each group, how many ranks made the same call there. Which ranks made none because "
    "they wait elsewhere, and which because they have ended?",
    "For each group, the numbers of each rank's calls in it, side by side, up to the first "
    "difference. Then the ranks that wait somewhere. Then a Counter over what the ranks of a group "
    "did, without those that wait elsewhere.",
)


class Call(NamedTuple):
    """A collective that a rank has called, as in the student's file."""

    name: str
    shape: tuple[int, ...]
    group: tuple[int, ...]
    where: str


# ------------------------------------------------------------------------- simulated runs

STEPS = 6
KINDS = {  # line of the report -> what it says, and the faults
    "died": ("ranks have died", ["died", "never started"]),
    "batches": ("ranks have a batch less than others, or more", ["a batch less", "a batch more"]),
    "evaluation": ("ranks evaluate alone", ["evaluates", "evaluates last"]),
    "checkpoint": ("ranks gather a checkpoint alone", ["saves"]),
    "NaN": ("ranks leave the loop at a NaN of their own", ["NaN"]),
    "shapes": ("ranks have a smaller batch", ["smaller batch"]),
    "order": ("ranks send gradients in another order", ["order"]),
    "groups": ("the same, in nodes of 3 ranks", []),
    "ties": ("the same, on half of the ranks", []),
    "ends": ("no rank has a fault", []),
}
FAULTS = [fault for _, faults in KINDS.values() for fault in faults]


def training(rank: int, world: tuple, per_node: int, fault: str, when: int) -> Iterator[list]:
    """Yield the collectives of a rank's run, in lists of those that it starts before it waits for
    all of them. The run has a `fault` in step `when`, or "" for none.

    Weights are sharded within nodes of `per_node` ranks, and gradients are summed across nodes."""
    node = world[rank // per_node * per_node :][:per_node]
    across = world[rank % per_node :: per_node] if node != world else world

    if fault == "never started":
        return
    yield [Call("broadcast", (16, 8), world, "initial weights")]
    for step in range(STEPS + {"a batch less": -1, "a batch more": 1}.get(fault, 0)):
        now = fault if step == when else ""
        if now == "died":
            return
        if now == "NaN":
            break
        rows = 3 if now == "smaller batch" else 4
        yield [Call("all_gather", (rows, 8), node, "forward")]
        shapes = {"w2": (8, 16), "w1": (16, 8), "norm": (8,)}
        hooks = [Call("all_reduce", shape, across, f"hook of {name}")
                 for name, shape in shapes.items()]  # fmt: skip
        hooks = hooks[::-1] if now == "order" else hooks
        yield [*hooks, Call("all_reduce", (1,), world, "norm of all gradients")]
        if across[0] == 0:
            yield [Call("gather", (1,), across, "times of the nodes")]
        if step % 2 or now == "evaluates":
            yield [Call("all_reduce", (2,), node, "evaluation")]
        if now == "saves":
            yield [Call("gather", (16, 8), node, "checkpoint")]
    for _ in range(2 if fault == "evaluates last" else 1):
        yield [Call("all_reduce", (2,), node, "last evaluation")]


def simulate(programs: list[Iterator[list]]) -> tuple[list[list[Call]], list[int | None]]:
    """Let each rank go on as long as it can. Return the logs, and for each rank the number of its
    first call that never ends, None if all do."""
    logs = [[] for _ in programs]
    places = [[] for _ in programs]  # of each call: its group, and how many came before it there
    met = defaultdict(list)  # place -> name and shape of the calls that have met there
    done = Counter()  # group -> how many of its collectives have ended

    def waits(rank: int) -> int | None:
        return next((n for n, (group, i) in enumerate(places[rank], 1) if i >= done[group]), None)

    def start(rank: int, call: Call) -> None:
        group = call.group
        place = group, sum(other.group == group for other in logs[rank])
        logs[rank].append(call)
        places[rank].append(place)
        met[place].append((call.name, call.shape))
        while len(now := met[group, done[group]]) == len(group) and len(set(now)) == 1:
            done[group] += 1

    goes_on = True
    while goes_on:
        goes_on = False
        for rank, program in enumerate(programs):
            if not waits(rank):
                for call in next(program, []):
                    start(rank, call)
                    goes_on = True
    return logs, list(map(waits, range(len(programs))))


class Run(NamedTuple):
    """A simulated run, and what is right to say of it."""

    kind: str
    logs: list[list[Call]]
    waits: list[int | None]  # for each rank, the number of its first call that never ends
    truth: dict[int, int]  # rank at fault -> number of its call
    is_tie: bool


def make_run(kind: str, fault: str, size: int, guilty: set[int], when: int, per_node=0) -> Run:
    """Run `size` ranks, of which the guilty ones have a fault."""

    def programs(guilty: set[int]) -> list[Iterator]:
        world = tuple(range(size))
        return [training(rank, world, per_node or size, fault if rank in guilty else "", when)
                for rank in world]  # fmt: skip

    logs, waits = simulate(programs(guilty))
    healthy, _ = simulate(programs(set()))
    is_tie = 2 * len(guilty) == size
    if is_tie:
        truth = {rank: waits[rank] or len(logs[rank]) + 1 for rank in range(size)}
    else:  # the first call that is not as in the run without the fault
        pairs = {rank: enumerate(zip_longest(logs[rank], healthy[rank]), 1) for rank in guilty}
        truth = {rank: next(n for n, (a, b) in pairs[rank] if a != b) for rank in guilty}
    return Run(kind, logs, waits, truth, is_tie)


@cache
def drawn_runs(seed: int) -> list[Run]:
    """Return runs of all kinds."""
    random = Random(seed)
    runs = []

    def add(kind: str, fault: str, size: int, guilty: list[int], per_node: int = 0) -> None:
        when = random.choice((0, 2, 4))  # after these steps no rank should evaluate
        runs.append(make_run(kind, fault, size, set(guilty), when, per_node))

    for kind, (_, faults) in KINDS.items():
        for fault in faults:
            add(kind, fault, 4, [random.choice((1, 2, 3))])
            add(kind, fault, 3, [0])
            add(kind, fault, 5, random.sample(range(5), 2))
    for fault in FAULTS:
        add("groups", fault, 9, [random.randrange(9)], per_node=3)
    for size in (2, 4, 6):
        add("ties", random.choice(FAULTS), size, random.sample(range(size), size // 2))
    add("ends", "", 4, [])
    add("ends", "", 9, [], per_node=3)
    return runs


# ------------------------------------------------------------------------------ the check


def on_rank(load: Callable, size: int, seed: int, rank: int) -> list[dict[int, int]]:
    """Return what the student's function says of each run."""
    culprit = load()
    answers = []
    for run in drawn_runs(seed):
        logs = [list(log) for log in run.logs]
        answer = culprit(logs)
        check_returned(answer, dict, "a dict: rank -> number of its call")
        if culprit(logs) != answer:
            raise Misuse("A second call with the same logs gives another answer.")
        for rank_or_number in (*answer, *answer.values()):
            check_returned(rank_or_number, int, "ranks and numbers in a dict")
        answers.append(answer)
    return answers


def mistake_in(run: Run, found: dict[int, int]) -> str:
    """Return the sentence for a wrong answer."""
    logs, waits, truth = run.logs, run.waits, run.truth
    if not truth:
        return (
            "All calls of all ranks end here. The i-th call of a rank in a group meets the i-th "
            "calls of the others in that group: ranks outside of the group take no part in them."
        )
    rank, number = next(iter(truth.items()))
    if not found:
        if number > len(logs[rank]):
            return f"Rank {rank} has ended, and others wait for a call {number} of it."
        name, shape, *_ = logs[rank][number - 1]
        others = [log[n - 1] for log, n in zip(logs, waits) if n]
        if any(call.name == name and call.shape != shape for call in others):
            return f"Call {number} of rank {rank} is {name} as on others, but with other shapes."
        return f"Rank {rank} has as many calls as others. It made another call, not fewer."
    if found.keys() == truth.keys():
        if all(found[r] == truth[r] - 1 for r in truth):
            return "Calls are numbered from 1, and a missing call comes after the last."
        if found[rank] < number:
            return f"Numbers count all calls of a rank, in whatever group: {number} on rank {rank}."
        return (
            f"The log goes on after the call that never ends, as calls may be asynchronous: on "
            f"rank {rank} that is call {number}."
        )
    if run.is_tie:
        return (
            f"{len(logs) // 2} of the ranks did one thing, and as many did another: no log says "
            "who is right, so all of them are suspects."
        )
    innocent = sorted(found.keys() - truth.keys())
    if not innocent:
        return f"Rank {min(truth.keys() - found.keys())} is at fault, too."
    if rank == 0 and innocent == list(range(1, len(logs))):
        return "Rank 0 is the one at fault, and not the measure for the others: the majority is."
    blamed = innocent[0]
    if blamed >= len(logs):
        return f"There is no rank {blamed}."
    if waits[blamed] and found[blamed] > len(logs[blamed]):
        return (
            f"Rank {blamed} has made no call {found[blamed]} yet. It waits in another group, in "
            f"call {waits[blamed]}, and that is no fault."
        )
    return f"Rank {blamed} did what most did. Who waits is not at fault."


def wrong_run(answers: list[dict], seed: int) -> tuple[Run, dict] | None:
    """Return the run to speak of, and the wrong answer: the first in which a hang was not told from
    a run that ends, or else the first that is wrong."""
    wrong = [(run, found) for run, found in zip(drawn_runs(seed), answers) if found != run.truth]
    untold = [(run, found) for run, found in wrong if bool(found) != bool(run.truth)]
    return next(iter(untold + wrong), None)


def properties(results: list[list[dict]], size: int, seed: int) -> Iterator[Property]:
    answers = results[0]
    runs = drawn_runs(seed)
    wrong = wrong_run(answers, seed)
    mistake = mistake_in(*wrong) if wrong else ""
    told = [bool(found) == bool(run.truth) for run, found in zip(runs, answers)]
    text = f"{sum(told)} of {len(runs)} right: whether the run hangs"
    yield Property("output", text, all(told), mistake)
    for kind, (title, *_) in KINDS.items():
        of_kind = [(run, found) for run, found in zip(runs, answers) if run.kind == kind]
        right = sum(run.truth == found for run, found in of_kind)
        text = f"{right} of {len(of_kind)} right: {title}"
        yield Property(kind, text, right == len(of_kind), mistake)


def picture(results: list[list[dict]], size: int, seed: int) -> str:
    """Return where each rank waits, in the run that the report speaks of."""
    if not (wrong := wrong_run(results[0], seed)):
        return ""
    run, found = wrong
    lines = [f"your answer {found}, and right is {run.truth}; where ranks wait:"]
    for rank, (log, waits) in enumerate(zip(run.logs, run.waits)):
        if not waits:
            lines.append(f"rank {rank}  has ended, after call {len(log)}")
            continue
        call = log[waits - 1]
        more = len(log) - waits
        group = f" of ranks {', '.join(map(str, call.group))}" * (len(call.group) < len(run.logs))
        lines.append(
            f"rank {rank}  call {waits}: {call.name} {list(call.shape)}{group}, {call.where}"
            + f"; {more} more" * (more > 0)
        )
    return "\n".join(lines)
