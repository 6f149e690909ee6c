"""Read preference pairs: two answers to the same prompt, of which one is better.

A line is {"prompt", "chosen", "rejected"}. Each of them is a text or a list of messages, and the
lists of both answers may repeat the prompt. Without a prompt, "chosen" and "rejected" are whole
conversations: lists of messages, or texts in which "Human:" and "Assistant:" begin a turn, as in
Anthropic's HH.

A pair is a Sample with two conversations. text/packing.py packs both into one row, so that no rank
and no microbatch has one without the other. Targets are all answers but those in the messages with
which both begin.
"""

import itertools
import re
from collections.abc import Iterator
from functools import partial
from random import Random

from plumbing.messages import UserError
from text.conversations import Conversation, Sample, conversation_of, conversations, docstrings

EXPECTED = '{"prompt", "chosen", "rejected"}, or {"chosen", "rejected"} with whole conversations'
OF_BOTH = {"system", "weight", "train"}  # fields that hold for both conversations
SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def pair_of(record: dict, where: str) -> list[Conversation]:
    """Return two conversations from a JSON object, with the chosen and with the rejected answer.
    The messages with which both begin say `train: False`. Raise UserError unless the first message
    in which they differ is an answer of both."""
    prompt, pair = _messages(record.get("prompt", []), "user"), []
    for name in ("chosen", "rejected"):
        said = _messages(record.get(name), "assistant" if prompt else None)
        if not said or prompt is None:
            raise UserError(f"{where}: no prompt, or no {name} answer to it: give {EXPECTED}")
        whole = said if said[: len(prompt)] == prompt else [*prompt, *said]
        fields = {field: record[field] for field in OF_BOTH & record.keys()}
        pair.append(conversation_of(fields | {"messages": whole}, f"{where}: {name}"))
    equal = itertools.takewhile(lambda both: both[0] == both[1], zip(*pair))
    shared = [message | {"train": False} for message, _ in equal]
    rests = [messages[len(shared) :] for messages in pair]
    if not all(rest and rest[0]["role"] == "assistant" for rest in rests):
        raise UserError(f"{where}: chosen and rejected must first differ in an answer, and do not")
    return [shared + rest for rest in rests]


def _messages(said: object, role: str | None) -> list | None:
    """Return the messages of a field: a list of them as it is, a text as one message of this role
    or, without a role, as the turns of Human and Assistant. Return None for anything else."""
    if not isinstance(said, str):
        return said if isinstance(said, list) else None
    if role:
        return [{"role": role, "content": said}]
    before, *turns = SPEAKER.split(said)  # "", role, text, role, text, ...
    turns = zip(turns[::2], turns[1::2])
    messages = [{"role": role.lower(), "content": text.strip()} for role, text in turns]
    return messages if not before.strip() else None


def docstring_pairs() -> Iterator[Sample]:
    """Yield a pair for each conversation of the default data set. The chosen answer is the true
    docstring; the rejected one has the same words in another order, or only their first half."""
    for sample in docstrings():
        *prompt, answer = sample.messages
        words, random = answer["content"].split(), Random(answer["content"])
        worse = random.choice([words[: len(words) // 2], random.sample(words, len(words))])
        if worse and worse != words:
            rejected = [*prompt, answer | {"content": " ".join(worse)}]
            yield sample._replace(rejected=rejected)


pairs = partial(conversations, parse=pair_of, default=docstring_pairs, expected=EXPECTED)
