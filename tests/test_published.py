"""text/vocabulary.py, text/tokenizer.py, text/bpe.py: texts to ids, files, training; and
text/published.py: tokenizers of other models.

Their ids and chats are compared with transformers'."""

import functools
import itertools
import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import transformers
from conftest import ROOT, succeed
from test_formats import PLAIN, transformers_model
from tiktoken.load import load_tiktoken_bpe

from files.conversion import export_weights
from files.directories import read_config
from plumbing.messages import UserError
from text.bpe import train_bpe, train_tokenizer
from text.targets import encode, encode_prompt
from text.tokenizer import load_tokenizer

SNIPPET = "def f(x):\n    return [x, 'é', 1234567]  # <|end_of_text|>\n\n\n  done\t🙂"


def hard_strings(n: int) -> list[str]:
    """Strings of scripts, digits, marks, spaces, control characters and names of tokens."""
    rng, strings = random.Random(0), []
    ranges = [(32, 127), (0, 0x600), (0xE00, 0x1000), (0x2000, 0x3100), (0x1F300, 0x1FB00)]
    often = ["\n", "\r", "\t", " ", "  ", "\u00a0", "'s", "'LL", "1234", "<|im_end|>", "</s>"]
    for _ in range(n):
        parts = [rng.choice(often), *(chr(rng.randrange(*rng.choice(ranges))) for _ in range(3))]
        strings.append("".join(rng.choice(parts) for _ in range(rng.randrange(1, 12))))
    return strings


def test_a_trained_tokenizer(text, tmp_path):
    path = tmp_path / "tokenizer.model"
    succeed("data.py", "train-tokenizer", text, "--vocab-size", 400, "--out", path)
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.vocab_size == 400
    assert tokenizer.decode(tokenizer.encode(SNIPPET)) == SNIPPET
    assert tokenizer.token_bytes[tokenizer.encode(SNIPPET, bos=True)].sum() == len(SNIPPET.encode())
    # Small tokenizers end documents as answers.
    assert tokenizer.eos == tokenizer.special["<|eot_id|>"] and tokenizer.eos in tokenizer.stop
    # tiktoken's reader of Llama 3's files finds the same tokens.
    assert load_tiktoken_bpe(str(path)) == tokenizer.vocab
    # Ids without a token are left out.
    assert tokenizer.decode([*tokenizer.encode("x"), 12345]) == "x"


def test_training_merges_the_most_frequent_pairs():
    """Compared with the textbook loop, which counts all pairs again after each merge."""
    words = Counter({"low": 5, "lowest": 2, "newer": 6, "wider": 3, "new": 2, "aaaaa": 4})
    spelt = [[bytes([b]) for b in word.encode()] for word in words.elements()]
    expected = [bytes([i]) for i in range(256)]
    for _ in range(12):
        counts = Counter(pair for tokens in spelt for pair in itertools.pairwise(tokens))
        best = min(counts, key=lambda pair: (-counts[pair], *map(expected.index, pair)))
        expected.append(b"".join(best))
        for tokens in spelt:
            for i in range(len(tokens)):
                if tokens[i : i + 2] == [*best]:
                    tokens[i : i + 2] = [b"".join(best)]
    assert train_bpe(words, 268) == expected


def test_llama_3s_tokenizer():
    """Its file is not part of the project."""
    path = ROOT.parent / "shared/data/llama3.tokenizer.model"
    if not path.exists():
        pytest.skip(f"needs {path}")
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.vocab_size == 128_256
    assert tokenizer.bos == 128_000 and tokenizer.eos == 128_001
    names = "<|finetune_right_pad_id|>", "<|python_tag|>", "<|reserved_special_token_247|>"
    assert [tokenizer.special[name] for name in names] == [128_004, 128_010, 128_255]
    assert set(tokenizer.stop) == {128_001, 128_008, 128_009}
    # Ids as published in Meta's and Hugging Face's documentation of Llama 3.
    assert tokenizer.encode("Hello, world!", bos=True) == [128_000, 9906, 11, 1917, 0]
    assert tokenizer.decode(tokenizer.encode(SNIPPET)) == SNIPPET
    assert 128_001 not in tokenizer.encode(SNIPPET)


