"""The clinic: three trainings that are slower than they should be. Find out why.

    python labs/clinic.py admit              three sick runs, drawn from --seed, or --class
    python labs/clinic.py                    what people complain about, and the faults there are
    python labs/clinic.py step 1             `bench.py step` of run 1; more flags replace its own
    python labs/clinic.py answer 1 --fault NUMBER --cure='FLAGS' --gain FACTOR

Each run is a copy of the project in out/clinic, and a command. Some are sick in a flag, some in a
line of code. You may measure as much as you like: in the copy with `step`, and in the project with
`bench.py step`, `compare` and `plan`. Then answer once: the number of the fault, the cure
(flags, or the function of parallel.py or techniques/ to mend), and by which factor the cure reduces
what is too large. The cure is tried, and you get a point for each of the three.
"""

import sys
from pathlib import Path

LABS = Path(__file__).resolve().parent
ROOT = LABS.parent
sys.path.insert(0, str(ROOT))

import argparse
import json
import random
import re
import shlex
import shutil
from dataclasses import dataclass, fields

from labs.machinery.launch import launch
from labs.machinery.predict import seed_of_student
from models.family import families
from plumbing.messages import UserError
from plumbing.new_files import write_atomically
from plumbing.parser import Parser, nonnegative_int, positive_float
from plumbing.processes import run
from text.tokenizer import CACHE

WARD = ROOT / "out/clinic"
PER_NODE = 2  # ranks of each of two nodes, where collectives that cross are counted


# ------------------------------------------------------------------------------ what is measured

SENT, CROSSING = "MB that a rank sends", "MB over links between nodes"
ATTENTIONS, WAITING = "forward runs of attention", "% of the time in which ranks wait"
REPORTED = {  # where a report says a quantity
    SENT: r"counted: per step, each rank sends ([\d.,]+ \w+)",
    CROSSING: r"counted: .*; payload (.*)",
    ATTENTIONS: r"attention runs forward (\d+) time",
    WAITING: r"wait for other stages ([\d.]+)% by the schedule",
}


