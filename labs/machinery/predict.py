"""Predict, then count: `python labs/run.py predict FORM`.

A student sees a configuration with numbers of its own and types a guess. The guess is recorded in
labs/work/.predictions before anything is counted; then both are shown, with the terms of the
counted value. A second guess at the same numbers is kept as a second one.

With --class KEY --student NAME the seed is a hash of these, of the form, and of how many questions
the student has answered: so every student has other numbers, which a teacher can ask for again.
"""

import argparse
import contextlib
import json
import math
import os
import re
import secrets
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from random import Random
from typing import NamedTuple

from labs.machinery.forms import Asked, Found, draw_bytes, draw_counts, draw_memory
from labs.machinery.forms_of_time import (
    draw_bubble,
    draw_crossing,
    draw_ranking,
    draw_twice,
    pairs_that_count,
)
from labs.machinery.grading import seed_of
from plumbing.processes import UserError

RECORD = Path(__file__).resolve().parent.parent / "work/.predictions"
FORMS = {
    "bytes": draw_bytes,
    "memory": draw_memory,
    "counts": draw_counts,
    "ranking": draw_ranking,
    "crossing": draw_crossing,
    "bubble": draw_bubble,
    "twice": draw_twice,
}
UNITS = {
    "bytes": {"": 1, "b": 1, "byte": 1, "bytes": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
              "kib": 2**10, "mib": 2**20, "gib": 2**30},
    "calls": {"": 1},
    "%": {"": 1, "%": 1},
    "factor": {"": 1, "x": 1, "times": 1},
    "Gbit/s": {"": 1, "gbit": 1, "gbit/s": 1, "gb/s": 1, "mbit": 1e-3, "mbit/s": 1e-3,
               "mb/s": 1e-3, "gbyte/s": 8, "mbyte/s": 8e-3},
}  # fmt: skip
EXAMPLES = {
    "bytes": "12.5 MB, 3e6 or 1,234",
    "calls": "12",
    "%": "12.5 % or 1/8",
    "factor": "1.5 or 3/2",
    "Gbit/s": "50 or 800 Mbit/s",
}
NUMBER = (  # digits, with commas between thousands; then an exponent or a divisor; and a unit
    r"((?:\d{1,18}|\d{1,3}(?:,\d{3}){1,5})(?:\.\d{0,18})?|\.\d{1,18})"
    r"(?:e([+-]?\d\d?)|/(\d{0,9}[1-9]\d{0,9}))?\s*([a-z/%]*)"
)
WIDTH = 98


def predict(args: argparse.Namespace) -> Iterator[str]:
    """Ask the question of a form, record the guess, and show what is counted. Without a form, list
    them, with the scores so far."""
    if not args.lab:
        yield from list_forms()
        return
    if args.lab not in FORMS:
        raise UserError(f"no form '{args.lab}': choose from {', '.join(FORMS)}")
    seed, whose = question_of(args)
    number = 1 + len(guesses_at(args.lab, seed=seed))
    yield f"predict {args.lab}, seed {seed}{whose}" + f", guess {number}" * (number > 1)
    question = FORMS[args.lab](Random(seed))
    yield "\n" + "\n".join(map(wrapped, question.text))
    yield f"Read: {question.read}."
    yield "Type an answer to each line. Ctrl-D ends, and nothing is recorded.\n"
    given = len(args.answer or ())
    try:
        answers = ask(question.asked, lines_of(args))
        if args.answer:
            raise UserError(f"{len(args.answer)} of --answer are left over: nothing is recorded")
    except EOFError as end:
        if args.answer is not None:
            raise UserError(f"{end}, {given} given: nothing is recorded")
        yield "\nend of input: nothing is recorded"
        args.failed = True
        return
    who = {"class": args.key, "student": args.student, "attempt": args.attempt}
    guess = write_entry(
        {"form": args.lab, "seed": seed, "guess": number, **who, "answers": answers}
    )
    yield f"\nrecorded as entry {guess}; now it is counted"
    found = question.count()
    rows = [Row(asked, parse(answers[asked.name], asked), one)
            for asked, one in zip(question.asked, found)]  # fmt: skip
    rows = [row for row in rows if row.guess.value or row.found.value]  # no 0 that is a 0
    score = sum(row.points for row in rows) / len(rows)
    counted = {asked.name: one.value for asked, one in zip(question.asked, found)}
    write_entry({"scored": guess, "score": round(score, 4), "counted": counted})
    yield from show(rows)
    flags, left_out = f"--seed {seed}", "it"
    if args.key:
        flags = f"--class {shlex.quote(args.key)} --student {shlex.quote(args.student)} "
        flags, left_out = f"{flags}--attempt {args.attempt}", "--attempt"
    yield f"\nscore {score:.0%}"
    yield f"Ask this again with {flags}; leave {left_out} out for a new question."


