"""Write the data of the example in docs/preferences.md, and reward its answers.

python docs/sums.py sums            writes sums/text.jsonl and sums/prompts.jsonl
"""

import json
import random
import sys
from pathlib import Path


def reward(prompt: str, answer: str) -> float:
    """Return 1 for the right sum, and 0 for anything else."""
    a, b = prompt.rstrip("=").split("+")
    return float(answer == str(int(a) + int(b)))


if __name__ == "__main__":
    out, rng = Path(sys.argv[1]), random.Random(0)
    out.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(10) for b in range(10)]
    prompts = [json.dumps({"prompt": f"{a}+{b}="}) for a, b in pairs]
    lines = []
    for a, b in rng.choices(pairs, k=40_000):  # 43 % are right, some of them by chance
        answer = a + b if rng.random() < 0.4 else rng.randrange(19)
        lines.append(json.dumps({"text": f"{a}+{b}={answer}"}))
    (out / "text.jsonl").write_text("\n".join(lines))
    (out / "prompts.jsonl").write_text("\n".join(prompts))
