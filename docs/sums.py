"""Write the text and the prompts of the example in docs/preferences.md, and reward its answers.

python docs/sums.py out/sums            writes out/sums/text.jsonl and out/sums/prompts.jsonl
"""

import json
import random
import sys
from pathlib import Path

RIGHT = 0.4  # the share of sums in the text that are right


def reward(prompt: str, answer: str) -> float:
    """Return 1 for the right sum, and 0 for anything else."""
    a, b = prompt.rstrip("=").split("+")
    return float(answer == str(int(a) + int(b)))


def main() -> None:
    out, rng = Path(sys.argv[1]), random.Random(0)
    out.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(10) for b in range(10)]
    lines = []
    for a, b in rng.choices(pairs, k=40_000):
        answer = a + b if rng.random() < RIGHT else rng.randrange(19)
        lines.append(json.dumps({"text": f"{a}+{b}={answer}"}))
    (out / "text.jsonl").write_text("\n".join(lines))
    prompts = (json.dumps({"prompt": f"{a}+{b}="}) for a, b in pairs)
    (out / "prompts.jsonl").write_text("\n".join(prompts))


if __name__ == "__main__":
    main()