@pytest.mark.parametrize("kind, content, message", [
    ("model", "YQ== 0\nYg==\n", "line 2"),
    ("model", "YQ== 5\n", "expected ids 0, 1, 2"),
    ("model", "", "expected ids 0, 1, 2"),
    ("json", "{", "is damaged: Expecting"),
    ("json", json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": []}), "no tokenizer: "),
])  # fmt: skip
def test_files_that_are_no_tokenizer_are_refused(tmp_path, kind, content, message):
    (tmp_path / f"tokenizer.{kind}").write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(tmp_path))


# ------------------------------------------------------------------- tokenizers of other models

QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + "
    "'<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TINYLLAMA = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + "
    "message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' "
    "+ message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
WRITTEN_OUT = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False,
               "normalized": False, "single_word": False}  # fmt: skip
TALK = [
    dict(role="system", content="Be brief."),
    dict(role="user", content="What is 2 + 2?"),
    dict(role="assistant", content="4, naïvely 🙂"),
    dict(role="user", content="And\n\n2 * 3?"),
    dict(role="assistant", content="6!"),
]


def byte_level(pre_tokenizers: list, names: list[str], normalizer=None):
    """A byte-level BPE of hard strings, with its special tokens first or last in the vocabulary."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(pre_tokenizers)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    given = dict(initial_alphabet=alphabet, special_tokens=names, show_progress=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=800, **given)
    tokenizer.train_from_iterator(hard_strings(3000), trainer)
    return tokenizer


def smollm2():
    pre = tokenizers.pre_tokenizers
    steps = [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    return byte_level(steps, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"])


def qwen3():
    pre, regex = tokenizers.pre_tokenizers, tokenizers.Regex(QWEN_WORDS)
    steps = [pre.Split(regex, "isolated"), pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer = byte_level(steps, [], tokenizers.normalizers.NFC())
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return tokenizer


def sentencepiece(prefix: bool):
    """As Llama 2's and TinyLlama's, with a ▁ before a text; or as Yi's, without."""
    models, norm, dec = tokenizers.models, tokenizers.normalizers, tokenizers.decoders
    of_text = tokenizers.Tokenizer(models.BPE())  # whose merges these become
    of_text.normalizer = norm.Replace(" ", "▁")
    given = dict(limit_alphabet=200, show_progress=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=900, **given)
    of_text.train_from_iterator([text for text in hard_strings(3000) if "<" not in text], trainer)
    merges = [tuple(pair) for pair in json.loads(of_text.to_str())["model"]["merges"]]
    pieces = ["".join(pair) for pair in merges]
    special, of_bytes = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    ordered = dict.fromkeys([*special, *of_bytes, "▁", *sorted(set("".join(pieces))), *pieces])
    vocab = {piece: i for i, piece in enumerate(ordered)}
    given = dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, **given))
    normalizers = [norm.Replace(" ", "▁")]
    decoders = [dec.Replace("▁", " "), dec.ByteFallback(), dec.Fuse()]
    if prefix:
        normalizers.insert(0, norm.Prepend("▁"))
        decoders.append(dec.Strip(" ", 1, 0))
    tokenizer.normalizer = norm.Sequence(normalizers)
    tokenizer.decoder = dec.Sequence(decoders)
    tokenizer.add_special_tokens(special)
    if prefix:
        template = tokenizers.processors.TemplateProcessing
        tokenizer.post_processor = template("<s> $A", "<s> $A $B", [("<s>", 1)])
    return tokenizer


with_prefix = functools.partial(sentencepiece, True)
without = functools.partial(sentencepiece, False)
KINDS = {  # tokenizer, and bos_token, eos_token and chat_template of tokenizer_config.json
    "smollm2": (smollm2, "<|im_start|>", "<|im_end|>", QWEN),
    "qwen3": (qwen3, None, "<|im_end|>", QWEN),
    "tinyllama": (with_prefix, "<s>", WRITTEN_OUT, TINYLLAMA),
    "yi": (without, "<s>", "</s>", None),
}


@functools.cache
def content_of(kind: str) -> str:
    """Return the tokenizer.json of a kind, which takes long to train."""
    make, *_ = KINDS[kind]
    return make().to_str(pretty=True)


