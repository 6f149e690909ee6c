"""text/templates.py: what chat templates write, and where answers stand in it.

Ids are compared with transformers', and targets with differences between what its template writes
when it asks for an answer, and when it has it."""

from pathlib import Path

import pytest
import transformers
from test_published import TALK, assert_chats_agree, write

from plumbing.processes import UserError
from text import templates as templates_module
from text.chat import encode
from text.tokenizer import load_tokenizer


def templates() -> dict[str, str]:
    def written(message: str, asked: str, before: str = "") -> str:
        loop = "{% for m in messages %}" + message + "{% endfor %}"
        return before + loop + "{% if add_generation_prompt %}" + asked + "{% endif %}"

    chatml, asked = "{{ '<|im_start|>' + m.role + '\n' + m.content", "<|im_start|>assistant\n"
    falcon = "{{ '<|' + m.role + '|>\n' + m.content }}"
    default = "{% set s = 'Be kind.' %}{% if messages[0].role != 'system' %}<|im_start|>system\n"
    return {
        "falcon": written(
            falcon + "{{ eos_token if m.role == 'assistant' else '\n' }}", "<|assistant|>\n"
        ),
        "no line end": written(chatml + " + '<|im_end|>' }}", asked),
        "colon": written(
            "{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>\n' }}",
            "<|im_start|>assistant: ",
        ),
        "human": written(chatml.replace("m.role", "m.role | replace('user', 'human')")
                         + " + '<|im_end|>\n' }}", asked),
        "variable": written(chatml + " + '<|im_end|>\n' }}", asked,
                            default + "{{ s }}<|im_end|>\n{% endif %}"),
        "bos": written(chatml + " + '<|im_end|>\n' }}", asked, "{{ bos_token }}"),
        "mentioned": written("{{ m.role + ': ' + m.content + eos_token }}", "assistant: ",
                             "{# not <|im_start|> #}"),
        "no heading": "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}",
        "no system": written("{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
                             "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}", "",
                             "{{bos_token}}{# <<SYS>> #}"),
        "trims": written(chatml.replace("m.content", "m.content | trim") + "+ '<|im_end|>\n' }}",
                         asked),
        "generation": written(
            "{%- if m.role == 'assistant' %}{% generation %}" + chatml + " + '<|im_end|>\n' }}"
            "{%- endgeneration %}{%- else %}" + chatml + " + '<|im_end|>\n' }}{% endif %}", asked),
        "tools": written(
            "{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}"
            "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content or '' }}"
            "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
            "{{ '<|im_end|>\n' }}", asked,
            "{% if tools %}{{ tools | tojson(indent=1, separators=(',', ':')) }}<|im_end|>"
            "{% endif %}"),
    }  # fmt: skip


SPACES = [dict(role="user", content=" a\n"), dict(role="assistant", content="    return x\n\n"),
          dict(role="user", content="\tb"), dict(role="assistant", content="\n  c ")]  # fmt: skip


@pytest.mark.parametrize("name", templates())
def test_every_template_is_run(name, tmp_path):
    """Templates that resemble others; spaces of an answer stay unless the template strips them."""
    kind = "smollm2" if "<|im_end|>" in templates()[name] else "yi"
    more = dict(chat_template=templates()[name], bos_token="<s>" if kind == "yi" else "<repo_name>")
    directory = write(tmp_path / "it", kind, **more)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    ours = load_tokenizer(str(directory))
    for talk in (TALK, TALK[1:3]):
        assert_chats_agree(ours, theirs, talk)
    ids, _ = encode(SPACES, ours)  # a heading's line end and spaces after it may be one token
    assert ids == theirs.apply_chat_template(SPACES, return_dict=False)[: len(ids)]
    ids, is_target = encode(SPACES, ours)
    said = ours.decode([i for i, on in zip(ids, is_target) if on])
    assert "    return x" in said or name == "trims"
    assert ("    return x\n\n" in ours.decode(ids)) == (name != "trims")
    if name == "tools":
        call = {"type": "function", "function": {"name": "f", "arguments": {"é": "<|im_end|>"}}}
        talk = [*SPACES[:1], dict(role="assistant", tool_calls=[call], reasoning_content="R")]
        talk += [dict(role="tool", content="12"), dict(role="assistant", content="12.")]
        encode(talk, ours, tools=[call])
        call["function"]["arguments"] = {"é": 1}  # transformers takes the name for the token
        assert_chats_agree(ours, theirs, talk, tools=[call])


