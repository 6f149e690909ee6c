"""Write word problems in the manner of GSM8K, of which a base model solves some.

python docs/problems.py problems    writes problems/text.jsonl and problems/prompts.jsonl

A text is a problem with a solution that ends as "... #### 72". Three of ten end with a wrong
number, so that rewards (docs/three_rewards.py) have something to teach.
"""

import json
import random
import sys
from pathlib import Path

NAMES = "Ada Ben Cleo Dan Eva Finn Gina Hugo".split()
THINGS = "apples books cards eggs flowers pens shells stamps".split()
# A problem, its steps, and the number that is asked for, of a, b and c.
KINDS = [
    ("{name} has {a} {things} and finds {b} more. Then {c} are lost. How many are left?",
     "{a} + {b} = {ab}. {ab} - {c} = {answer}.", lambda a, b, c: a + b - c),
    ("{name} buys {a} boxes of {b} {things}, and gives {c} away. How many are left?",
     "{a} x {b} = {ab}. {ab} - {c} = {answer}.", lambda a, b, c: a * b - c),
    ("{name} has {a} {things}. Each of {b} friends brings {c} more. How many are there?",
     "{b} x {c} = {bc}. {a} + {bc} = {answer}.", lambda a, b, c: a + b * c),
]  # fmt: skip


def problem(rng: random.Random) -> tuple[str, str, int]:
    """Return a problem, the beginning of its solution, and the number that it asks for."""
    question, steps, solve = rng.choice(KINDS)
    a, b, c = rng.randint(5, 20), rng.randint(2, 9), rng.randint(1, 6)
    answer = solve(a, b, c)
    results = {"ab": a + b if "finds" in question else a * b, "bc": b * c}
    given = dict(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b, c=c, answer=answer)
    return question.format(**given), steps.format(**given | results), answer


def write(out: Path, texts: int = 60_000, prompts: int = 2_000) -> None:
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    lines = []
    for _ in range(texts):
        question, steps, answer = problem(rng)
        said = answer if rng.random() < 0.7 else answer + rng.choice([-2, -1, 1, 2])
        lines.append(json.dumps({"text": f"{question}\n{steps} #### {said}"}))
    (out / "text.jsonl").write_text("\n".join(lines))
    lines = []
    for _ in range(prompts):
        question, steps, answer = problem(rng)
        lines.append(json.dumps({"prompt": f"{question}\n", "truth": f"{steps} #### {answer}"}))
    (out / "prompts.jsonl").write_text("\n".join(lines))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