def question_of(args: argparse.Namespace) -> tuple[int, str]:
    """Return the seed of the question, and in words whose question it is. Sets args.attempt."""
    if args.attempt and not args.key:
        raise UserError("--attempt is for --class KEY: give it, too")
    seed = seed_of_student(args)
    if not args.key:
        return seed, ""
    if not args.attempt:
        own = guesses_at(args.lab, **{"class": args.key, "student": args.student})
        args.attempt = 1 + max((entry["attempt"] for entry in own), default=0)
    seed = seed_of_student(args, args.lab, str(args.attempt))
    return seed, f": question {args.attempt} for {args.student}, class {args.key}"


def seed_of_student(args: argparse.Namespace, *parts: str) -> int:
    """Return --seed, or a drawn one; or with --class KEY that of --student NAME, which it writes in
    small letters, for what these words name."""
    if not args.key:
        if args.student:
            raise UserError("--student is for --class KEY: give it, too")
        return secrets.randbelow(1_000_000) if args.seed is None else args.seed
    if args.seed is not None or not args.student:
        raise UserError("--class KEY needs --student NAME, and no --seed")
    args.student = " ".join(args.student.casefold().split())
    return seed_of(args.key, args.student, *parts)


# -------------------------------------------------------------------------------------- answers


class Guess(NamedTuple):
    """What a student typed: a number, or letters."""

    value: float | str
    slack: float = 0.0  # half a unit of the last digit, of a number that is not whole


def lines_of(args: argparse.Namespace) -> Callable[[str], str]:
    """Return a function that shows a prompt and returns the next line: of --answer, or of standard
    input. It raises EOFError at the end."""
    given = sys.stdin if args.answer is None else args.answer

    def next_line(prompt: str) -> str:
        if given is sys.stdin and given.isatty():
            return input(prompt)
        if given is sys.stdin:
            line = given.readline() or None
        else:
            line = given.pop(0) if given else None
        if line is None:
            raise EOFError
        print(prompt + line.strip(), flush=True)
        return line

    return next_line


def ask(questions: list[Asked], next_line: Callable[[str], str]) -> dict[str, str]:
    """Return what was typed for each quantity. What is not understood is asked again. Raises
    EOFError, with how many answers are wanted, at the end of the lines."""
    answers, wanted = {}, len(questions)
    for asked in questions:
        if asked.unless and parse(answers[asked.unless], asked).value == 0:
            answers[asked.name] = "0"
            wanted -= 1
        while asked.name not in answers:
            try:
                line = next_line(prompt(asked)).strip()
            except EOFError:
                raise EOFError(f"{wanted} answers are wanted")
            try:
                understood = in_unit(parse(line, asked).value, asked.unit)
            except ValueError as error:
                print(f"  {error}", flush=True)
                continue
            answers[asked.name] = line
            is_clear = asked.unit != "%" and re.fullmatch(r"[\d.]+", line)
            if understood != line and not is_clear:
                unit = " bytes" * (asked.unit == "bytes")
                print(f"  understood as {understood}{unit}", flush=True)
    return answers


def prompt(asked: Asked) -> str:
    within = f"within {asked.rule:.0%}" if isinstance(asked.rule, float) else ""
    if within and asked.unit == "%":
        within = f"to {asked.rule:.0%} of the number itself"
    unit = "" if asked.unit in ("calls", "order") or asked.unit in asked.name else asked.unit
    details = ", ".join(filter(None, (unit, within)))
    return f"{asked.name} ({details}): " if details else f"{asked.name}: "