CALL = {"type": "function", "function": {"name": "f", "arguments": {"é": 1}}}
ANSWER = dict(role="tool", content='{"t": "1\\n2"}')
LAST = dict(role="assistant", content="12.")
CALLS = {  # templates that cannot do without what others write nothing of, with a conversation
    "null beside a call": (
        "{% for m in messages %}{{ m.role }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
        "{% else %}{{ ': ' + m.content }}{% endif %}{{ eos_token }}{% endfor %}",
        [SPACES[0], dict(role="assistant", content=None, tool_calls=[CALL]), ANSWER, LAST], None,
    ),
    "tools are needed": (
        "{% for t in tools %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
        "{{ m.role + m.content + eos_token }}{% endfor %}", SPACES, [CALL],
    ),
    "JSON of an answer": (
        "{% for m in messages %}{{ m.role }}{{ m.content | tojson if m.role == 'tool' else "
        "m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{{ eos_token }}{% endfor %}",
        [SPACES[0], dict(role="assistant", content="", tool_calls=[CALL]), ANSWER, LAST], None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_written_as_by_transformers(name, tmp_path):
    template, talk, tools = CALLS[name]
    directory = write(tmp_path, "yi", chat_template=template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    ours = load_tokenizer(str(directory))
    assert_chats_agree(ours, theirs, talk, tools)


@pytest.mark.parametrize(
    "tags",
    [
        "a\n{% generation %}\nb\n{% endgeneration %}\nc",
        "{%- generation -%}x{%- endgeneration -%} y",
        "a {%- generation %} b {% endgeneration -%} c",
        "{%+ generation %}b{% endgeneration %}",
    ],
)
def test_spaces_around_the_tags_of_answers(tags, tmp_path):
    directory = write(tmp_path, "yi", chat_template=tags)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    written = theirs.apply_chat_template(TALK, tokenize=False)
    assert templates_module.render(tags, messages=TALK) == written


def test_the_day_is_the_same_in_each_run(tmp_path):
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content + eos_token }}"
    directory = write(tmp_path, "yi", chat_template=template + "{% endfor %}")
    ours = load_tokenizer(str(directory))
    assert ours.decode(encode(SPACES, ours)[0]).startswith("26 Jul 2024")


def test_an_answer_that_begins_a_conversation_is_found(tmp_path):
    """Also where the template has written the same words before it."""
    directory = write(tmp_path, "smollm2", chat_template=templates()["variable"])
    ours = load_tokenizer(str(directory))
    for first in ("Be", "kind", "a"):
        ids, is_target = encode([dict(role="assistant", content=first), *TALK[1:3]], ours)
        said = ours.decode([i for i, on in zip(ids, is_target) if on])
        assert said == f"{first}<|im_end|>{TALK[2]['content']}<|im_end|>"


def fails(template: str, talk: list[dict], tmp_path: Path, tools: list | None = None) -> str:
    tokenizer = load_tokenizer(str(write(tmp_path / "it", "yi", chat_template=template)))
    with pytest.raises(UserError) as error:
        encode(talk, tokenizer, tools=tools)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_a_template_leaves_out_is_refused(tmp_path):
    plain = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ eos_token }}{% endfor %}"
    call = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert "leaves out message 1, of the system" in fails("{{ 'mine' }}", TALK, tmp_path)
    no_system = (
        "{% for m in messages if m.role != 'system' %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    assert "leaves out message 1" in fails(no_system, TALK, tmp_path)
    for more in (dict(tool_calls=call), dict(reasoning_content="R")):
        talk = [TALK[1], TALK[2] | more]
        assert f"writes nothing of {min(more)}" in fails(plain, talk, tmp_path)
    assert "writes nothing of tools" in fails(plain, TALK, tmp_path, call)
    beside = "{% for m in messages %}{{ m.role + (m.content if not m.tool_calls else 'f') }}"
    talk = [TALK[1], dict(role="assistant", content="us", tool_calls=call), *TALK[1:3]]
    assert "leaves out message 2" in fails(beside + "{{ eos_token }}{% endfor %}", talk, tmp_path)
    talk = [dict(role="assistant", tool_calls=call), *TALK[1:3]]
    calls = plain.replace("{{ eos", "{{ m.tool_calls | tojson if m.tool_calls }}{{ eos")
    assert "begins with a call" in fails(calls, talk, tmp_path)
    no_end = plain.replace("{{ eos_token }}", "")
    assert "ends an answer with no token that ends" in fails(no_end, TALK[1:3], tmp_path)
    no_end = plain.replace("eos_token", "eos_token if m.role == 'system' else ''")
    assert "ends an answer with no token that ends" in fails(no_end, TALK, tmp_path)
    thinks = plain + "{% if add_generation_prompt %}{{ 'assistant<think>' }}{% endif %}"
    assert "asks for message 2 by" in fails(thinks, TALK[1:3], tmp_path)
    refuses = plain + "{{ raise_exception('only two\nroles') }}"
    assert "does not write this conversation: only two" in fails(refuses, TALK, tmp_path)
    assert "does not write this conversation: " in fails("{% if %}", TALK, tmp_path)


@pytest.mark.parametrize("template, message", [
    ("{{ ().__class__.__bases__[0].__subclasses__() }}", "unsafe"),
    ("{{ messages.clear() }}", "unsafe"),
    ("{{ 'a' * 10**10 }}", "MemoryError"),
    ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "takes more"),
    ("{% for a in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "99,980,001 characters"),
])  # fmt: skip
def test_a_hostile_template_gets_nothing(template, message, tmp_path, monkeypatch):
    monkeypatch.setattr(templates_module, "SECONDS", 1)
    assert message in fails(template, TALK, tmp_path)
