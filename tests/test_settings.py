"""text/settings.py: what files beside a tokenizer name is what transformers takes of it.

That is special tokens, ends and templates. Where it takes other ids than a file says, we refuse."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import transformers
from conftest import launch, refused, succeed
from test_formats import PLAIN, our_model, saved, saved_hf
from test_published import (
    QWEN,
    TALK,
    assert_chats_agree,
    byte_level,
    llama_3_kind,
    ours_and_theirs,
)

from files.conversion import export_weights
from files.directories import read_config
from plumbing.messages import UserError
from text.targets import encode
from text.tokenizer import load_tokenizer

NAMES = "<|begin|> <|endoftext|> <|im_start|> <|im_end|> <|end_of_text|> </s> <|done|>".split()
IDS = {name: i for i, name in enumerate(NAMES)}
WORD = {"content": "<think>", "special": False, "normalized": False}
DONE = {"__type": "AddedToken", "content": "<|done|>", "lstrip": False, "normalized": False}
CONFIG, MAP, IDS_FILE = "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"
ENDS_ANSWERS = {MAP: {"eos_token": "<|im_end|>"}}  # by the token with which QWEN does


@functools.cache
def content_of_tokenizer() -> str:
    """Return the tokenizer.json of all models here, which takes long to train."""
    by_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return byte_level([by_bytes], NAMES).to_str(pretty=True)


def directory_of(path: Path, files: dict[str, dict], template: str | None = QWEN) -> Path:
    """Write a small model with a tokenizer, whose special tokens come first, and these files."""
    saved_hf(path, our_model(replace(PLAIN, vocab_size=805)))
    (path / "tokenizer.json").write_text(content_of_tokenizer())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    written = {CONFIG: settings, "config.json": json.loads((path / "config.json").read_text())}
    for name, content in ({CONFIG: {}} | files).items():
        content = written.get(name, {}) | content
        (path / name).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return path


ENDS = {  # files
    "tokenizer_config": {CONFIG: {"eos_token": "<|done|>", "bos_token": "<|begin|>"}},
    "an object": {CONFIG: {"eos_token": DONE}},
    "special_tokens_map": {MAP: {"eos_token": "<|done|>", "bos_token": "<|begin|>"}},
    "an object in it": {MAP: {"eos_token": {"content": "<|done|>", "lstrip": False}}},
    "the map is preferred": {CONFIG: {"eos_token": "</s>"}, MAP: {"eos_token": "<|done|>"}},
    "unless tokens are listed": {
        CONFIG: {"eos_token": "</s>", "added_tokens_decoder": {}}, MAP: {"eos_token": "<|done|>"}},
    "config": {"config.json": {"eos_token_id": 6, "bos_token_id": 0}},
    "a list in it": {"config.json": {"eos_token_id": [6, 3]}, CONFIG: {"eos_token": "<|done|>"}},
    "generation_config": {IDS_FILE: {"eos_token_id": 6, "bos_token_id": 0}},
    "a list in that": {IDS_FILE: {"eos_token_id": [6, 5]}, "config.json": {"eos_token_id": 3}},
    "null": {IDS_FILE: {"eos_token_id": None}, CONFIG: {"eos_token": "<|done|>"}},
    "all": {IDS_FILE: {"eos_token_id": [3, 6]}, CONFIG: {"eos_token": "<|im_end|>"},
            "config.json": {"eos_token_id": 4}},
}  # fmt: skip


def named_by_transformers(directory: Path) -> tuple[set, set]:
    """Return the ids that begin a text, and those that end it."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    found = []
    for name in ("bos_token_id", "eos_token_id"):
        ids = getattr(model.generation_config, name)
        found.append({*(ids if isinstance(ids, list) else [ids]), getattr(tokenizer, name)})
    return tuple(ids - {None} for ids in found)