def parse(text: str, asked: Asked) -> Guess:
    """Return the guess that a line says. Raises ValueError with a line that says what to type."""
    if asked.unit == "order":
        letters = re.sub(r"[\s,;<>]", "", text.lower())
        if sorted(letters) != list("abcde"):
            raise ValueError(f"'{text}': type each of the letters a to e once, such as c a d b e")
        return Guess(" ".join(letters))
    if asked.unit == "Gbit/s":
        text = text.replace("B", "byte")
    match = re.fullmatch(NUMBER, text.lower())
    if not match or match[4] not in UNITS[asked.unit]:
        kind = {"calls": "a whole number", "bytes": "a number of bytes"}.get(asked.unit, "a number")
        raise ValueError(f"'{text}' is not understood: type {kind}, such as {EXAMPLES[asked.unit]}")
    digits, power = match[1].replace(",", ""), int(match[2] or 0)
    size = UNITS[asked.unit][match[4]] * 10.0**power / int(match[3] or 1)
    if asked.unit == "%" and match[3] and not match[4]:
        size *= 100
    value = float(digits) * size
    if asked.unit == "calls" and value != int(value):
        raise ValueError(f"'{text}': type a whole number, such as {EXAMPLES['calls']}")
    decimals = len(digits.partition(".")[2])
    return Guess(value, 0.5 * size * 10.0**-decimals if size > 1 or decimals else 0.0)


# ------------------------------------------------------------------------------------- showing


class Row(NamedTuple):
    """A quantity with its guess and what was counted."""

    asked: Asked
    guess: Guess
    found: Found

    @property
    def points(self) -> float:
        """From 0 to 1, by the rule of the quantity."""
        guess, counted, rule = self.guess.value, self.found.value, self.asked.rule
        if rule == "pairs":
            pairs, wrong = self.pairs
            return 1 - len(wrong) / len(pairs)
        if rule == "exact":  # as exact as it was typed, but to half a percent
            return float(abs(guess - counted) <= min(self.guess.slack, 0.005 * counted))
        if rule == "logarithm":  # in full up to a factor of 1.25, and none from a factor of 4 on
            off = abs(math.log(guess / counted)) if guess else math.inf
            return min(1.0, max(0.0, (math.log(4) - off) / math.log(4 / 1.25)))
        return float(abs(guess - counted) <= rule * counted)

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """The pairs of letters that count, the faster first; and those in the wrong order."""
        place, pairs = self.guess.value.index, pairs_that_count(self.found.seconds)
        return pairs, [pair for pair in pairs if place(pair[0]) > place(pair[1])]

    @property
    def ratio(self) -> str:
        """Predicted to counted, or of an order the pairs that are right."""
        guess, counted = self.guess.value, self.found.value
        if self.asked.rule == "pairs":
            pairs, wrong = self.pairs
            return f"{len(pairs) - len(wrong)} of {len(pairs)} pairs"
        return f"{guess / counted:.4g}" if counted else "-"

    @property
    def left_out(self) -> str:
        """The terms, one or two, without which the others give the guess; "" if there are none."""
        terms = self.found.terms
        total = sum(term.value for term in terms)

        def explains(*chosen: int) -> bool:
            without = total - sum(terms[i].value for i in chosen)
            slack = min(self.guess.slack, 0.005 * without) + 1e-6 * total
            return len(chosen) < len(terms) and abs(without - self.guess.value) <= slack

        if lines := [f"line {i + 1}" for i in range(len(terms)) if explains(i)]:
            return " or ".join(lines)
        pairs = combinations(range(len(terms)), 2)
        return next((f"lines {i + 1} and {j + 1}" for i, j in pairs if explains(i, j)), "")