def write(directory: Path, kind: str, **more) -> Path:
    _, bos, eos, template = KINDS[kind]
    config = dict(bos_token=bos, eos_token=eos, chat_template=template) | more
    config = {name: value for name, value in config.items() if value}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(content_of(kind))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if kind == "tinyllama":  # whose file of SentencePiece's, beside it, is passed over
        (directory / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15")
    return directory


def ours_and_theirs(directory: Path) -> tuple:
    """Return our tokenizer and transformers', of the same files."""
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    return load_tokenizer(str(directory)), theirs


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    directory = write(tmp_path_factory.mktemp("published") / request.param, request.param)
    return ours_and_theirs(directory)


def test_texts_are_encoded_and_decoded_as_by_transformers(pair):
    ours, theirs = pair
    longer, prefixed = 0, bool(ours.beginning)
    for text in hard_strings(2000):
        ids = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text) == ids == ours.encode_array(text).tolist(), text
        decoded = theirs.decode(ids, clean_up_tokenization_spaces=False)
        assert ours.decode(ids).removeprefix(" " * prefixed) == decoded, text
        counted = ours.count_bytes(ours.encode_array(text).astype(int))
        assert counted == len(ours.decode(ids).encode())
        longer += len(ids) < len(text.encode()) - 1
    assert longer > 500  # there are merges
    assert ours.encode("Hi", bos=True) == theirs("Hi")["input_ids"]
    assert ours.encode("", bos=True) == [ours.bos]


def assert_chats_agree(ours, theirs, talk: list[dict], tools: list | None = None) -> None:
    """Compare ids with transformers', and targets with the differences between what its template
    writes when it asks for an answer, and when it has it."""
    options = dict(tools=tools, tokenize=True, return_dict=False, chat_template=ours.template)
    ids, is_target = encode(talk, ours, tools=tools)
    whole = theirs.apply_chat_template(talk, **options)
    assert ids == whole[: len(ids)] and ours.decode(whole[len(ids) :]) in ("", "\n", " \n", "\n\n")
    expected = [False] * len(ids)
    for i, message in enumerate(talk):
        if message["role"] == "assistant":
            prompt = theirs.apply_chat_template(talk[:i], add_generation_prompt=True, **options)
            assert encode_prompt(talk[:i], ours, tools) == prompt == ids[: len(prompt)]
            end = next(j for j in range(len(prompt), len(ids)) if ids[j] in ours.stop) + 1
            expected[len(prompt) : end] = [True] * (end - len(prompt))
            assert (message.get("content") or "").strip() in ours.decode(ids[len(prompt) : end])
    assert is_target == expected


@pytest.mark.parametrize("talk", [TALK, TALK[1:]], ids=["system", "no system"])
def test_chats_are_written_as_by_the_template(pair, talk):
    assert_chats_agree(*pair, talk)


LLAMA_3 = dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def llama_3_kind(directory: Path, change) -> tuple:
    """Write a tokenizer of Llama 3's kind as `change` makes it; return it, and transformers'."""
    train_tokenizer([str(Path(json.__file__))], 600, directory / "tokenizer.model")
    load_tokenizer(str(directory)).save_published(directory)
    (directory / "tokenizer.model").unlink()
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    inner = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = LLAMA_3 | {"tokenizer_class": "PreTrainedTokenizerFast"}
    inner, config = change(inner, config) or (inner, config)
    inner.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return ours_and_theirs(directory)


def tuned_to_chatml(inner, config):  # as Dolphin's layout
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return inner, config | dict(eos_token="<|im_end|>", chat_template=QWEN)


def renamed(inner, config):  # as Hermes'
    content = inner.to_str().replace("reserved_special_token_0", "im_start")
    content = content.replace("reserved_special_token_1", "im_end")
    named = [dict(name="tool_use", template="{{ 'x' }}"), dict(name="default", template=QWEN)]
    more = dict(eos_token="<|im_end|>", chat_template=named)
    return tokenizers.Tokenizer.from_str(content), config | more


def with_a_word(inner, config):
    inner.add_tokens(["<tool_call>"])


def trained_anew(inner, config):  # special tokens come first
    names = [inner.id_to_token(i) for i in sorted(inner.get_added_tokens_decoder())]
    new = byte_level([inner.pre_tokenizer], names)
    new.pre_tokenizer, new.decoder = inner.pre_tokenizer, inner.decoder
    new.post_processor = tokenizers.processors.TemplateProcessing(
        "<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)])  # fmt: skip
    return new, config


def ends_a_text(inner, config):  # bos, text, eos
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        "<|begin_of_text|> $A <|eot_id|>",
        special_tokens=[(name, inner.token_to_id(name)) for name in LLAMA_3.values()])  # fmt: skip


