"""Change one token of a file that computes, at random, and see whether the fast tests find it.

    pip install coverage
    python tests/mutate.py --seed 1 --n 100

In a clone of the last commit, out/mutants/COMMIT, each test file first runs alone under coverage,
which tells whose tests run which lines, also in the processes that they start. Then faults are
planted, one after another: another operator, constant, mesh dimension or placement, or a `not` or a
minus left out. The test files that run its line run, the quickest first, until a test fails or
hangs. All results are kept there: the same command goes on where it was ended.

A test that fails only because it would itself change the line that has changed does not count.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import NamedTuple

try:
    from coverage import CoverageData
except ImportError:
    raise SystemExit("tests/mutate.py needs coverage.py: pip install coverage")

ROOT = Path(__file__).resolve().parent.parent
COMPUTES = """
model.py parallel.py train.py lora.py finetune_lora.py preferences.py rewards.py distill.py
techniques/*.py models/*.py text/batch.py text/order.py text/packing.py text/pairs.py
text/targets.py runs/answers.py runs/each_target.py runs/scores.py runs/teacher.py
""".split()
# These do not count, either.
READ_SOURCE = "test_attributes test_docs test_faults test_layout test_ratchet".split()
NOT_THERE = "source.count(old) == 1", "'git', 'apply'"  # what tests print that miss a line
DIMENSIONS = "replicate shard tp pp cp ep".split()
OPERATORS = {
    "+": "-", "-": "+", "*": "/", "/": "*", "**": "*", "//": "*", "%": "*", "@": "*",
    "+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=", "//=": "*=", "|=": "&=", "&=": "|=",
    "&": "|", "|": "&", "^": "|", "<<": ">>", ">>": "<<", "and": "or", "or": "and",
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
}  # fmt: skip
NAMES = {
    "min": "max", "max": "min", "amin": "amax", "amax": "amin", "MIN": "MAX", "MAX": "MIN",
    "SUM": "MAX", "argmax": "argmin", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor",
    "Partial": "Replicate", "Replicate": "Partial", "zeros": "ones", "ones": "zeros",
}  # fmt: skip
# Calls that write or refuse, and functions of techniques that only advise.
MESSAGES = {"print", "print_rank_zero", "UserError", "about", "suggests"}


class Mutant(NamedTuple):
    file: str
    line: int
    start: int  # of the token, in bytes
    old: str
    new: str


def computing(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through what computes: not imports, annotations, decorators, assertions and messages."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    named = node.func if isinstance(node, ast.Call) else node
    name = getattr(named, "name", getattr(named, "id", getattr(named, "attr", "")))
    if name in MESSAGES or name == "__name__":
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from computing(child)


def other_name(name: str, random: Random) -> str:
    if name in NAMES:
        return NAMES[name]
    return random.choice([other for other in DIMENSIONS if other != name])


def mutants_of(file: str, source: bytes, random: Random) -> Iterator[Mutant]:
    """Yield each token of a file that computes, and another one."""
    line_starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    any_operator = "|".join(re.escape(symbol) for symbol in sorted(OPERATORS, key=len)[::-1])
    next_operator = re.compile(rf"(?:[\s)]|#.*)*({any_operator})".encode())
    for node in computing(ast.parse(source)):
        if not isinstance(node, ast.expr | ast.AugAssign):
            continue
        start = line_starts[node.lineno - 1] + node.col_offset
        end = line_starts[node.end_lineno - 1] + node.end_col_offset
        token = source[start:end].decode()
        swaps, operands = [], []  # where which token becomes which; what stands before operators
        match node:
            case ast.UnaryOp(op=ast.Not()):
                swaps = [(start, "not ", "")]
            case ast.UnaryOp(op=ast.USub()):
                swaps = [(start, "-", "")]
            case ast.Constant(value=bool() as value):
                swaps = [(start, token, str(not value))]
            case ast.Constant(value=int() as value):
                swaps = [(start, token, str(value + 1))]
            case ast.Constant(value=float() as value):
                swaps = [(start, token, str(2 * value or 1.0))]
            case ast.Constant(value=str(name)) if name in DIMENSIONS:
                swaps = [(start, token, f'"{other_name(name, random)}"')]
            case ast.Name(id=name) | ast.Attribute(attr=name) if (
                name in DIMENSIONS or name in NAMES
            ):
                swaps = [(end - len(name), name, other_name(name, random))]
            case ast.BinOp(left=left) | ast.AugAssign(target=left):
                operands = [left]
            case ast.Compare(left=left, comparators=others):
                operands = [left, *others[:-1]]
            case ast.BoolOp(values=values):
                operands = values[:-1]
        for operand in operands:
            after = line_starts[operand.end_lineno - 1] + operand.end_col_offset
            operator = next_operator.match(source, after)
            symbol = operator[1].decode()
            swaps.append((operator.start(1), symbol, OPERATORS[symbol]))
        for start, old, new in swaps:
            line = source.count(b"\n", 0, start) + 1
            yield Mutant(file, line, start, old, new)


def run_tests(copy: Path, *options: str, python: tuple = ()) -> tuple[int, list[str], str]:
    """Run pytest in the copy. Return its exit code, the tests that failed, and what it printed."""
    hang = "-o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true"
    command = [sys.executable, "-m", *python, "pytest", "-q", *hang.split(), *options]
    ended = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    output = ended.stdout + ended.stderr
    failed = re.findall(r"^(?:FAILED|ERROR) (tests.+?)(?: - |$)", output, re.MULTILINE)
    return ended.returncode, failed, output


def measure(copy: Path, out: Path, file: str) -> dict:
    """Return what a test file covers: lines by file; its seconds; and the tests that fail without a
    fault, which are left out later."""
    computes = ",".join(str(copy / pattern) for pattern in COMPUTES)
    settings = f"[run]\ninclude = {computes}\ndata_file = {out}/data\nparallel = true\n"
    out.mkdir(exist_ok=True)
    (out / "settings").write_text(settings + "patch = subprocess, fork, _exit\n")
    began = time.monotonic()
    coverage = "coverage", "run", f"--rcfile={out}/settings", "-m"
    _, failed, _ = run_tests(copy, file, python=coverage)
    seconds = round(time.monotonic() - began, 1)
    lines = {}
    for part in out.glob("data*"):  # of each process
        data = CoverageData(str(part))
        data.read()
        for path in data.measured_files():
            name = str(Path(path).relative_to(copy))
            lines[name] = sorted({*lines.get(name, []), *data.lines(path)})
        part.unlink()
    return {"test": file, "seconds": seconds, "failed": failed, "lines": lines}


def first_to_find(copy: Path, mutant: Mutant, measured: list[dict]) -> str:
    """Return the first test that fails with a mutant, or "" where none does."""
    lines_by_test = [{*row["lines"].get(mutant.file, [])} for row in measured]
    # The statement's first line, or the condition of what only torch.compile runs: in itself.
    executed = set().union(*lines_by_test)
    line = max((line for line in executed if line <= mutant.line), default=0)
    covering = [row for row, lines in zip(measured, lines_by_test) if line in lines]
    covering.sort(key=lambda row: row["seconds"])
    files = [row["test"] for row in covering]
    left_out = [f"--deselect={test}" for row in covering for test in row["failed"]]
    while files:
        code, failed, output = run_tests(copy, "-x", *files, *left_out)
        if failed and any(words in output for words in NOT_THERE):
            left_out.append(f"--deselect={failed[0]}")
        elif code in (0, 5):  # 5: all tests are left out
            return ""
        else:
            return failed[0] if failed else output.splitlines()[-1]
    return ""


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add_row(path: Path, row: dict) -> None:
    with path.open("a") as file:
        print(json.dumps(row), file=file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (default: 1)")
    parser.add_argument("--n", type=int, default=100, help="number of mutants (default: 100)")
    given = parser.parse_args()
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    out = ROOT / "out/mutants" / commit
    copy = out / "copy"
    if not copy.exists():
        subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)

    measured = read_rows(out / "measured.jsonl")
    known = READ_SOURCE + [Path(row["test"]).stem for row in measured]
    left = [path.name for path in sorted(copy.glob("tests/test_*.py")) if path.stem not in known]
    for i, name in enumerate(left):
        print(f"coverage of {name}: {i + 1} of {len(left)} test files", flush=True)
        measured.append(measure(copy, out / "coverage", f"tests/{name}"))
        add_row(out / "measured.jsonl", measured[-1])

    random = Random(given.seed)
    mutants = []
    for path in [path for pattern in COMPUTES for path in sorted(copy.glob(pattern))]:
        mutants += mutants_of(str(path.relative_to(copy)), path.read_bytes(), random)
    drawn = random.sample(mutants, given.n)
    results = out / f"seed-{given.seed}.jsonl"
    found_by = {Mutant(*row["mutant"]): row["found_by"] for row in read_rows(results)}
    left = [mutant for mutant in drawn if mutant not in found_by]
    began = time.monotonic()
    for i, mutant in enumerate(left):
        path = copy / mutant.file
        source = path.read_bytes()
        rest = source[mutant.start + len(mutant.old.encode()) :]
        path.write_bytes(source[: mutant.start] + mutant.new.encode() + rest)
        try:
            found_by[mutant] = first_to_find(copy, mutant, measured)
        finally:
            path.write_bytes(source)
        add_row(results, {"mutant": mutant, "found_by": found_by[mutant]})
        minutes = (time.monotonic() - began) / (i + 1) * (len(left) - i - 1) / 60
        change = f"{mutant.file}:{mutant.line} {mutant.old} -> {mutant.new or 'nothing'}"
        print(
            f"{change}: {found_by[mutant] or 'NOT FOUND'} ({minutes:.0f} minutes to come)",
            flush=True,
        )
    found = sum(found_by[mutant] != "" for mutant in drawn)
    print(f"{found} of {len(drawn)} found, drawn from {len(mutants)} of commit {commit}")


if __name__ == "__main__":
    main()
