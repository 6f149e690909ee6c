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
from pathlib import Path

from plumbing.processes import UserError

# Llama 3's form. It is worded as Meta's is, by whose likeness ollama recognizes it.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + "
    "('ipython' if message['role'] == 'tool' else message['role']) + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.first %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
# Forms for models without a template: ChatML if there are tokens for it, else headings in plain
# text. Neither has a place for what a tool has put out.
CHATML = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}"
    "{{ raise_exception('it has no form for what a tool has put out') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADINGS = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'] | title + ':\n' + message['content'] | trim }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)
# Files beside a tokenizer that say how it is used.
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
SETTINGS += ("generation_config.json",)
SECONDS, MEMORY, LENGTH = 10, 1 << 30, 1 << 24  # that a template may take: bytes, characters


def read_settings(directory: Path, name: str = SETTINGS[0]) -> dict:
    """Return the content of a file of settings; nothing if there is none."""
    path = directory / name
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}")
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it is no JSON object")
    return content


def chat_template(directory: Path) -> str:
    """Return the chat template of Hugging Face's files, of several the one named "default"; empty
    if there is none."""
    if (jinja := directory / "chat_template.jinja").is_file():
        return jinja.read_text(encoding="utf-8")
    template = read_settings(directory).get("chat_template") or ""
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default", "")
    return template


def default_template(special: dict[str, int], begins: bool) -> str:
    """Return the template for a model without one, given its special tokens, and whether its texts
    begin with bos_token."""
    if "<|start_header_id|>" in special:
        return CHAT_TEMPLATE
    return "{{ bos_token }}" * begins + (CHATML if "<|im_start|>" in special else HEADINGS)


def named_tokens(settings: dict) -> dict[str, str]:
    """Return bos_token, eos_token, ... of a tokenizer_config.json as text, by name."""
    tokens = {key: value for key, value in settings.items() if key.endswith("_token")}
    texts = {key: t.get("content") if isinstance(t, dict) else t for key, t in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


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
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@functools.lru_cache
def _compiled(template: str):
    """Return a template of Jinja, compiled as transformers does, with the same functions."""
    try:
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UserError("chats need a package that torch needs, too: pip install jinja2")

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value, indent=None, **_) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = tojson
    # It marks answers, which are found otherwise here.
    return environment.from_string(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template))


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Within this context, this process has SECONDS of its processors, and MEMORY in addition."""

    def end(*_) -> None:
        raise TimeoutError(f"it takes more than {SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with contextlib.suppress(OSError, ValueError):  # Linux alone says what a process has
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
