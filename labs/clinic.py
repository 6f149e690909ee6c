"""The clinic: three trainings that are slower than they should be. Find out why.

    python labs/clinic.py admit              three sick runs, drawn from --seed, or --class
    python labs/clinic.py                    what people complain about, and the faults there are
    python labs/clinic.py step 1             `bench.py step` of run 1; more flags replace its own
    python labs/clinic.py answer 1           name the fault, the cure, and what the cure will gain

Each run is a copy of the project in out/clinic, and a command. Some are sick in a flag, some in a
line of code. You may measure as much as you like: in the copy with `step`, and in the project with
`bench.py step`, `compare`, `comm` and `plan`. Then answer once: the fault, the cure, and by which
factor the cure reduces what is too large. What you answer is written down, the cure is tried, and
you get a point for each of the three.
"""

import sys
from pathlib import Path

LABS = Path(__file__).resolve().parent
ROOT = LABS.parent
sys.path.insert(0, str(ROOT))

import argparse
import itertools
import json
import os
import random
import re
import runpy
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from labs.machinery.forms import Asked
from labs.machinery.predict import parse, seed_of_student
from labs.machinery.training import run_in_forks, to_tune
from plumbing.parser import Parser, nonnegative_int
from plumbing.processes import UserError, run
from runs.flags import MODEL_SIZES
from runs.records import write_atomically

WARD = ROOT / "out/clinic"
TINY = "--model tiny --seq-len 128 --optimizer adamw"
PER_NODE = 2  # ranks of each of two nodes, where collectives that cross are counted


# ------------------------------------------------------------------------------ what is measured


def sent(report: str) -> float:
    """Return the megabytes that each rank sends in a step."""
    return megabytes(re.search(r"counted: per step, each rank sends ([\d.,]+ \w+)", report)[1])


