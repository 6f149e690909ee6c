"""Three rewards to copy: a right number, a format, a length.

    torchrun rewards.py --init ~/Llama-3.2-1B-Instruct --chat --data gsm8k.jsonl \
             --reward docs/three_rewards.py

Of each line of the data a reward needs "truth", the right answer, which may end as those of GSM8K
do: "... #### 72". A reward of several parts is their sum; metrics.jsonl has the mean of each.
"""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
FORMAT = re.compile(r"\s*<think>(?:(?!</?think>).)+</think>(?=\s*\S)(?:(?!</?think>).)*", re.DOTALL)


def final_number(text: str) -> float | None:
    """Return the last number after the last ####, or of the whole text if that has no ####. Return
    None if there is no number."""
    _, _, marked = text.rpartition("####")
    numbers = NUMBER.findall(marked)
    return float(numbers[-1].replace(",", "")) if numbers else None


def right_number(answer: str, truth: str) -> float:
    """Return 1 if an answer ends with the number of the true one, else 0."""
    number = final_number(answer)
    return float(number is not None and number == final_number(truth))


def has_format(answer: str) -> float:
    """Return 1 for a thought between <think> and </think>, once, and an answer after it, else 0."""
    return float(FORMAT.fullmatch(answer) is not None)


def brevity(answer: str, enough: int = 400, too_much: int = 1200) -> float:
    """Return 1 up to `enough` characters, 0 from `too_much` on, and between them a line."""
    left = (too_much - len(answer)) / (too_much - enough)
    return min(1.0, max(0.0, left))


def reward(prompt: str, answer: str, truth: str, **fields) -> dict[str, float]:
    """Return the parts of a reward. A short answer that is wrong gains nothing by being short."""
    number = right_number(answer, truth)
    return {
        "number": number,
        "format": 0.2 * has_format(answer),
        "length": 0.1 * number * brevity(answer),
    }
