"""Draw the curves of runs beside each other, in one page for a browser.

    python report.py out/tiny out/two                    writes report.html

The page needs no network and no other file. It shows what training scripts record in
OUT/metrics.jsonl and OUT/config.json; perf/report.html draws it.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import json
import math
from pathlib import Path
from typing import NamedTuple

from plumbing.json_files import JsonFile
from plumbing.messages import UserError
from plumbing.new_files import write_atomically
from plumbing.parser import Parser
from plumbing.processes import run
from runs.records import read_metrics

TEMPLATE = Path(__file__).resolve().parent / "perf/report.html"
POINTS = 2000  # of a curve; each is the mean of as many steps as needed
NO_CURVES = {"step", "tokens", "seconds"}


class Panel(NamedTuple):
    """A drawing of one curve of all runs. Evaluations are dots, of the same name after val_."""

    curve: str  # its name in metrics.jsonl, as `with_kind_of_loss` returns it
    title: str
    unit: str = ""
    is_smoothed: bool = True


PANELS = [
    Panel("loss", "loss", "nats a token"),
    Panel("loss_of_pairs", "loss of a pair", "nats"),
    Panel("loss_of_rewards", "loss of an answer", "near 0: watch the reward"),
    Panel("loss_of_teacher", "distance to the teacher", "nats a token"),
    Panel("bits_per_byte", "loss a byte", "bits a byte of text"),
    Panel("reward", "reward", "mean of answers"),
    Panel("agreement", "targets whose likeliest token is the teacher's", "share"),
    Panel("mixed", "groups whose rewards differ", "share"),
    Panel("end", "answers that end", "share"),
    Panel("length", "length of an answer", "tokens"),
    Panel("skipped", "groups left out for their rewards", "share"),
    Panel("entropy", "entropy of answers", "nats a token"),
    Panel("clipped", "tokens whose ratio is clipped", "share"),
    Panel("kl", "KL divergence from the base", "nats a token"),
    Panel("log_ratio", "log ratio of training and sampling", "nats, the largest of a token"),
    Panel("mean_log_ratio", "the same, on average", "nats a token"),
    Panel("sampling_seconds", "time to sample answers", "seconds a step"),
    Panel("rewarding_seconds", "time to reward answers", "seconds a step"),
    Panel("accuracy", "pairs with the chosen answer ahead", "share"),
    Panel("margin", "margin of chosen and rejected", "reward"),
    Panel("chosen", "reward of chosen answers", "mean of pairs"),
    Panel("rejected", "reward of rejected answers", "mean of pairs"),
    Panel("exam_accuracy", "exam: likeliest choice is right", "share of questions"),
    Panel("exam_normalized", "exam: likeliest a character", "share of questions"),
    Panel("exam_exact", "exam: written answer is right", "share of questions"),
    Panel("grad_norm", "gradient norm", "before clipping"),
    Panel("lr", "learning rate", "of a step", is_smoothed=False),
    Panel("tokens_per_second", "speed", "tokens a second"),
    Panel("mfu", "MFU", "share of the GPU's peak"),
    Panel("memory_bytes", "peak memory of rank 0", "bytes"),
]


def is_finite(value) -> bool:
    """Return whether JSON can hold a number, and a mean of such numbers."""
    return type(value) in (int, float) and abs(value) < 1e300


def finite_mean(values: list) -> float | None:
    """Return the mean of those values that are finite numbers, or None."""
    known = [value for value in values if is_finite(value)]
    mean = sum(value / len(known) for value in known)  # a sum of large ones would be infinite
    return float(f"{mean:.6g}") if known else None


def with_kind_of_loss(row: dict) -> dict:
    """Return a row of metrics in which losses that cannot be compared have other names.

    An evaluation of rewards.py has minus the reward as its loss, which `val_reward` says, too."""
    kind = ""
    if "margin" in row:
        kind = "_of_pairs"
    if "agreement" in row:
        kind = "_of_teacher"
    if "reward" in row:
        kind = "_of_rewards"
        row = {name: value for name, value in row.items() if name != "val_loss"}
    losses = {"loss": f"loss{kind}", "val_loss": f"val_loss{kind}"}
    return {losses.get(name, name): value for name, value in row.items()}


def is_evaluation(name: str) -> bool:
    return name.startswith(("val_", "exam_"))


def read_run(directory: Path) -> dict:
    """Return what the page shows of a run: its flags, with what it chose for those left open; how
    it was started; curves of at most POINTS points; and its evaluations."""
    if not (path := directory / "metrics.jsonl").is_file():
        raise UserError(f"{directory} is no run: it has no metrics.jsonl; give a run's --out")
    recorded = read_metrics(path)
    rows = [with_kind_of_loss(row) for row in recorded if type(row.get("tokens")) is int]
    flags = chosen = facts = {}
    if (path := directory / "config.json").is_file():
        config = JsonFile(path)
        sections = [config.checked(n, config.get(n, {}), dict) for n in ("flags", "facts", "run")]
        flags, chosen, facts = sections
    names = {}  # of all numbers of any row, in their order
    for row in rows:
        names |= {name: None for name, value in row.items() if type(value) in (int, float)}
    evaluated = [name for name in names if is_evaluation(name)]
    size = math.ceil(len(rows) / POINTS) or 1
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    curves, not_finite = {}, {}  # not_finite: the points of a curve in which a value is NaN
    for name in names.keys() - NO_CURVES - {*evaluated}:
        values = [[row[name] for row in group if row.get(name) is not None] for group in groups]
        curves[name] = [finite_mean(each) for each in values]
        not_finite[name] = [i for i, each in enumerate(values) if not all(map(is_finite, each))]
    evaluations = [
        {name: finite_mean([row.get(name)]) for name in ("step", "tokens", *evaluated)}
        | {"sample": str(row.get("sample", ""))}
        for row in rows
        if any(map(is_evaluation, row))
    ]
    return {
        "name": str(directory),
        "flags": {name: str(value) for name, value in (flags | chosen).items()},
        "facts": {name: str(value) for name, value in facts.items()},
        "steps_a_point": size,
        "step": [group[-1]["step"] for group in groups],
        "tokens": [group[-1]["tokens"] for group in groups],
        "curves": dict(sorted(curves.items())),
        "not_finite": not_finite,
        "evaluations": evaluations,
    }


def panels_of(runs: list[dict]) -> list[Panel]:
    """Return the panels of PANELS, and one for each other number that runs have recorded."""
    names = set()
    for shown in runs:
        names |= shown["curves"].keys()
        for evaluation in shown["evaluations"]:
            names |= {name.removeprefix("val_") for name in filter(is_evaluation, evaluation)}
    others = names - {panel.curve for panel in PANELS}
    return PANELS + [Panel(name, name.replace("_", " ")) for name in sorted(others)]


def page_of(runs: list[dict]) -> str:
    """Return the page. "<" is escaped, so that no text of a run can end the script it stands in."""
    panels = [panel._asdict() for panel in panels_of(runs)]
    content = json.dumps({"runs": runs, "panels": panels})
    return TEMPLATE.read_text("utf-8").replace("RUNS_AS_JSON", content.replace("<", "\\u003c"))


def main() -> None:
    parser = Parser(description="Draw the curves of runs beside each other, in one page.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="OUT", help="directories of runs")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page")
    args = parser.parse_args()
    head = TEMPLATE.read_bytes()[:200]
    if args.out.exists() and not (args.out.is_file() and args.out.read_bytes().startswith(head)):
        raise UserError(f"{args.out} exists, and is no page of report.py: choose another --out")
    write_atomically(args.out, page_of([read_run(path) for path in args.runs]))
    print(f"{args.out}: {len(args.runs)} run(s)")


if __name__ == "__main__":
    run(main)
