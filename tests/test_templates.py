"""text/templates.py: what chat templates write, and where answers stand in it.

Ids are compared with transformers', and targets with differences between what its template writes
when it asks for an answer, and when it has it."""

import pytest
from conftest import line_of_refusal
from test_published import TALK, assert_chats_agree, ours_and_theirs, write

from text import templates as templates_module
from text.targets import encode
from text.tokenizer import load_tokenizer


def templates() -> dict[str, str]:
    def written(message: str, asked: str, before: str = "") -> str:
        loop = "{% for m in messages %}" + message + "{% endfor %}"
        return before + loop + "{% if add_generation_prompt %}" + asked + "{% endif %}"

    chatml, asked = "{{ '<|im_start|>' + m.role + '\n' + m.content", "<|im_start|>assistant\n"
    default = "{% set s = 'Be kind.' %}{% if messages[0].role != 'system' %}<|im_start|>system\n"
    return {
        "no line end": written(chatml + " + '<|im_end|>' }}", asked),
        "variable": written(chatml + " + '<|im_end|>\n' }}", asked,
                            default + "{{ s }}<|im_end|>\n{% endif %}"),
        "no heading": "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}",
        "no system": written("{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
                             "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}", "",
                             "{{bos_token}}"),
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


CALL = {"type": "function", "function": {"name": "f", "arguments": {"é": 1}}}
SPACES = [dict(role="user", content=" a\n"), dict(role="assistant", content="    return x\n\n"),
          dict(role="user", content="\tb"), dict(role="assistant", content="\n  c ")]  # fmt: skip


@pytest.mark.parametrize("name", templates())
def test_every_template_is_run(name, tmp_path):
    """Spaces of an answer stay unless the template strips them."""
    kind = "smollm2" if "<|im_end|>" in templates()[name] else "yi"
    more = dict(chat_template=templates()[name], bos_token="<s>" if kind == "yi" else "<repo_name>")
    directory = write(tmp_path / "it", kind, **more)
    ours, theirs = ours_and_theirs(directory)
    for talk in (TALK, TALK[1:3]):
        assert_chats_agree(ours, theirs, talk)
    ids, is_target = encode(SPACES, ours)
    # A heading's line end and spaces after it may be one token.
    assert ids == theirs.apply_chat_template(SPACES, return_dict=False)[: len(ids)]
    said = ours.decode([i for i, on in zip(ids, is_target) if on])
    assert "    return x" in said or name == "trims"
    assert ("    return x\n\n" in ours.decode(ids)) == (name != "trims")
    if name == "tools":
        call = CALL | {"function": {"name": "f", "arguments": {"é": "<|im_end|>"}}}
        talk = [*SPACES[:1], dict(role="assistant", tool_calls=[call], reasoning_content="R")]
        talk += [dict(role="tool", content="12"), dict(role="assistant", content="12.")]
        encode(talk, ours, tools=[call])
        call["function"]["arguments"] = {"é": 1}  # transformers takes the name for the token
        assert_chats_agree(ours, theirs, talk, tools=[call])


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
    assert_chats_agree(*ours_and_theirs(directory), talk, tools)


def test_spaces_around_the_tags_of_answers(tmp_path):
    _, theirs = ours_and_theirs(write(tmp_path, "yi"))
    for tags in (
        "a\n{% generation %}\nb\n{% endgeneration %}\nc",
        "{%- generation -%}x{%- endgeneration -%} y",
        "a {%- generation %} b {% endgeneration -%} c",
        "{%+ generation %}b{% endgeneration %}",
    ):
        written = theirs.apply_chat_template(TALK, tokenize=False, chat_template=tags)
        assert templates_module.render(tags, messages=TALK) == written


def test_the_day_is_the_same_in_each_run(tmp_path):
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content + eos_token }}"
    ours = load_tokenizer(str(write(tmp_path, "yi", chat_template=template + "{% endfor %}")))
    assert ours.decode(encode(SPACES, ours)[0]).startswith("26 Jul 2024")


def test_an_answer_that_begins_a_conversation_is_found(tmp_path):
    """Also where the template has written the same words before it."""
    directory = write(tmp_path, "smollm2", chat_template=templates()["variable"])
    ours = load_tokenizer(str(directory))
    for first in ("Be", "kind", "a"):
        ids, is_target = encode([dict(role="assistant", content=first), *TALK[1:3]], ours)
        said = ours.decode([i for i, on in zip(ids, is_target) if on])
        assert said == f"{first}<|im_end|>{TALK[2]['content']}<|im_end|>"


PLAIN = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ eos_token }}{% endfor %}"
BESIDE = PLAIN.replace("m.content", "m.content if not m.tool_calls else 'f'")
CALLING = PLAIN.replace("{{ eos", "{{ m.tool_calls | tojson if m.tool_calls }}{{ eos")
END_OF_SYSTEM = PLAIN.replace("eos_token", "eos_token if m.role == 'system' else ''")
THINKING = PLAIN + "{% if add_generation_prompt %}{{ 'assistant<think>' }}{% endif %}"
LOOP = "{% for a in range(9999) %}"
CALL_FIRST = [dict(role="assistant", tool_calls=[CALL]), *TALK[1:3]]
REFUSED = [  # template, conversation, what is said of it
    ("{{ 'mine' }}", TALK, "leaves out message 1, of the system"),
    (PLAIN.replace("messages", "messages if m.role != 'system'"), TALK, "leaves out message 1"),
    (PLAIN, [TALK[1], TALK[2] | dict(tool_calls=[CALL])], "writes nothing of tool_calls"),
    (PLAIN, [TALK[1], TALK[2] | dict(reasoning_content="R")], "writes nothing of reasoning_conte"),
    (PLAIN, [TALK[1], TALK[2] | dict(function_call=CALL)], "writes nothing of function_call"),
    (BESIDE, [TALK[1], TALK[2] | dict(tool_calls=[CALL]), *TALK[3:]], "leaves out message 2"),
    (CALLING, CALL_FIRST, "begins with a call"),
    (PLAIN.replace("{{ eos_token }}", ""), TALK[1:3], "ends an answer with no token that ends"),
    (END_OF_SYSTEM, TALK, "ends an answer with no token that ends"),
    (THINKING, TALK[1:3], "asks for message 2 by"),
    (PLAIN + "{{ raise_exception('only two\nroles') }}", TALK, "this conversation: only two"),
    ("{% if %}", TALK, "does not write this conversation: "),
    # Hostile templates get nothing.
    ("{{ ().__class__.__bases__[0].__subclasses__() }}", TALK, "unsafe"),
    ("{{ messages.clear() }}", TALK, "unsafe"),
    ("{{ 'a' * 10**10 }}", TALK, "MemoryError"),
    (LOOP * 2 + "{% endfor %}" * 2, TALK, "it takes more than 1 s"),
    (LOOP + "{{ 'a' * 9999 }}{% endfor %}", TALK, "99,980,001 characters"),
]


@pytest.mark.parametrize("template, talk, says", REFUSED)
def test_what_a_template_leaves_out_or_attacks_is_refused(
    template, talk, says, tmp_path, monkeypatch
):
    monkeypatch.setattr(templates_module, "SECONDS", 1)
    tokenizer = load_tokenizer(str(write(tmp_path / "it", "yi", chat_template=template)))
    assert says in line_of_refusal(encode, talk, tokenizer)
