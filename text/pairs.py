"""Read preference pairs: two answers to the same prompt, of which one is better.

A line is {"prompt", "chosen", "rejected"}. Each of them is a text or a list of messages, and the
lists of both answers may repeat the prompt. Without a prompt, "chosen" and "rejected" are whole
conversations: lists of messages, or texts in which "Human:" and "Assistant:" begin a turn, as in
Anthropic's HH.

A pair is a Sample with two conversations. text/chat.py packs both into one row, so that no rank and
no microbatch has one without the other. Targets are the messages that the two do not share.
"""

import itertools
import re
from collections.abc import Iterator
from functools import partial
from operator import eq
from random import Random

from plumbing.processes import UserError
from text.conversations import Conversation, Sample, conversation_of, conversations, docstrings

EXPECTED = '{"prompt", "chosen", "rejected"}, or {"chosen", "rejected"} with whole conversations'
OF_BOTH = {"system", "weight", "train"}  # fields that hold for both conversations
SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def pair_of(record: dict, where: str) -> list[Conversation]:
    """Return the conversations with the chosen and with the rejected answer of a JSON object, with
    `train: False` in what they share. Raise UserError where they differ before an answer."""
    prompt, pair = _messages(record.get("prompt", []), "user"), []
    for name in ("chosen", "rejected"):
        said = _messages(record.get(name), "assistant" if prompt else None)
        if not said or prompt is None:
            raise UserError(f"{where}: no prompt, or no {name} answer to it: give {EXPECTED}")
        whole = said if said[: len(prompt)] == prompt else [*prompt, *said]
        fields = {field: record[field] for field in OF_BOTH & record.keys()}
        pair.append(conversation_of(fields | {"messages": whole}, f"{where}: {name}"))
    shared = len([*itertools.takewhile(bool, map(eq, *pair))])
    rest = [messages[shared:] for messages in pair]
    if not all(messages and messages[0]["role"] == "assistant" for messages in rest):
        raise UserError(f"{where}: chosen and rejected must first differ in an answer, and do not")
    same = [message | {"train": False} for message in pair[0][:shared]]
    return [[*same, *messages] for messages in rest]


def _messages(said: object, role: str | None) -> list | None:
    """Return a list of messages as it is, and a text as one of this role; without a role, as the
    messages of speakers that the text names. None for anything else."""
    if isinstance(said, str) and role:
        return [{"role": role, "content": said}]
    if isinstance(said, str):
        before, *turns = SPEAKER.split(said)
        roles = ({"Human": "user", "Assistant": "assistant"}[name] for name in turns[::2])
        said = [{"role": r, "content": text.strip()} for r, text in zip(roles, turns[1::2])]
        return said if not before.strip() else None
    return said if isinstance(said, list) else None


def docstring_pairs() -> Iterator[Sample]:
    """Yield a pair for each conversation of the default data set: the true docstring, and a worse
    one, which has the same words in another order or ends in the middle."""
    for sample in docstrings():
        *prompt, answer = sample.messages
        words, random = answer["content"].split(), Random(answer["content"])
        worse = random.choice([words[: len(words) // 2], random.sample(words, len(words))])
        if worse and worse != words:
            prompt = [message | {"train": False} for message in prompt]
            rejected = [*prompt, answer | {"content": " ".join(worse)}]
            yield sample._replace(rejected=rejected)


pairs = partial(conversations, parse=pair_of, default=docstring_pairs, expected=EXPECTED)
