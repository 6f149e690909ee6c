"""Chat templates: programs in Jinja that write a conversation out as text.

A model knows conversations in one form, in which it was trained: headings before messages, tokens
after them. Its template is the only full account of that form, so it is run, and not imitated, by
Jinja, which torch needs, too. A template comes with a model from anywhere, so it runs in a sandbox,
within limits on time and memory.
"""

import contextlib
import functools
import json
import re
import resource
import signal
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from plumbing.json_files import check_string
from plumbing.messages import UserError

# Messages: {"role": "user", "content": "Hi"}, and what else the template reads.
Conversation = list[dict[str, Any]]
# Fields of a message that a chat template may write, or may not know.
OPTIONAL_FIELDS = ("tool_calls", "function_call", "reasoning_content")

# Llama 3's form, in Meta's words, since ollama recognizes a template by its likeness to Meta's.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + "
    "('ipython' if message['role'] == 'tool' else message['role']) + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.first %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
# Forms for other models without a template: ChatML if there are tokens for it, else headings in
# plain text.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADINGS = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'] | title + ':\n' + message['content'] | trim }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)
# What a template may take, and the most characters that it may write.
SECONDS, MEMORY_BYTES, LENGTH = 10, 1 << 30, 1 << 24
TODAY = date(2024, 7, 26)  # Llama 3's default, so that a run does not depend on its day


def default_form(special: dict[str, int], has_bos: bool) -> tuple[str, str | None]:
    """Return a template for a model without one, and the token that ends its answers, or None if
    eos_token does. `special` are its special tokens; `has_bos`: bos_token is before its texts."""
    if special.keys() >= {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}:
        return CHAT_TEMPLATE, "<|eot_id|>"
    form, end = HEADINGS, None
    if special.keys() >= {"<|im_start|>", "<|im_end|>"}:
        form, end = CHATML, "<|im_end|>"
    return "{{ bos_token }}" + form if has_bos else form, end


def render(template: str, **variables) -> str:
    """Return what a template writes, given the variables that transformers gives it. Raise
    UserError where it fails, refuses the conversation, or takes too long or too much."""
    try:
        with _limits():
            text = _compiled(template).render(**variables)
    except UserError:
        raise
    except Exception as error:  # a template may fail in any way
        what = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the chat template does not write this conversation: {what:.200}")
    if len(text) > LENGTH:
        raise UserError(f"the chat template writes {len(text):,} characters: is it one of a chat?")
    return check_string(text, "the chat template writes")


@functools.lru_cache
def _compiled(template: str):
    """Return a template of Jinja, compiled as transformers does, with the same functions."""
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UserError("chats need a package that torch needs, too: pip install jinja2")

    def raise_exception(message: str):
        raise ValueError(message)  # which `render` reports

    def tojson(value, ensure_ascii=False, **options) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    environment.filters["tojson"] = tojson
    # Two tags by which transformers, but not `encode`, finds the answers.
    for tag, by in (("generation", "if true"), ("endgeneration", "endif")):
        template = re.sub(rf"(\{{%[-+]?)\s*{tag}\s*([-+]?%\}})", rf"\1 {by} \2", template)
    return environment.from_string(template)


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Within this context, this process may compute for SECONDS, and take MEMORY_BYTES more."""

    def end(*_) -> None:
        raise TimeoutError(f"it takes more than {SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with contextlib.suppress(OSError, ValueError):  # only Linux says how much a process has
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