def crossing(report: str) -> float:
    """Return the megabytes that collectives whose ranks are in several nodes put out in a step."""
    payload = re.search(r"counted: .*; payload (.*)", report)[1]
    found = re.findall(r"([\d.,]+ \w+) by [\d,]+ [\w-]+ over (\w+)", payload)
    slow = {dim for dim, groups in re.findall(r"(\w+) groups ((?:\([\d ]+\) ?)+)", report)
            if any(len({int(rank) // PER_NODE for rank in group.split()}) > 1
                   for group in re.findall(r"\(([\d ]+)\)", groups))}  # fmt: skip
    return sum(megabytes(text) for text, dim in found if dim in slow)


def attentions(report: str) -> float:
    """Return how often attention runs forward, in a layer and microbatch."""
    return float(re.search(r"attention runs forward (\d+) time", report)[1])


def waiting(report: str) -> float:
    """Return the share of forward and backward in which ranks wait, by the schedule alone."""
    return float(re.search(r"wait for other stages ([\d.]+)% by the schedule", report)[1]) / 100


def megabytes(text: str) -> float:
    number, unit = text.replace(",", "").split()
    return float(number) * {"bytes": 1e-6, "KB": 1e-3, "kB": 1e-3, "MB": 1.0, "GB": 1e3}[unit]


# ------------------------------------------------------------------------------------ the faults


@dataclass(frozen=True)
class Fault:
    """A reason for a run to be slow."""

    complaint: str
    flags: str  # of train.py; the sick ones come last
    measure: Callable[[str], float]
    quantity: str  # what `measure` returns
    changes: tuple[tuple[str, str, str], ...] = ()  # file, lines, sick lines
    places: tuple[str, ...] = ()  # functions of parallel.py: to mend one of them is the cure
    nodes: int = 1
    ranks: int = 2
    tunes: bool = False  # a run of finetune_lora.py

    @property
    def unit(self) -> str:
        return " MB" if self.quantity.startswith("bytes") else ""

    def measure_in(self, report: str) -> float:
        """Return the quantity. Raises UserError if the report does not have it."""
        try:
            return self.measure(report)
        except (TypeError, KeyError, ValueError):
            raise UserError(f"this report does not say the {self.quantity}: try another cure")


RECOMPUTE = "            block.forward = recompute(block.forward, "
ATTENTION = "            block.attention.forward = recompute(block.attention.forward, False)\n"
WAITS = "    waits = isinstance(runner, DistributedDataParallel | zero1.ZeRO1) and not last\n"
CHECK = "    check_equal_replicas(job.model, world)\n"  # would tell
MESH = "    mesh = init_device_mesh(kind, sizes, mesh_dim_names=dims)\n"
TRANSPOSED = """\
    ranks = torch.arange(process.size).view(sizes[0], sizes[2], sizes[1], sizes[3]).transpose(1, 2)
    mesh = DeviceMesh(kind, ranks, mesh_dim_names=dims)
"""
FAULTS = {
    "a checkpoint in a checkpoint": Fault(
        "Recomputing should cost a third more time. It costs two thirds more.",
        f"{TINY} --batch 8 --microbatch 4 --checkpointing full",
        attentions,
        "forward runs of attention",
        (("techniques/recompute.py", RECOMPUTE, ATTENTION + RECOMPUTE),),
        ("recompute_and_compile", "recompute"),
    ),
    "a transposed mesh": Fault(
        "Hybrid sharding was fine on a node. On two it is slower than FSDP over all.",
        f"{TINY} --batch 16 --microbatch 2 --dp hsdp",
        crossing,
        "bytes over links between nodes",
        (("parallel.py", MESH, TRANSPOSED), ("runs/setup.py", CHECK, "")),
        ("with_mesh",),
        nodes=2,
        ranks=4,
    ),
    "gradients are sent in every microbatch": Fault(
        "Accumulating gradients over several microbatches made no step cheaper in communication.",
        f"{TINY} --batch 16 --microbatch 2 --dp ddp",
        sent,
        "bytes that a rank sends",
        (("parallel.py", WAITS, "    waits = False\n"),),
        ("gradient_sync",),
    ),
    "a frozen base is gathered": Fault(
        "LoRA trains 1 % of the weights. On two machines it is slower than on one.",
        "--batch 8 --microbatch 2 --dp fsdp",
        sent,
        "bytes that a rank sends",
        nodes=2,
        tunes=True,
    ),
    "microbatches are too small": Fault(
        "The network is busy all the time, although memory is nearly empty.",
        f"{TINY} --batch 16 --dp fsdp --microbatch 1",
        sent,
        "bytes that a rank sends",
    ),
    "float32 over a slow link": Fault(
        "The model needs both nodes. We copied our laptops' flags, and wait for the network.",
        f"{TINY} --batch 4 --microbatch 2 --dp fsdp --dtype float32",
        sent,
        "bytes that a rank sends",
        nodes=2,
    ),
    "weights are sharded over nodes": Fault(
        "The model fits into a node. On two nodes a step takes many times as long.",
        f"{TINY} --batch 16 --microbatch 2 --dp fsdp",
        crossing,
        "bytes over links between nodes",
        nodes=2,
        ranks=4,
    ),
    "a pipeline with too few microbatches": Fault(
        "Four stages should be nearly four times as fast as one, and are not twice.",
        "--model tiny --seq-len 64 --optimizer adamw --batch 16 --pp 4 --microbatch 8",
        waiting,
        "share of the time in which ranks wait",
        ranks=4,
    ),
    "activations are recomputed although they fit": Fault(
        "Since another model ran out of memory, each step takes a third longer.",
        f"{TINY} --batch 4 --microbatch 2 --checkpointing full",
        attentions,
        "forward runs of attention",
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------- the ward


def read_ward() -> dict:
    path = WARD / "ward.json"
    if not path.exists():
        raise UserError("no patients yet: python labs/clinic.py admit")
    return json.loads(path.read_text())


def write_ward(ward: dict) -> None:
    write_atomically(WARD / "ward.json", json.dumps(ward, indent=1))


def admit(args: argparse.Namespace) -> None:
    """Draw three faults and write a copy of the project for each."""
    if WARD.exists() and not args.again:
        raise UserError(f"{WARD} exists: --again replaces it and forgets the answers")
    seed = seed_of_student(args, "clinic")
    drawn = random.Random(seed).sample(list(FAULTS), 3)
    shutil.rmtree(WARD, ignore_errors=True)
    for number, name in enumerate(drawn, 1):
        copy_project(WARD / str(number), FAULTS[name])
    write_ward(dict(seed=seed, faults=drawn, answers={}))
    show(args)


def copy_project(directory: Path, fault: Fault) -> None:
    """Copy the project's scripts, changed if the fault is in the code, and link the rest."""
    directory.mkdir(parents=True)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, directory)
    for init in ROOT.glob("*/__init__.py"):
        shutil.copytree(init.parent, directory / init.parent.name)
    for file, lines, sick in fault.changes:
        text = (directory / file).read_text()
        if text.count(lines) != 1:
            raise UserError(f"{file} has changed, so that this fault cannot be put into it")
        (directory / file).write_text(text.replace(lines, sick))


def show(args: argparse.Namespace) -> None:
    ward = read_ward()
    for number, name in enumerate(ward["faults"], 1):
        fault = FAULTS[name]
        print(
            f"run {number}, on {fault.ranks} ranks" + f" of {fault.nodes} nodes" * (fault.nodes > 1)
        )
        print(
            f"  {fault.complaint}\n  python labs/clinic.py step {number}    # {command_of(fault)}"
        )
        if str(number) in ward["answers"]:
            print(f"  answered: {ward['answers'][str(number)]['points']} of 3 points")
    print("\nThe faults there are:")
    for number, name in enumerate(FAULTS, 1):
        print(f"  {number}  {name}")
    print("\nMeasure, then: python labs/clinic.py answer 1")


def command_of(fault: Fault) -> str:
    return f"{'finetune_lora.py' if fault.tunes else 'train.py'} {fault.flags}"


def measured(directory: Path, fault: Fault, flags: list[str], repeats: int = 1) -> str:
    """Return what `bench.py step` prints there, with flags that replace those of the run."""
    command = ["bench.py", "step", *shlex.split(fault.flags), *flags]
    if fault.tunes:
        command[2:2] = ["--lora", *to_tune(WARD, "--dtype float32")]
    command += ["--repeats", str(repeats)] * ("--repeats" not in flags)
    report = run_in_forks(partial(run_copy, directory, command), fault.ranks, fault.nodes)
    if report is None:
        raise UserError(f"it was refused, see above: {shlex.join(command)}")
    return report


def run_copy(directory: Path, command: list[str]) -> None:
    """Run a script there, with the modules there in place of those of this process."""
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/")
        if name != "__main__" and ROOT in file.parents and "site-packages" not in file.parts:
            del sys.modules[name]
    os.chdir(directory)
    sys.path.insert(0, str(directory))
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


# ------------------------------------------------------------------------------------- commands


def chosen(args: argparse.Namespace) -> tuple[dict, Fault, Path]:
    ward = read_ward()
    if args.run not in (1, 2, 3):
        raise UserError(f"{args.command} of which run? 1, 2 or 3")
    return ward, FAULTS[ward["faults"][args.run - 1]], WARD / str(args.run)


def step(args: argparse.Namespace) -> None:
    _, fault, directory = chosen(args)
    lines = measured(directory, fault, args.flags, repeats=5).splitlines()
    verdict = next((i for i, line in enumerate(lines) if line.startswith("- ")), len(lines))
    print("\n".join(lines[:verdict]).rstrip())  # what it means is the question


def ask(question: str, given: str | None, understood: Callable) -> int | str | float:
    """Return what `understood` makes of an answer. At a terminal it asks again, if that raises
    UserError."""
    while True:
        try:
            text = given if given is not None else input(f"{question}: ")
        except EOFError:
            raise UserError("no answer: nothing was written down") from None
        try:
            return understood(text.strip())
        except UserError as error:
            if given is not None or not sys.stdin.isatty():
                raise
            print(f"  {error}")


def fault_of(text: str) -> str:
    """Return the name of the fault with this number."""
    if text not in map(str, range(1, len(FAULTS) + 1)):
        raise UserError(f"'{text}' is no fault: give a number from 1 to {len(FAULTS)}")
    return list(FAULTS)[int(text) - 1]


def gain_of(text: str) -> float:
    """Return a factor as `predict` takes it."""
    try:
        gain = parse(text, Asked("gain", "factor")).value
    except ValueError as error:
        raise UserError(str(error))
    if not gain:
        raise UserError(f"'{text}' is no factor: give a positive number such as 1.5 or 3/2")
    return gain


def cure_of(text: str) -> str:
    """Return flags as they are, or the bare name of a function of parallel.py or techniques/."""
    if text.startswith("--"):
        check_flags(text)
        return text
    name = text.rpartition(".")[2].removesuffix("()")
    files = (ROOT / "parallel.py", *(ROOT / "techniques").glob("*.py"))
    if not any(re.search(rf"^ *def {re.escape(name)}\(", f.read_text(), re.M) for f in files):
        raise UserError(f"'{text}' is no cure: give flags, as --dp fsdp, or a function of "
                        "parallel.py or techniques/")  # fmt: skip
    return name


def check_flags(text: str) -> None:
    """Raise UserError for flags that ask for no run, or for other work."""
    try:
        flags = [word.split("=")[0] for word in shlex.split(text) if word.startswith("-")]
    except ValueError:
        raise UserError(f"'{text}' has a quote without its other half")
    if any(flag.startswith("-h") or "--help".startswith(flag) for flag in flags):
        raise UserError(f"'{text}' is no cure: give flags, as --dp fsdp")
    of_work = ("batch", "seq_len", "model", "tokenizer", "init", "data", *MODEL_SIZES)
    of_work = [f"--{name.replace('_', '-')}" for name in of_work]
    for flag, fixed in itertools.product(flags, of_work):
        if fixed.startswith(flag):  # argparse takes their beginnings, too
            raise UserError(f"'{text}': the cure may not change the work, which {fixed} does")


def answer(args: argparse.Namespace) -> None:
    """Take the three answers, write them down, try the cure, and grade."""
    ward, fault, directory = chosen(args)
    name, number = ward["faults"][args.run - 1], str(args.run)
    if number in ward["answers"]:
        raise UserError(f"run {number} has been answered")
    named = ask(f"fault, 1 to {len(FAULTS)}", args.fault, fault_of)
    question = "cure: the flag with its value, or the function of parallel.py to mend"
    cure = ask(question, args.cure, cure_of)
    quantity = FAULTS[named].quantity
    gain = ask(f"by which factor will the cure reduce the {quantity}", args.gain, gain_of)
    given = ward["answers"][number] = dict(fault=named, cure=cure, gain=gain, points=0)
    write_ward(ward)  # before anything is shown

    print("measuring the run with and without your cure ...")
    try:
        cured = fault.measure_in(cured_report(directory, fault, cure))
        sick = fault.measure_in(measured(directory, fault, []))
    except BaseException:  # flags that are refused are no answer; nor is Ctrl-C
        del ward["answers"][number]
        write_ward(ward)
        raise
    helps, factor = cured < 0.95 * sick, sick / max(cured, 1e-9)
    gains = f"you said {gain:.3g}, it is {factor:.3g}"
    if not helps:
        gains = "nothing to compare, since the cure did not help"
    both = f"{sick:.3g}{fault.unit}, and {cured:.3g}{fault.unit} with yours"
    points = [
        (named == name, f"fault: {name}"),
        (helps, f"cure: {fault.quantity}: {both}"),
        (helps and 0.9 < gain / factor < 1.1, f"gain: {gains}"),
    ]
    given["points"] = sum(ok for ok, _ in points)
    write_ward(ward)
    for ok, line in points:
        print(f"  {line:<84} {'ok' if ok else 'no'}")
    if fault.places:
        print(f"  it was in the function {fault.places[0]} of parallel.py")
    print(f"{given['points']} of 3 points")


def cured_report(directory: Path, fault: Fault, cure: str) -> str:
    """Return the report of a run with the cure: with flags in the copy, or by the project's own
    code. Raises UserError for flags that bench.py refuses."""
    if cure.startswith("--"):
        return measured(directory, fault, shlex.split(cure))
    return measured(ROOT if cure in fault.places else directory, fault, [])


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=raw)
    parser.add_argument("command", nargs="?", default="show",
                        choices=["show", "admit", "step", "answer"])  # fmt: skip
    parser.add_argument("run", nargs="?", type=int, help="1, 2 or 3")
    parser.add_argument(
        "--seed", type=nonnegative_int, help="admit: which faults (default: drawn at random)"
    )
    parser.add_argument("--class", dest="key", metavar="KEY", help="admit: a teacher's word")
    parser.add_argument("--student", metavar="NAME", help="admit: whose faults, with --class")
    parser.add_argument("--again", action="store_true", help="admit: in place of those there are")
    parser.add_argument("--fault", help="answer: its number (default: ask)")
    parser.add_argument("--cure", help="answer: a flag or a function (default: ask)")
    parser.add_argument("--gain", help="answer: a factor (default: ask)")
    args, args.flags = argparse.ArgumentParser.parse_known_args(parser)  # ours refuses others
    if args.flags and args.command != "step":
        parser.error(f"unrecognized arguments: {' '.join(args.flags)}")
    commands = {"show": show, "admit": admit, "step": step, "answer": answer}
    commands[args.command](args)


if __name__ == "__main__":
    run(main)
