"""Read preference pairs: two answers to the same prompt, of which one is better.

A line is {"prompt", "chosen", "rejected"}. Each of them is a text, a message or a list of messages,
and the answers may repeat the prompt. Without a prompt, "chosen" and "rejected" are whole
conversations. A text in which "Human:" and "Assistant:" begin a turn, as in Anthropic's HH, is a
list of messages, too.

What both conversations share at their beginning is the prompt. A pair is a Sample with two
conversations. text/packing.py packs both into one row, so that no rank and no microbatch has one
without the other. Targets are all answers but those in the prompt.
"""

import itertools
import re
from collections.abc import Iterator
from functools import partial
from random import Random

from plumbing.messages import UserError
from text.conversations import (
    BESIDE,
    MESSAGE_FIELDS,
    Form,
    Sample,
    beginning,
    conversations,
    docstrings,
    question_of,
    read_messages,
    up_to_last_answer,
    with_beginning,
)
from text.targets import n_shared
from text.templates import Conversation

EXPECTED = '{"prompt", "chosen", "rejected"}, or {"chosen", "rejected"} with whole conversations'
# The prompt's names: most files', Alpaca's, Orca's, and LLaMA-Factory's for a list of messages.
PROMPTS = ("prompt", "instruction", "question", "conversations")
SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def pair_of(record: dict, where: str) -> list[Conversation]:
    """Return two conversations from a JSON object, with the chosen and with the rejected answer.
    The messages with which both begin say `train: False`. Raise UserError unless the first message
    in which they differ is an answer of both."""
    prompt = prompt_of(record, where)
    has_question = any(message["role"] != "system" for message in prompt)
    in_turns = any(is_dialogue(record.get(name)) for name in PROMPTS)
    pair = []
    for name in ("chosen", "rejected"):
        said = record.get(name)
        if in_turns and isinstance(said, str) and not is_dialogue(said):
            said = f"Assistant:{said}"
        turns = turns_of(said, "assistant" if has_question else None)
        if not turns:
            raise UserError(f"{where}: no prompt, or no {name} answer to it: give {EXPECTED}")
        messages = read_messages(turns, f"{where}: {name}", prompt)
        messages = joined(prompt, messages, f"{where}: {name}")
        pair.append(up_to_last_answer(messages, record, f"{where}: {name}"))
    chosen, rejected = pair
    n = n_shared(meanings(chosen), meanings(rejected))
    shared = [message | {"train": False} for message in chosen[:n]]
    rests = [chosen[n:], rejected[n:]]
    if not all(rest and rest[0]["role"] == "assistant" for rest in rests):
        raise UserError(f"{where}: chosen and rejected must first differ in an answer, and do not")
    check_prompt_is_said_once(shared, rests, where)
    return [shared + rest for rest in rests]


def prompt_of(record: dict, where: str) -> Conversation:
    """Return the messages before both answers, as far as a line has them in fields of their own."""
    before = beginning(record, where)
    names = [name for name in PROMPTS if record.get(name)]
    if len(names) > 1:
        raise UserError(f"{where}: both {' and '.join(names)}: leave one of them out")
    name = names[0] if names else "prompt"
    said = record.get(name)
    if not isinstance(said, list):
        said = question_of(record, name, where)
    turns = turns_of(said, "user") if said else []
    if turns and turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()  # "Assistant:" at the end of a text asks for the answer
    elif isinstance(said, str) and said.rstrip().endswith("\n\nAssistant:"):
        raise UserError(f'{where}: "{name}" has text before "Human:": give it as "system"')
    return with_beginning(before, read_messages(turns, f"{where}: {name}", before), where)


def fields_of_pair(record: dict) -> set[str]:
    """Return the fields of a line that are read."""
    fields = BESIDE | {"chosen", "rejected", *PROMPTS}
    if not any(isinstance(record.get(name), list) for name in PROMPTS):
        fields.add("input")
    return fields


def is_dialogue(said: object) -> bool:
    return isinstance(said, str) and SPEAKER.match(said.strip()) is not None


def turns_of(said: object, role: str | None) -> list:
    """Return the messages of a field: of a text the turns of Human and Assistant, or one of this
    role, if any. Return none for anything else."""
    if isinstance(said, list):
        return said
    if isinstance(said, dict):
        return [said]
    if not isinstance(said, str):
        return []
    if not is_dialogue(said):
        return [{"role": role, "content": said}] if role else []
    _, *turns = SPEAKER.split(said.strip())  # "", role, text, role, text, ...
    pairs = zip(turns[::2], turns[1::2])
    return [{"role": role.lower(), "content": text.strip()} for role, text in pairs]


def meanings(messages: Conversation) -> Conversation:
    """Return what templates read of messages, without the spaces around contents."""
    found = []
    for message in messages:
        names = message.keys() & MESSAGE_FIELDS - {"train"}
        meaning = {name: message[name] for name in names}
        meaning["content"] = message.get("content", "").strip()
        found.append(meaning)
    return found


def joined(prompt: Conversation, said: Conversation, where: str) -> Conversation:
    """Return the prompt with what is said after it: an answer, or a conversation, which may repeat
    the prompt or its last messages."""
    if not prompt:
        return said
    if said[0]["role"] == "assistant":
        if prompt[-1]["role"] == "assistant":
            raise UserError(f"{where}: the prompt ends with an answer: leave it out")
        return prompt + said
    prompt_meanings = meanings(prompt)
    said_meanings = meanings(said)
    for start in range(len(said) - len(prompt) + 1):
        if said_meanings[start : start + len(prompt)] == prompt_meanings:
            return said
    for n in range(len(prompt), 0, -1):
        if prompt_meanings[-n:] == said_meanings[:n]:
            return prompt + said[n:]
    if prompt[-1]["role"] == "user" or said[0]["role"] == "system":
        raise UserError(
            f"{where} begins with another message than the prompt: leave one of them out"
        )
    return prompt + said


def check_prompt_is_said_once(shared: Conversation, rests: list[Conversation], where: str) -> None:
    """Raise UserError where a user says the same twice in a row, or answers repeat a question."""
    for rest in rests:
        for one, next_one in itertools.pairwise(meanings(shared + rest)):
            if one == next_one and one["role"] == "user":
                raise UserError(f"{where}: the user says the same twice: {one['content']!r:.60}")
    questions = [message["content"] for message in meanings(shared) if message["role"] == "user"]
    if not questions or len(questions[-1].split()) < 2:  # a greeting may be answered by itself
        return
    answers = [meanings(rest)[0]["content"] for rest in rests]
    begin = any(answer.startswith(questions[-1]) for answer in answers)
    hold = all(questions[-1] in answer for answer in answers)
    if begin or hold:
        raise UserError(f"{where}: an answer repeats its question: {questions[-1]!r:.60}")


def docstring_pairs() -> Iterator[Sample]:
    """Yield a pair for each conversation of the default data set. The chosen answer is the true
    docstring; the rejected one has the same words in another order, or only their first half."""
    for sample in docstrings():
        *prompt, answer = sample.messages
        words = answer["content"].split()
        random = Random(answer["content"])
        half = words[: len(words) // 2]
        worse = random.choice([half, random.sample(words, len(words))])
        if worse and worse != words:
            rejected = [*prompt, answer | {"content": " ".join(worse)}]
            yield sample._replace(rejected=rejected)


PAIRS = Form(pair_of, fields_of_pair, EXPECTED, docstring_pairs)
pairs = partial(conversations, form=PAIRS)