@pytest.mark.parametrize("name", ENDS)
def test_what_begins_and_ends_a_text(name, tmp_path):
    """An export names the same ids, and no more, also after a checkpoint."""
    base = directory_of(tmp_path / "base", {"config.json": {"eos_token_id": None}} | ENDS[name])
    begins, ends = named_by_transformers(base)
    ours = load_tokenizer(str(base))
    assert set(ours.stop) == ends != set() and {ours.named_bos} - {None} == begins
    run = saved(tmp_path / "run", our_model(replace(PLAIN, vocab_size=805)), ours)
    export_weights(run, tmp_path / "out", "hf", None)
    assert named_by_transformers(tmp_path / "out") == (begins, ends)
    assert load_tokenizer(read_config(tmp_path / "out")["tokenizer"]).stop == ours.stop
    if IDS["<|im_end|>"] in ends:  # with which the template ends an answer
        ids, is_target = encode(TALK, ours)
        assert ids[-1] == IDS["<|im_end|>"] and is_target[-1]


LISTED = {  # files; transformers gives the tokens the ids that they say
    "added_tokens_decoder": {CONFIG: {"added_tokens_decoder": {"800": WORD}}},
    "special": {CONFIG: {"added_tokens_decoder": {"800": WORD | {"special": True}}}},
    "added_tokens": {"added_tokens.json": {"<think>": 800, "<|done|>": 6}},
    "not read": {CONFIG: {"added_tokens_decoder": {}}, "added_tokens.json": {"<think>": 800}},
}


