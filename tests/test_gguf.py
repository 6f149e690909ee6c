"""files/gguf.py: llama.cpp computes and tokenizes as we do from the files that we export."""

import json
import subprocess
import sys
import unicodedata
import urllib.request
from dataclasses import replace
from subprocess import PIPE

import numpy as np
import pytest
import tokenizers
import torch
from conftest import ROOT, like, slow_after
from test_formats import TALK, our_model, saved
from test_published import (
    QWEN_WORDS,
    ends_by_a_word,
    hard_strings,
    llama_3_kind,
    qwen3,
    trained_anew,
    tuned_to_chatml,
    with_a_word,
)
from test_published import write as write_kind

from files.conversion import export_weights
from files.gguf import Q8_0, encoded, vocabulary
from model import LlamaConfig
from plumbing.messages import UserError
from text.bpe import train_tokenizer
from text.targets import encode_prompt
from text.tokenizer import load_tokenizer
from text.vocabulary import WORD_PATTERN, Tokenizer

gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp", reason="needs xllamacpp, which is llama.cpp")

# RoPE turns slowly enough that 300 tokens meet all three ranges of its scaling.
PLAIN = LlamaConfig(64, 3, 4, 2, 96, vocab_size=700, max_seq_len=512, rope_theta=1e4)
SCALED = replace(PLAIN, rope_scaling=8.0, tie_embeddings=True)
QWEN2 = like(PLAIN, "qwen2")
QWEN3 = like(PLAIN, "qwen3", head_dim=32)
OLMO2 = like(PLAIN, "olmo2")


class LlamaCpp:
    """llama.cpp's server, in a process of its own and asked by HTTP."""

    def __init__(self, path):
        command = [sys.executable, ROOT / "tests/workers/llama_cpp.py", path]
        self.process = subprocess.Popen(command, text=True, stdin=PIPE, stdout=PIPE)
        self.address = self.process.stdout.readline().strip()
        assert self.address, "llama.cpp cannot load the file"

    def __del__(self):
        self.process.kill()
        self.process.communicate()

    def ask(self, path: str, **body) -> dict:
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, json.dumps(body).encode(), kind)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def tokens(self, text: str, special: bool = False) -> list[int]:
        body = dict(content=text, add_special=special, parse_special=special)
        return self.ask("/tokenize", **body)["tokens"]

    def continued(self, ids: list[int], n: int, tokenizer: Tokenizer, size: int):
        """Generate n tokens greedily; return them [n] and the log-probabilities of all [n, V].

        The server reports no probabilities of a token that ends within a character: it may not
        choose one."""
        texts = {i: token.decode(errors="replace") for token, i in tokenizer.vocab.items()}
        part = [i for i, text in texts.items() if "\ufffd" in text]
        banned = [[i, False] for i in [*part, *tokenizer.special.values()]]
        body = dict(prompt=ids, n_predict=n, n_probs=size, temperature=0, logit_bias=banned)
        steps = self.ask("/completion", **body)["completion_probabilities"]
        rows = torch.empty(n, size)
        for row, step in zip(rows, steps, strict=True):
            for entry in step["top_logprobs"]:
                row[entry["id"]] = entry["logprob"]
        return [step["id"] for step in steps], rows


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """A tokenizer with merges among the characters of hard strings."""
    directory = tmp_path_factory.mktemp("tokenizer")
    text = "\n\n".join(hard_strings(4000)).replace("\0", "")
    (directory / "text.txt").write_text(text, newline="")
    train_tokenizer([str(directory / "text.txt")], 695, directory / "tokenizer.model")
    return load_tokenizer(str(directory))


