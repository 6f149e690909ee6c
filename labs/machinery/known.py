"""What wrong answers give: `python labs/run.py known LAB` writes it to labs/LAB/known.json.

The file has the sentence of each wrong answer in wrong.txt whose numbers are wrong, and for each
number of ranks the first line of the report that does not hold, and the fingerprint of what ranks
have there. A check looks up in it what a student's function gives. So each mistake is written once,
as a patch of the solution, and a copy without solutions knows it, too.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from labs.machinery.answers import LABS, answer_of, patched, wrong_answers
from labs.machinery.checking import (
    KNOWN_SEED,
    check_module,
    different_groups,
    properties_of,
    run_student,
    with_facts,
)
from labs.machinery.compare import fingerprint
from plumbing.messages import UserError


def write_known(lab: str) -> Iterator[str]:
    """Run all wrong answers of a lab on all numbers of ranks, and write what they give."""
    known = defaultdict(list)  # sentence -> (ranks, line of the report, fingerprint)
    for size in check_module(lab).SIZES:
        found = list(known_mistakes(lab, size))
        for sentence, line, numbers in found:
            known[sentence].append([size, line, *numbers])
        yield f"{lab}, {size} ranks: {len(found)} wrong answers are known by their numbers"
    rows = (f"{json.dumps(sentence)}: {json.dumps(of_it)}" for sentence, of_it in known.items())
    (LABS / lab / "known.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")


def known_mistakes(lab: str, size: int) -> Iterator[tuple[str, str, list[float]]]:
    """Yield (sentence, line of the report, fingerprint) of each wrong answer whose numbers are
    wrong."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory).resolve() / f"{lab}.py"
        for wrong in wrong_answers(lab):
            if wrong.tells == "hangs":
                continue
            path.write_text(patched(answer_of(lab), wrong.patch))
            ended = run_student(lab, size, KNOWN_SEED, path)
            if different_groups(ended.calls):  # which has a sentence of its own
                continue
            if ended.hangs:
                raise UserError(f"{lab}: '{wrong.name}' hangs. Mark it with [hangs], or try again.")
            if ended.error:  # its sentence is that of the error
                continue
            last = properties_of(lab, size, KNOWN_SEED, ended)[-1]
            numbers = fingerprint(last.found)
            if not numbers:
                continue
            sentence = wrong.says
            if with_facts(lab, size, sentence) in last.mistake:  # the check says it, and more
                sentence = last.mistake
            yield sentence, last.name, numbers