@pytest.mark.parametrize("name", LISTED)
def test_tokens_that_only_files_beside_it_have(name, tmp_path):
    end = {"eos_token": "<|im_end|>"}
    files = LISTED[name]
    path = directory_of(tmp_path / "base", files | {CONFIG: end | files.get(CONFIG, {})})
    ours, theirs = ours_and_theirs(path)
    for text in ("<think>Hi</think>", "a <think>", TALK[2]["content"]):
        assert ours.encode(text) == theirs.encode(text, split_special_tokens=True)
    assert (ours.encode("<think>") == [800]) == (name in ("added_tokens_decoder", "added_tokens"))
    assert ours.vocab_size == len(theirs) == 800 + (name != "not read")
    assert_chats_agree(ours, theirs, TALK)
    copied = ours.save(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert again.hash == ours.hash == copied["tokenizer_hash"] and again.special == ours.special
    without = directory_of(tmp_path / "without", {CONFIG: end})
    assert (load_tokenizer(str(without)).hash == ours.hash) == (name == "not read")


@pytest.mark.parametrize("files, token, given", [
    ({CONFIG: {"added_tokens_decoder": {"803": WORD}}}, "<think>", 800),
    ({"added_tokens.json": {"<think>": 6}}, "<think>", None),
    ({MAP: {"eos_token": "<|stop|>"}}, "<|stop|>", 800),
    ({CONFIG: {"additional_special_tokens": ["<|tool|>"]}}, "<|tool|>", 800),
])  # fmt: skip
def test_tokens_to_which_transformers_gives_another_id_are_refused(files, token, given, tmp_path):
    """Or none, or one that no file says."""
    path = directory_of(tmp_path / "base", ENDS_ANSWERS | files)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    assert theirs.convert_tokens_to_ids(token) == given
    with pytest.raises(UserError, match=rf"tokenizer\.json has no '{re.escape(token)}'"):
        load_tokenizer(str(path))


def test_llama_3s_kind_with_tokens_beside_it(tmp_path):
    """A tokenizer.model cannot have them; a tokenizer.json is then no longer one of ours."""

    def listed(inner, config):
        i = inner.get_vocab_size()
        return inner, config | {"added_tokens_decoder": {str(i): WORD}}

    ours, theirs = llama_3_kind(tmp_path, listed)
    assert ours.encode("a<think>b") == theirs.encode("a<think>b", add_special_tokens=False)
    assert ours.added == {"<think>": len(theirs) - 1}


TEMPLATES = [{"name": "chat", "template": QWEN}, {"name": "rag", "template": "{{ 'x' }}"}]
SEVERAL = {
    "a list": {CONFIG: {"chat_template": TEMPLATES}},
    "an object": {CONFIG: {"chat_template": {one["name"]: one["template"] for one in TEMPLATES}}},
    "a folder": {},
}


@pytest.mark.parametrize("name", SEVERAL)
def test_of_several_templates_one_is_chosen(name, tmp_path):
    """By its name or as a file; a checkpoint then has it alone. transformers does not choose."""
    path = directory_of(tmp_path / "base", SEVERAL[name] | ENDS_ANSWERS)
    if name == "a folder":
        (path / "additional_chat_templates").mkdir()
        for one in TEMPLATES:
            file = path / "additional_chat_templates" / f"{one['name']}.jinja"
            file.write_text(one["template"])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    with pytest.raises(ValueError, match="no default"):
        theirs.apply_chat_template(TALK)
    with pytest.raises(UserError, match="named chat, rag, and none named default: choose one by -"):
        load_tokenizer(str(path))
    with pytest.raises(UserError, match=r"other is no file, and .*: give a file, or one of chat"):
        load_tokenizer(str(path), "other")
    (tmp_path / "mine.jinja").write_text(QWEN)
    expected = theirs.apply_chat_template(TALK, chat_template=QWEN, return_dict=False)
    for i, chosen in enumerate(("chat", str(tmp_path / "mine.jinja"))):
        ours = load_tokenizer(str(path), chosen)
        (tmp_path / f"{i}").mkdir()
        ours.save(tmp_path / f"{i}")
        for tokenizer in (ours, load_tokenizer(str(tmp_path / f"{i}"))):
            assert encode(TALK, tokenizer)[0] == expected[:-1]  # without the last line end


def test_a_template_is_chosen_by_a_flag(tmp_path):
    path = directory_of(tmp_path / "base", SEVERAL["a list"] | ENDS_ANSWERS)
    (chats := tmp_path / "a.jsonl").write_text(f"{json.dumps({'messages': TALK})}\n" * 3)
    chat = "generate.py", path, "--chat", "--prompt", "Hi", "--max-new-tokens", 2
    score = "evaluate.py", path, "--chat", "--data", chats, "--seq-len", 256
    tune = "finetune_lora.py", "--init", path, "--data", chats, "--out", tmp_path / "run"
    tune += "--steps=1", "--batch=1", "--warmup=0"
    for command in (chat, score, tune):
        refused(launch(*command), "choose one by --chat-template")
        succeed(*command, "--chat-template", "chat")


def test_a_template_for_a_model_without_one(tmp_path):
    path = directory_of(tmp_path / "base", {MAP: {"eos_token": "<|done|>"}}, template=None)
    assert load_tokenizer(str(path)).stop == (6, 3)  # ChatML's end, too
    (tmp_path / "mine.jinja").write_text(QWEN.replace("<|im_end|>", "<|done|>"))
    ours = load_tokenizer(str(path), str(tmp_path / "mine.jinja"))
    assert ours.stop == (6,) and encode(TALK, ours)[0][-1] == 6
    with pytest.raises(UserError, match="tokenizer bytes has no --chat-template: leave it out"):
        load_tokenizer("bytes", str(tmp_path / "mine.jinja"))


@pytest.mark.parametrize("files, says", [
    ({IDS_FILE: {"eos_token_id": [True, 6]}}, "eos_token_id True: give a number"),
    ({"config.json": {"bos_token_id": "0"}}, "bos_token_id '0': give a number"),
    ({CONFIG: {"added_tokens_decoder": {"800": "<think>"}}}, "token 800 cannot be '<think>'"),
    ({"added_tokens.json": {"<think>": True}}, "<think> cannot be True"),
    ({CONFIG: {"chat_template": [{"name": "default"}]}}, "chat template that is no text: None"),
])  # fmt: skip
def test_what_says_nothing_is_refused(files, says, tmp_path):
    with pytest.raises(UserError, match=says):
        load_tokenizer(str(directory_of(tmp_path / "base", files)))


def test_dropout_is_refused(tmp_path):
    """It would give a text other ids each time."""
    path = directory_of(tmp_path / "base", {MAP: {"eos_token": "<|done|>"}}) / "tokenizer.json"
    content = json.loads(path.read_text())
    for dropout in (0.0, 0.5):
        content["model"]["dropout"] = dropout
        path.write_text(json.dumps(content))
        if dropout == 0:
            load_tokenizer(str(path.parent))
    with pytest.raises(UserError, match=r"has dropout 0\.5, so that a text has other ids"):
        load_tokenizer(str(path.parent))
