"""Draw the curves of runs beside each other, in one page for a browser.

    python report.py out/tiny out/two                    writes report.html

The page needs no network and no other file. It shows what training scripts record in
OUT/metrics.jsonl and OUT/config.json; perf/report.html draws it.
"""

import plumbing.endings  # first, for Ctrl-C during the imports
import json
import math
from pathlib import Path

from plumbing.json_files import JsonFile
from plumbing.messages import UserError
from plumbing.new_files import write_atomically
from plumbing.parser import Parser
from plumbing.processes import run
from runs.records import read_metrics

TEMPLATE = Path(__file__).resolve().parent / "perf/report.html"
CURVES = "loss bits_per_byte grad_norm lr tokens_per_second memory_bytes".split()
CURVES += "accuracy margin chosen rejected reward mixed".split()  # of preferences and rewards
EVALUATED = [f"val_{name}" for name in CURVES]
POINTS = 2000  # of a curve; each is the mean of as many steps as needed


def finite_mean(values: list) -> float | None:
    """Return the mean of those values that are finite numbers, which JSON can hold; else None."""
    known = [value for value in values if isinstance(value, int | float) and abs(value) < 1e300]
    mean = sum(value / len(known) for value in known)  # a sum of large ones would be infinite
    return float(f"{mean:.6g}") if known else None


def read_run(directory: Path) -> dict:
    """Return what the page shows of a run: its flags, what else config.json says of it, curves of
    at most POINTS points, and its evaluations."""
    if not (path := directory / "metrics.jsonl").is_file():
        raise UserError(f"{directory} is no run of train.py: it has no metrics.jsonl")
    rows = [row for row in read_metrics(path) if type(row.get("tokens")) is int]
    flags, facts = {}, {}
    if (path := directory / "config.json").is_file():
        config = JsonFile(path)
        flags, facts = (config.checked(n, config.get(n, {}), dict) for n in ("flags", "run"))
    size = math.ceil(len(rows) / POINTS) or 1
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    evaluations = [
        {name: finite_mean([row.get(name)]) for name in ("step", "tokens", *EVALUATED)}
        | {"sample": str(row.get("sample", ""))}
        for row in rows
        if any(name in row for name in EVALUATED)
    ]
    return {
        "name": str(directory),
        "flags": {name: str(value) for name, value in flags.items()},
        "facts": {name: str(value) for name, value in facts.items()},
        "steps_a_point": size,
        "step": [group[-1]["step"] for group in groups],
        "tokens": [group[-1]["tokens"] for group in groups],
        "curves": {
            name: [finite_mean([row.get(name) for row in group]) for group in groups]
            for name in CURVES
        },
        "evaluations": evaluations,
    }


def page_of(runs: list[dict]) -> str:
    """Return the page. "<" is escaped, so that no text of a run can end the script it stands in."""
    content = json.dumps({"runs": runs})
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