def show(rows: list[Row]) -> Iterator[str]:
    """Yield the table of guesses, and what each counted value is made of."""
    cells = [("", "predicted", "counted", "ratio", "")]
    for row in rows:
        shown = (in_unit(value, row.asked.unit) for value in (row.guess.value, row.found.value))
        mark = {1.0: "right", 0.0: "wrong"}.get(row.points, f"{row.points:.0%}")
        cells.append((row.asked.name, *shown, row.ratio, mark))
    widths = [max(map(len, column)) for column in zip(*cells)]
    yield ""
    for name, *others, mark in cells:
        numbers = "  ".join(text.rjust(width) for text, width in zip(others, widths[1:]))
        yield f"{name:<{widths[0]}}  {numbers}  {mark}".rstrip()
    for row in rows:
        asked, found = row.asked, row.found
        if found.terms or found.notes:
            yield f"\n{asked.name}: {in_unit(found.value, asked.unit)}"
        if found.head:
            yield f"  ({found.head})"
        values = [in_unit(term.value, asked.unit) for term in found.terms]
        for value, term in zip(values, found.terms):
            calls = f"{term.calls} call{'s' * (term.calls > 1)}: " if term.calls else ""
            head = f"  {value:>{max(map(len, values))}}  "
            yield textwrap.fill(calls + term.text, WIDTH, initial_indent=head,
                                subsequent_indent=" " * len(head))  # fmt: skip
        yield from (f"  {note}" for note in found.notes)
        if asked.rule == "pairs" and row.points < 1:
            right = ", ".join(f"{a} before {b}" for a, b in row.pairs[1])
            yield wrapped(f"  You had these pairs the wrong way round: it is {right}")
        elif row.points < 1 and row.left_out:
            yield f"  Yours could be the sum without {row.left_out}."


def in_unit(value: float | str, unit: str) -> str:
    """Return a value as it is shown."""
    if unit == "order":
        return value
    if unit in ("bytes", "calls"):
        return f"{value:,.0f}"
    return f"{value:.3f}" if unit == "factor" else f"{value:.3g} {unit}"


def wrapped(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 4 * line.startswith(" "))
    return textwrap.fill(line, WIDTH, subsequent_indent=indent)


def list_forms() -> Iterator[str]:
    """Yield each form with what it asks and the scores so far."""
    found, width = entries(), max(len(draw.__doc__) for draw in FORMS.values())
    scores = {entry["scored"]: entry["score"] for entry in found.values() if "scored" in entry}
    for form, draw in FORMS.items():
        asks = draw.__doc__.rstrip(".")
        done = [n for n, entry in found.items() if entry.get("form") == form and n in scores]
        first = [scores[n] for n in done if found[n]["guess"] == 1]
        later = [scores[n] for n in done if found[n]["guess"] > 1]
        parts = [f"{len(own)} {name}, {sum(own) / len(own):.0%}"
                 for name, own in (("first", first), ("later", later)) if own]  # fmt: skip
        yield f"{form:<9} {asks:<{width}} {'; '.join(parts)}".rstrip()
    scored = "the average score of first and of later guesses; " if scores else ""
    yield f"\n{scored}try: python labs/run.py predict bytes"


# ------------------------------------------------------------------------------------ the record


def record_lines() -> list[str]:
    return RECORD.read_text(errors="replace").splitlines() if RECORD.exists() else []


def entries() -> dict[int, dict]:
    """Return the entries of the record, by number of the line. What is none is passed over."""
    found = {}
    for number, line in enumerate(record_lines(), 1):
        with contextlib.suppress(ValueError, TypeError):
            found[number] = dict(json.loads(line))
    return found


def write_entry(content: dict) -> int:
    """Add an entry to the record, on the disk, and return its number."""
    number = 1 + len(record_lines())
    RECORD.parent.mkdir(exist_ok=True)
    with open(RECORD, "a") as file:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        print(json.dumps({"time": now, **content}), file=file, flush=True)
        os.fsync(file.fileno())
    return number


def guesses_at(form: str, **seed_or_whose) -> list[dict]:
    """Return the guesses at a form's questions, of a seed or of a student."""
    wanted = {"form": form, **seed_or_whose}
    return [entry for entry in entries().values() if wanted.items() <= entry.items()]