def exported(directory, config, tokenizer, dtype=None):
    """Export a model with large weights, and return it and its file."""
    model = our_model(config)
    run = saved(directory / "run", model, tokenizer)
    export_weights(run, directory / "out", "gguf", dtype)
    return model, directory / "out" / "model.gguf"


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [PLAIN, SCALED, QWEN2, QWEN3, OLMO2],
    ids=["plain", "scaled-tied", "qwen2", "qwen3", "olmo2"],
)
def test_llama_cpp_computes_the_same(config, tokenizer, tmp_path):
    model, path = exported(tmp_path, config, tokenizer)
    ids = [int(i) for i in torch.randint(600, (300,), generator=torch.Generator().manual_seed(0))]
    tokens, rows = LlamaCpp(path).continued(ids, 20, tokenizer, config.vocab_size)
    expected = model(torch.tensor([ids + tokens[:-1]]))[0, -20:].log_softmax(-1)
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-4)
    assert len(set(tokens)) > 1
    # That is closer than what an error of RoPE's scaling would make.
    model.config = replace(config, rope_scaling=9.0 - config.rope_scaling)
    assert (model(torch.tensor([ids]))[0, -1].log_softmax(-1) - expected[0]).abs().max() > 1e-2


def without_nfc(inner, config):  # Qwen's division into words, and no decoder
    new = qwen3()
    new.normalizer = None
    content = json.loads(new.to_str()) | {"decoder": None}
    return tokenizers.Tokenizer.from_str(json.dumps(content)), dict(eos_token="<|im_end|>")


def of_letters(inner, config):  # nothing is merged, so that llama.cpp need not ignore merges
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    new = tokenizers.Tokenizer(model)
    new.pre_tokenizer = inner.pre_tokenizer
    new.add_special_tokens(["<|end|>"])
    return new, dict(eos_token="<|end|>")


OTHERS = tuned_to_chatml, with_a_word, trained_anew, ends_by_a_word, without_nfc, of_letters


@pytest.mark.parametrize("change", slow_after(4, ["none", "qwen3", *OTHERS]))
def test_llama_cpp_tokenizes_and_chats_alike(change, tokenizer, tmp_path):
    """Added tokens have their names and kinds, and generation ends at the same ones."""
    if change == "none":
        ours = tokenizer
    elif change == "qwen3":
        ours = load_tokenizer(str(write_kind(tmp_path / "qwen", "qwen3")))
    else:
        ours, _ = llama_3_kind(tmp_path, change)
    config = replace(PLAIN, vocab_size=ours.vocab_size + 3)
    llama_cpp = LlamaCpp(exported(tmp_path, config, ours)[1])
    for text in (*hard_strings(2000 if change == "none" else 500), "Hi <tool_call>x<think>"):
        if change != "qwen3" or text == unicodedata.normalize("NFC", text):  # as llama.cpp does not
            assert llama_cpp.tokens(text) == ours.encode(text), text
    assert llama_cpp.tokens("Hi", special=True) == ours.encode("Hi", bos=True)
    prompt = llama_cpp.ask("/apply-template", messages=TALK)["prompt"]
    ids = encode_prompt(TALK, ours)
    # llama.cpp begins each prompt as texts begin, also where the template does not.
    begins = [] if ids[0] == ours.bos else ours.beginning
    assert llama_cpp.tokens(prompt, special=True) == begins + ids
    for token in ours.stop:
        bias = dict(logit_bias=[[token, 1000.0]], ignore_eos=False)
        body = dict(prompt=ours.encode("Hi", bos=True), n_predict=5, temperature=0, **bias)
        said = llama_cpp.ask("/completion", **body)
        assert said["stop_type"] == "eos" and said["tokens_predicted"] <= 2, token


STEPS = tokenizers.normalizers, tokenizers.pre_tokenizers, tokenizers.decoders
NORMALIZERS, PRE_TOKENIZERS, DECODERS = STEPS
WORDS, QWEN = tokenizers.Regex(WORD_PATTERN), tokenizers.Regex(QWEN_WORDS)


def divided(words=WORDS, behavior="isolated", invert=False, **flags):
    split = PRE_TOKENIZERS.Split(words, behavior, invert)
    byte_level = PRE_TOKENIZERS.ByteLevel(**dict(add_prefix_space=False, use_regex=False) | flags)
    return PRE_TOKENIZERS.Sequence([split, byte_level])


def after(*names: str):
    bos = "<|begin_of_text|>"
    special = [(bos, 1), ("<|eot_id|>", 2)]
    return tokenizers.processors.TemplateProcessing(" ".join(names), special_tokens=special)


