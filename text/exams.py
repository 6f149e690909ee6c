"""Turn exams into tokens: questions of which a model chooses the answer, or writes it.

    {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}     the number of a choice, from 0
    {"question": "2 + 2 =", "answer": "4"}                          the line that it has to write

Examples may precede the question in its text. A choice follows after a space.
"""

from pathlib import Path

from plumbing.json_files import check_string
from plumbing.messages import UserError
from text.corpora import find_files, read_records
from text.fields import note_unread, refuse_other_meanings, unread
from text.packing import Rows
from text.targets import encode_prompt
from text.tokenizer import Tokenizer

QUESTIONS = '{"question": "...", "choices": ["...", ...], "answer": 0} or {"question", "answer"}'
FIELDS = {"question", "choices", "answer"}
ROOM = 32  # tokens that an answer may take


class Exam:
    """The questions of a JSONL file, as tokens.

    choices: a row for each choice of each question: the question, and the choice as the target.
    prompts: the questions whose answer has to be written, in at most `room` tokens. With `chat`, a
    question is a user's message, and the choice or answer the assistant's."""

    def __init__(
        self, path: Path, tokenizer: Tokenizer, longest: int, room: int = ROOM, chat: bool = False
    ):
        """Raise UserError where a line is no question, or takes more than `longest` tokens."""
        self.tokenizer = tokenizer
        self.room = room
        self.questions: list[dict] = []
        self.prompts: list[list[int]] = []
        samples = []
        for file in find_files([path], (".jsonl",), f"give one with lines like {QUESTIONS}"):
            not_read = set()
            for _, where, question in read_records(file, QUESTIONS):
                choices = checked_choices(question, where)
                not_read |= unread(question, FIELDS)
                self.questions.append(question)
                prompt, rows = self._encode(question["question"], choices, chat)
                for ids in rows:
                    samples.append((ids, [i >= len(prompt) for i in range(len(ids))]))
                if not rows:
                    self.prompts.append(prompt)
                taken = max(map(len, rows)) if rows else len(prompt) + room
                if taken > longest:
                    raise UserError(
                        f"{where}: with its answer the question takes {taken} tokens, and the "
                        f"model reads {longest}: leave it out"
                    )
            note_unread(file, not_read)
        if not self.questions:
            raise UserError(f"{path} holds no question: give lines like {QUESTIONS}")
        self.choices = Rows(samples, tokenizer)

    def _encode(
        self, text: str, choices: list[str], chat: bool
    ) -> tuple[list[int], list[list[int]]]:
        """Return the ids of a question, and those of the question with each choice."""
        if chat:
            prompt = encode_prompt([{"role": "user", "content": text}], self.tokenizer)
            return prompt, [prompt + self.tokenizer.encode(choice.strip()) for choice in choices]
        text = text.rstrip(" ")  # a space belongs to the token of the next word
        before = text.rstrip() if choices else text  # and before a choice, so does a line end
        prompt = self.tokenizer.encode(before, bos=True)
        return prompt, [self.tokenizer.encode(f"{text} {each}", bos=True) for each in choices]


def checked_choices(question: dict, where: str) -> list[str]:
    """Return the choices of a question, none where its answer has to be written. Raise UserError
    where a line is no question. The question becomes what UTF-8 can hold."""
    refuse_other_meanings(question, where)
    question["question"] = check_string(question.get("question"), f'{where}: "question" is')
    choices, answer = question.get("choices") or [], question.get("answer")
    if not isinstance(choices, list):
        raise UserError(f'{where}: "choices" is {choices!r:.60}: give a list of strings')
    for choice in choices:
        if not check_string(choice, f"{where}: a choice is").strip():
            raise UserError(f"{where}: a choice is empty: leave the question out")
    if choices and (type(answer) is not int or answer not in range(len(choices))):
        raise UserError(f'{where}: "answer" is {answer!r:.60}: give the number of a choice')
    if not choices and len(check_string(answer, f'{where}: "answer" is').strip().splitlines()) != 1:
        raise UserError(f'{where}: "answer" is {answer!r:.60}: give one line')
    return choices