def read(quantity: str, report: str) -> float:
    """Return a quantity. Raises UserError if the report does not have it."""
    if not (said := re.search(REPORTED[quantity], report)):
        raise UserError(f"the report does not say the {quantity}: try another cure")
    if quantity != CROSSING:
        return number_of(said[1])
    slow = {dim for dim, groups in re.findall(r"(\w+) groups ((?:\([\d ]+\) ?)+)", report)
            if any(len({int(rank) // PER_NODE for rank in group.split()}) > 1
                   for group in re.findall(r"\(([\d ]+)\)", groups))}  # fmt: skip
    payloads = re.findall(r"([\d.,]+ \w+) by [\d,]+ [\w-]+ over (\w+)", said[1])
    return sum(number_of(text) for text, dim in payloads if dim in slow)


def number_of(text: str) -> float:
    number, _, unit = text.replace(",", "").partition(" ")
    return float(number) * {"bytes": 1e-6, "KB": 1e-3, "kB": 1e-3, "GB": 1e3}.get(unit, 1)


# ------------------------------------------------------------------------------------ the faults


@dataclass(frozen=True)
class Fault:
    """A reason for a run to be slow."""

    complaint: str
    flags: str  # of train.py; the sick ones come last
    quantity: str  # what the cure reduces
    changes: tuple[tuple[str, str, str], ...] = ()  # file, lines, sick lines
    places: tuple[str, ...] = ()  # functions of parallel.py: to mend one of them is the cure
    nodes: int = 1
    ranks: int = 2
    tunes: bool = False  # a run of finetune_lora.py


RECOMPUTE = "            block.forward = recompute(block.forward, "
ATTENTION = "            block.attention.forward = recompute(block.attention.forward, False)\n"
LATER = "    sends_later = isinstance(runner, DistributedDataParallel | zero1.ZeRO1) and not last\n"
CHECK = "    setup.check_equal_replicas(job.model, world)\n"  # would tell
MESH = "    mesh = init_device_mesh(kind, sizes, mesh_dim_names=dims)\n"
TRANSPOSED = """\
    pp, replicate, shard, tp = sizes
    ranks = torch.arange(process.size).view(pp, shard, replicate, tp).transpose(1, 2)
    mesh = DeviceMesh(kind, ranks, mesh_dim_names=dims)
"""
TINY = "--model tiny --seq-len 128 --optimizer adamw"
# fmt: off
FAULTS = {
    "a checkpoint in a checkpoint": Fault(
        "Recomputing should cost a third more time. It costs two thirds more.",
        f"{TINY} --batch 8 --microbatch 4 --checkpointing full", ATTENTIONS,
        (("techniques/recompute.py", RECOMPUTE, ATTENTION + RECOMPUTE),),
        ("recompute_and_compile", "recompute")),
    "a transposed mesh": Fault(
        "Hybrid sharding was fine on a node. On two it is slower than FSDP over all.",
        f"{TINY} --batch 16 --microbatch 2 --dp hsdp", CROSSING,
        (("parallel.py", MESH, TRANSPOSED), ("train.py", CHECK, "")),
        ("with_mesh",), nodes=2, ranks=4),
    "gradients are sent in every microbatch": Fault(
        "Accumulating gradients over several microbatches made no step cheaper in communication.",
        f"{TINY} --batch 16 --microbatch 2 --dp ddp", SENT,
        (("parallel.py", LATER, "    sends_later = False\n"),),
        ("gradient_sync",)),
    "a frozen base is gathered": Fault(
        "LoRA trains 1 % of the weights. On two machines it is slower than on one.",
        "--batch 8 --microbatch 2 --dp fsdp", SENT, nodes=2, tunes=True),
    "microbatches are too small": Fault(
        "The network is busy all the time, although memory is nearly empty.",
        f"{TINY} --batch 16 --dp fsdp --microbatch 1", SENT),
    "float32 over a slow link": Fault(
        "The model needs both nodes. We copied our laptops' flags, and wait for the network.",
        f"{TINY} --batch 4 --microbatch 2 --dp fsdp --dtype float32", SENT, nodes=2),
    "weights are sharded over nodes": Fault(
        "The model fits into a node. On two nodes a step takes many times as long.",
        f"{TINY} --batch 16 --microbatch 2 --dp fsdp", CROSSING, nodes=2, ranks=4),
    "a pipeline with too few microbatches": Fault(
        "Four stages should be nearly four times as fast as one, and are not twice.",
        "--model tiny --seq-len 64 --optimizer adamw --batch 16 --pp 4 --microbatch 8", WAITING,
        ranks=4),
    "activations are recomputed although they fit": Fault(
        "Since another model ran out of memory, each step takes a third longer.",
        f"{TINY} --batch 4 --microbatch 2 --checkpointing full", ATTENTIONS),
}
# fmt: on


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
    drawn = random.Random(seed_of_student(args, "clinic")).sample(list(FAULTS), 3)
    if WARD.exists() and not args.again:
        raise UserError(f"{WARD} exists: --again replaces it and forgets the answers")
    shutil.rmtree(WARD, ignore_errors=True)
    for number, name in enumerate(drawn, 1):
        copy_project(WARD / str(number), FAULTS[name])
    write_ward(dict(faults=drawn, answers={}))
    show(args)


def copy_project(directory: Path, fault: Fault) -> None:
    """Copy the project, changed if the fault is in the code."""
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


def measured(directory: Path, fault: Fault, cure: str = "", repeats: int = 1) -> str:
    """Return what `bench.py step` prints there. A cure is flags that replace those of the run; or
    the name of a function, and then, if the fault is in it, the project's own code runs."""
    directory = ROOT if cure in fault.places else directory
    flags = shlex.split(fault.flags) + shlex.split(cure) * cure.startswith("-")
    tuned = ["--lora", *base_and_chats()] if fault.tunes else []
    command = ["bench.py", "step", "--repeats", str(repeats), *tuned, *flags]
    return launch(directory, command, fault.ranks, fault.nodes, FLATLLAMA_CACHE=str(CACHE))


def base_and_chats() -> list[str]:
    """Return finetune_lora.py's flags for a small model and conversations, made if not there."""
    base = WARD / "base"
    chats = WARD / "chats.jsonl"
    if not base.exists():
        lines = ({"prompt": f"{i} plus 1", "completion": f"is {i + 1}"} for i in range(400))
        chats.write_text("\n".join(map(json.dumps, lines)))
        flags = f"{TINY} --tokenizer bytes --data docs --batch 2 --steps 1 --eval-every 0"
        launch(ROOT, ["train.py", *flags.split(), "--out", str(base)], ranks=1)
    return ["--init", str(base), "--data", str(chats)]


# ------------------------------------------------------------------------------------- commands


def show(args: argparse.Namespace) -> None:
    ward = read_ward()
    for number, name in enumerate(ward["faults"], 1):
        fault = FAULTS[name]
        nodes = f" of {fault.nodes} nodes" * (fault.nodes > 1)
        script = "finetune_lora.py" if fault.tunes else "train.py"
        print(f"run {number}, on {fault.ranks} ranks{nodes}\n  {fault.complaint}")
        print(f"  python labs/clinic.py step {number}    # {script} {fault.flags}")
        if str(number) in ward["answers"]:
            print(f"  answered: {ward['answers'][str(number)]['points']} of 3 points")
    print("\nThe faults there are:")
    for number, name in enumerate(FAULTS, 1):
        print(f"  {number}  {name}")
    print("\nMeasure, then: clinic.py answer 1 --fault NUMBER --cure='FLAGS' --gain FACTOR")


def chosen(args: argparse.Namespace) -> tuple[dict, Fault, Path]:
    ward = read_ward()
    if args.run not in (1, 2, 3):
        raise UserError(f"{args.command} of which run? 1, 2 or 3")
    return ward, FAULTS[ward["faults"][args.run - 1]], WARD / str(args.run)


def step(args: argparse.Namespace) -> None:
    _, fault, directory = chosen(args)
    report = measured(directory, fault, shlex.join(args.flags), repeats=5)
    print(report.partition("\n- ")[0].rstrip())  # what it means is the question


def answer(args: argparse.Namespace) -> None:
    """Try the cure, write the answer and its points down, and show what was right."""
    ward, fault, directory = chosen(args)
    name = ward["faults"][args.run - 1]
    number = str(args.run)
    if number in ward["answers"]:
        raise UserError(f"run {number} has been answered")
    if None in (args.fault, args.cure, args.gain):
        raise UserError("an answer has a --fault, a --cure and a --gain")
    print("measuring the run with and without your cure ...", flush=True)
    cured = read(fault.quantity, measured(directory, fault, args.cure))
    sick = read(fault.quantity, measured(directory, fault))
    helps = cured < 0.95 * sick
    factor = sick / max(cured, 1e-9)
    gains = f"you said {args.gain:.3g}, it is {factor:.3g}" if helps else "the cure did not help"
    points = [
        (list(FAULTS)[args.fault - 1] == name, f"fault: {name}"),
        (helps, f"cure: {fault.quantity}: {sick:.3g}, and {cured:.3g} with yours"),
        (helps and 0.9 < args.gain / factor < 1.1, f"gain: {gains}"),
    ]
    total = sum(ok for ok, _ in points)
    given = dict(fault=args.fault, cure=args.cure, gain=args.gain, points=total)
    write_ward(ward | {"answers": ward["answers"] | {number: given}})
    for ok, line in points:
        print(f"  {line:<84} {'ok' if ok else 'no'}")
    if fault.places:
        print(f"  it was in the function {fault.places[0]}")
    print(f"{total} of 3 points")


def cure_of(text: str) -> str:
    """Return flags as they are, or the bare name of a function of parallel.py or techniques/.
    Raises UserError for other words, and for flags that change the work."""
    work = {"batch", "seq_len", "model", "tokenizer", "init", "data"}
    for family in families().values():
        work |= {f.name for f in fields(family.config)}
    for flag in (word.split("=")[0] for word in shlex.split(text)):
        if flag.startswith("--") and flag[2:].replace("-", "_") in work:
            raise UserError(f"'{text}': the cure may not change the work, which {flag} does")
    if text.startswith("--"):
        return text
    name = text.rpartition(".")[2].removesuffix("()")
    files = (ROOT / "parallel.py", *(ROOT / "techniques").glob("*.py"))
    if not any(re.search(rf"^ *def {re.escape(name)}\(", f.read_text(), re.M) for f in files):
        raise UserError(f"'{text}' is no cure: give flags, as --dp fsdp, or a function of "
                        "parallel.py or techniques/")  # fmt: skip
    return name


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"show": show, "admit": admit, "step": step, "answer": answer}
    add = parser.add_argument
    # fmt: off
    add("command", nargs="?", default="show", choices=commands)
    add("run", nargs="?", type=int, help="1, 2 or 3")
    add("--seed", type=nonnegative_int, help="admit: which faults (default: drawn at random)")
    add("--class", dest="key", metavar="KEY", help="admit: a teacher's word")
    add("--student", metavar="NAME", help="admit: whose faults, with --class")
    add("--again", action="store_true", help="admit: in place of those there are")
    add("--fault", type=int, choices=range(1, len(FAULTS) + 1), help="answer: its number")
    add("--cure", type=cure_of, help="answer: flags in quotes, or a function")
    add("--gain", type=positive_float, help="answer: a factor")
    # fmt: on
    args, args.flags = argparse.ArgumentParser.parse_known_args(parser)  # ours refuses others
    if args.flags and args.command != "step":
        parser.error(f"unrecognized arguments: {' '.join(args.flags)}")
    commands[args.command](args)


if __name__ == "__main__":
    run(main)