CHANGED = [  # an attribute of the tokenizer and its value, or a token that is added
    ("normalizer", NORMALIZERS.Lowercase()),
    ("normalizer", NORMALIZERS.NFC()),  # which only Qwen's may have
    ("normalizer", NORMALIZERS.Replace("a", "b")),
    ("normalizer", NORMALIZERS.Sequence([NORMALIZERS.Strip()])),
    ("pre_tokenizer", divided(behavior="merged_with_next")),
    ("pre_tokenizer", divided(behavior="removed", invert=True)),
    ("pre_tokenizer", divided(use_regex=True)),
    ("pre_tokenizer", divided(add_prefix_space=True)),
    ("pre_tokenizer", divided(tokenizers.Regex(r"\s+"))),
    ("pre_tokenizer", PRE_TOKENIZERS.ByteLevel()),
    ("pre_tokenizer", PRE_TOKENIZERS.Sequence([PRE_TOKENIZERS.Digits(), *divided()])),
    ("decoder", DECODERS.Sequence([DECODERS.ByteLevel(), DECODERS.Strip(" ", 1, 0)])),
    ("post_processor", after("<|begin_of_text|>", "$A", "<|eot_id|>")),
    ("post_processor", after("<|begin_of_text|>", "<|begin_of_text|>", "$A")),
    ("token", tokenizers.AddedToken("<think>", lstrip=True)),
]  # fmt: skip


@pytest.mark.parametrize("step, value", CHANGED, ids=range(len(CHANGED)))
def test_a_step_that_llama_cpp_lacks_is_refused(step, value, tmp_path):
    def change(inner, config):
        inner.add_special_tokens(["<|done|>"])  # so that it is no tokenizer of ours
        if step == "token":
            inner.add_tokens([value])
        else:
            setattr(inner, step, value)
        return inner, config

    ours, _ = llama_3_kind(tmp_path, change)
    with pytest.raises(UserError, match=rf"has a {step} that llama\.cpp lacks"):
        vocabulary(ours, ours.vocab_size)


def test_merges_that_llama_cpp_would_make_are_refused(tmp_path):
    """A word that is a token is merged in llama.cpp's qwen2, and not in its llama-bpe."""
    for ignores in (False, True):

        def change(inner, config, ignores=ignores):
            content = json.loads(inner.to_str())
            content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = (
                QWEN_WORDS if ignores else WORD_PATTERN
            )
            content["model"]["ignore_merges"] = ignores
            content["model"]["merges"].remove(["r", "e"])
            return tokenizers.Tokenizer.from_str(json.dumps(content)), config

        (tmp_path / str(ignores)).mkdir()
        ours, _ = llama_3_kind(tmp_path / str(ignores), change)
        with pytest.raises(UserError, match=f"ignore_merges {ignores} beside this pre_tokenizer"):
            vocabulary(ours, ours.vocab_size)


def test_more_tokens_than_the_model_has_are_refused(tokenizer):
    with pytest.raises(UserError, match="the tokenizer has 695 tokens, the model 694"):
        vocabulary(tokenizer, 694)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, Q8_0], ids=str)
def test_types_are_those_of_the_gguf_package(dtype, tokenizer, tmp_path):
    """Also a matrix whose rows are no whole number of blocks."""
    config = replace(PLAIN, ffn_dim=80)
    model, path = exported(tmp_path, config, tokenizer, dtype)
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert len(found) == len(weights)
    name = {Q8_0: "Q8_0", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    for key, weight in {
        "blk.0.attn_q.weight": weights["layers.0.attention.wq.weight"],
        "blk.2.ffn_down.weight": weights["layers.2.feed_forward.w2.weight"],
        "token_embd.weight": weights["tok_embeddings.weight"],
        "output_norm.weight": weights["norm.weight"],
    }.items():
        kind = "F32" if weight.ndim == 1 else "F16" if name == "Q8_0" and "down" in key else name
        assert found[key].tensor_type == gguf.GGMLQuantizationType[kind]
        expected = gguf.quants.quantize(weight, found[key].tensor_type)
        assert found[key].data.tobytes() == expected.tobytes(), key


def test_blocks_of_zeros_and_halves():
    rows = np.array([[0.0] * 32, [127, 0.5, 1.5, -0.5, -2.5] + [0.0] * 27], dtype=np.float32)
    expected = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0).tobytes()
    assert encoded(torch.from_numpy(rows), Q8_0) == expected
