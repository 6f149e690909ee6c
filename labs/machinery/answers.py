"""The solution of each lab, its starter, and wrong answers.

In labs/LAB/answer.py the solution lies between marks. wrong.txt has, of each wrong answer, with an
empty line between two:

    its name and source, and [right numbers] if only bytes, memory or order tell, or [hangs]
    > the sentence that it earns
    - lines of the solution, the first and the last of them perhaps in part, `...` for any between
    + what stands in their place; without such lines they are left out
"""

import re
from pathlib import Path
from typing import NamedTuple

from plumbing.messages import UserError

LABS = Path(__file__).resolve().parent.parent


class Wrong(NamedTuple):
    """A wrong answer."""

    name: str
    tells: str  # "right numbers", "hangs" or ""
    says: str
    patch: str  # of the solution


def answer_of(lab: str, file: str = "answer.py") -> str:
    """Return the solution, or another file. Raises UserError where they were left out."""
    path = LABS / lab / file
    if not path.exists():
        raise UserError("this copy of the labs has no solutions: ask your teacher")
    return path.read_text()


def starter_of(lab: str) -> str:
    """Return a lab's solution without the part that is to be written."""
    kept = LABS / lab / "starter.py"  # in a copy without solutions
    if kept.exists():
        return kept.read_text()
    before, gap, _ = re.split(r"^ +# >>>\n|^ +# <<<\n", answer_of(lab), flags=re.MULTILINE)
    return f'{before}    raise NotImplementedError("about {len(gap.splitlines())} lines")\n'


def wrong_answers(lab: str) -> list[Wrong]:
    pattern = r"(.+?)(?: \[(.+)\])?\n> (.+)\n((?:[-+].*\n)+)"
    return [Wrong(*parts) for parts in re.findall(pattern, answer_of(lab, "wrong.txt"))]


def patched(solution: str, patch: str) -> str:
    """Return a solution after a patch. Raises ValueError if lines are not there, or twice."""
    for old, new in re.findall(r"((?:-.*\n)+)((?:\+.*\n)*)", patch):
        old, new = (re.sub(r"^[-+] ?", "", lines, flags=re.MULTILINE) for lines in (old, new))
        if new:
            old, new = old[:-1], new[:-1]
        parts = re.split(r"^\.\.\.\n", old, flags=re.MULTILINE)
        found = re.findall(".*?".join(map(re.escape, parts)), solution, re.DOTALL)
        if len(found) != 1:
            raise ValueError(f"{len(found)} times in the solution: {old}")
        solution = solution.replace(found[0], new)
    return solution
