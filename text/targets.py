"""Turn a conversation into token ids, and tell which of them are targets.

The tokenizer's chat template writes a conversation out as text (text/templates.py). The targets are
the assistant's answers, each with the end token that follows, so that the model learns to stop. All
other messages are only input.
"""

import json
from dataclasses import dataclass, replace

from plumbing.messages import UserError
from text.templates import OPTIONAL_FIELDS, Conversation, render
from text.vocabulary import Tokenizer

ANSWER_ROOM = 64  # tokens of seq_len that a validation prompt leaves free for the answer
SHOWN = 3  # of the answers to validation prompts, those whose text is shown


@dataclass(frozen=True)
class Chat:
    """A conversation and its tools, which the tokenizer's chat template writes out.

    Messages are ordinary text, even where somebody types the name of a special token. `guarded`
    puts a guard, a text that occurs nowhere else, inside such names; `to_ids` takes it out."""

    messages: Conversation
    tools: list | None
    tokenizer: Tokenizer
    guard: str

    def write(self, asks: bool = False) -> str:
        """Return what the template writes. If it `asks` for an answer, the heading comes last."""
        given = dict(messages=self.messages, tools=self.tools, add_generation_prompt=asks)
        return render(self.tokenizer.template, **given, **self.tokenizer.names)

    def with_marks(self) -> "Chat":
        """Return the conversation with a mark, its number between guards, for each content."""
        messages = []
        for i, message in enumerate(self.messages):
            if message.get("content"):
                message = message | {"content": f"{self.guard}{i}{self.guard}"}
            messages.append(message)
        return replace(self, messages=messages)

    def write_whole(self, asks: bool = False) -> str:
        """Return what `write` does. Raise UserError if that leaves out a part of a content. If it
        `asks`, earlier answers may lack some: models that think do not see earlier thoughts."""
        marked = self.with_marks()
        text = self.write(asks)
        marked_text = marked.write(asks)
        for i, (message, its_mark) in enumerate(zip(self.messages, marked.messages), 1):
            if asks and message["role"] == "assistant":
                continue
            content = message.get("content", "").strip()
            as_json = json.dumps(content, ensure_ascii=False)[1:-1]  # which some templates write
            is_whole = content in text or as_json in text
            if content and not (is_whole and its_mark["content"] in marked_text):
                raise UserError(
                    f"the chat template leaves out message {i}, of the {message['role']}, or a "
                    f"part of it: leave the message out, too, or divide the conversation there"
                )
        return text

    def write_before(self, i: int) -> str:
        """Return what the template writes before message i, an answer, with its heading."""
        if i > 0:
            return replace(self, messages=self.messages[:i]).write(asks=True)
        if not self.messages[0].get("content"):
            raise UserError("the conversation begins with a call: let a message come before it")
        marked = self.with_marks()
        return marked.write().partition(marked.messages[0]["content"])[0]

    def can_do_without(self, name: str, text: str) -> bool:
        """Return whether the template writes the same text without a field that it was given."""
        messages = [{key: m[key] for key in m if key != name} for m in self.messages]
        tools = None if name == "tools" else self.tools
        less = replace(self, messages=messages, tools=tools)
        try:
            return less != self and less.write() == text
        except UserError:  # the template needs the field
            return False

    def to_ids(self, text: str) -> list[int]:
        """Return the ids of a text that `write` returned. Names of special tokens without a guard
        stand for these tokens. The text between two of them is encoded in one piece, since a token
        may reach from a heading into a content."""
        ids = []
        for i, part in enumerate(self.tokenizer.special_pattern.split(text)):
            if i % 2 == 1:  # texts and names take turns
                ids.append(self.tokenizer.special[part.strip()])
            else:
                ids += self.tokenizer.encode(part.replace(self.guard, ""))
        return ids


def guarded(messages: Conversation, tools: list | None, tokenizer: Tokenizer) -> Chat:
    """Return a Chat with a guard inside each name of a special token. It has no `train`, which says
    nothing to a template, and no null, which a template might write as text."""
    said = []
    for message in messages:
        said.append({k: v for k, v in message.items() if v is not None and k != "train"})
    text = json.dumps([said, tools or None], ensure_ascii=False)
    private = "\ue000"  # a character that Unicode leaves to private use
    guard = private
    while guard in text:
        guard += private
    for name in tokenizer.special:
        text = text.replace(name, name[0] + guard + name[1:])
    return Chat(*json.loads(text), tokenizer, guard)


def encode(
    messages: Conversation,
    tokenizer: Tokenizer,
    train_on_prompt: bool = False,
    tools: list | None = None,
) -> tuple[list[int], list[bool]]:
    """Return the ids of a conversation up to its last target, and which ids are targets: those that
    the model is trained to predict.

    Targets are all answers but those that say `train: False`. An answer is what the template writes
    after the answer's heading, up to a token that ends generation. With `train_on_prompt`, the rest
    is a target, too, but for the first id. Raise UserError where the template leaves out a part of
    the conversation, or does not tell an answer from the rest."""
    chat = guarded(messages, tools, tokenizer)
    text = chat.write_whole()
    for name in (*OPTIONAL_FIELDS, "tools"):
        if chat.can_do_without(name, text):
            raise UserError(f"the chat template writes nothing of {name}: leave this field out")
    ids = chat.to_ids(text)
    is_target = [train_on_prompt] * len(ids)
    end = 0  # of the previous answer
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = chat.write_before(i)
        if not text.startswith(before):
            raise UserError(
                f"the chat template asks for message {i + 1} by {before[-30:]!r}, and writes the "
                f"message after something else"
            )
        # A token that reaches from the heading into the answer is a target.
        start = n_shared(chat.to_ids(before), ids)
        ends = [j for j in range(start, len(ids)) if ids[j] in tokenizer.stop]
        if start < end or not ends:
            raise UserError(
                "the chat template ends an answer with no token that ends generation: name one as "
                "eos_token in tokenizer_config.json"
            )
        end = ends[0] + 1
        is_target[start:end] = [message.get("train", True)] * (end - start)
    is_target[0] = False
    targets = [j for j, on in enumerate(is_target) if on]
    length = targets[-1] + 1 if targets else len(ids)
    return ids[:length], is_target[:length]


def n_shared(a: list, b: list) -> int:
    """Return how many elements two lists share at their beginning."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def encode_prompt(
    messages: Conversation, tokenizer: Tokenizer, tools: list | None = None
) -> list[int]:
    """Return the ids of a conversation up to where the model is to answer. An answer at its end is
    left out. `encode` of the whole conversation begins with the same ids, unless a token reaches
    from the heading into the answer."""
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    chat = guarded(messages, tools, tokenizer)
    return chat.to_ids(chat.write_whole(asks=True))