def no_beginning(inner, config):
    inner.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)


def ends_by_a_word(inner, config):
    inner.add_tokens(["<eot>"])
    return inner, config | dict(eos_token="<eot>")


CHANGES = tuned_to_chatml, renamed, with_a_word, trained_anew, ends_a_text, no_beginning


@pytest.mark.parametrize("change", [*CHANGES, ends_by_a_word])
def test_a_tokenizer_of_llama_3s_kind_is_what_its_file_says(change, tmp_path):
    ours, theirs = llama_3_kind(tmp_path, change)
    for text in (*hard_strings(300), "Hi there <tool_call>x<eot>"):
        ids = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text) == ids, text
    prompt = theirs("Hi")["input_ids"]
    assert ours.encode("Hi", bos=True) == prompt[: len(prompt) - (change is ends_a_text)]
    assert theirs.eos_token_id in ours.stop and ours.stop[0] == theirs.eos_token_id
    if change is not no_beginning:
        assert ours.bos == theirs.bos_token_id
    if change is not ends_by_a_word:  # whose default template ends an answer otherwise
        assert_chats_agree(ours, theirs, TALK)


def test_tokens_outside_of_the_alphabet(tmp_path):
    """A vocabulary may hold tokens that are written as they are."""
    inner = smollm2()
    content = json.loads(inner.to_str())
    content["model"]["vocab"]["你 好"] = len(content["model"]["vocab"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(tmp_path))  # which has no tokenizer_config.json, too
    assert tokenizer.decode([content["model"]["vocab"]["你 好"]]) == "你 好"
    assert tokenizer.eos == tokenizer.special["<|endoftext|>"]


def test_it_trains_chats_and_is_exported_as_it_was(tmp_path):
    """From the command line, with the files of the base and without them at last."""
    base, run, lora = (tmp_path / name for name in ("base", "run", "lora"))
    size = load_tokenizer(str(write(base, "smollm2"))).vocab_size
    config = replace(PLAIN, vocab_size=size, dim=32, n_heads=2, n_kv_heads=2, head_dim=0)
    transformers_model(config).save_pretrained(base)
    (chats := tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': TALK[1:3]})}\n" * 6)
    step = "--steps=1", "--batch=2", "--warmup=0", "--seq-len=128"
    succeed("train.py", "--init", base, "--data", __file__, "--out", run, *step)
    succeed("finetune_lora.py", "--init", run, "--data", chats, "--out", lora, "--merge", *step)
    chat = "--chat", "--prompt", "Hi", "--max-new-tokens", 3
    succeed("generate.py", run, "--adapter", lora, *chat)
    files = {path.name: path.read_bytes() for path in base.glob("*token*")}
    shutil.rmtree(base)
    merged = read_config(lora / "merged")
    assert merged["tokenizer"].endswith("tokenizer.json")
    assert merged["flags"]["init"].startswith(str(run))  # whose chat template an export hands on
    export_weights(lora / "merged", tmp_path / "out", "hf", None)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*token*")} == files
    succeed("generate.py", tmp_path / "out", *chat)
    with pytest.raises(UserError, match=r"has a pre_tokenizer that llama\.cpp lacks: .*Digits"):
        export_weights(lora / "merged", tmp_path / "gguf", "gguf", None)


def test_other_tokenizers_are_refused(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram([("a", 0.0)], None, False))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    suffix = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [], end_of_word_suffix="</w>"))
    metaspace = sentencepiece(True)
    metaspace.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    for tokenizer, message in (
        (unigram, "Unigram.*only byte-level BPE works here"),
        (words, "WordLevel.*only byte-level BPE works here"),
        (metaspace, "Metaspace.*only byte-level BPE works here"),
        (suffix, "has the end_of_word_suffix .</w>.: only BPE without it"),
        (byte_level([tokenizers.pre_tokenizers.ByteLevel()], []), "no token that ends a text"),
    ):
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(UserError, match=message):
            load_tokenizer(str(tmp_path))
