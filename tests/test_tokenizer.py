"""text/tokenizer.py: encoding and decoding, files of tokenizers, training."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from conftest import ROOT, shared, succeed
from tiktoken.load import load_tiktoken_bpe

from plumbing.processes import UserError
from text.tokenizer import WORD_PATTERN, load_tokenizer, train_bpe, train_tokenizer

SNIPPET = "def f(x):\n    return [x, 'é', 1234567]  # <|end_of_text|>\n\n\n  done\t🙂"


def test_the_bytes_tokenizer():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode(SNIPPET) == list(SNIPPET.encode())
    assert tokenizer.decode(tokenizer.encode(SNIPPET)) == SNIPPET
    assert tokenizer.vocab_size == 256 + 11
    # Small tokenizers end documents as answers.
    assert tokenizer.eos == tokenizer.special["<|eot_id|>"] and tokenizer.eos in tokenizer.stop


def test_a_trained_tokenizer(text, tmp_path):
    path = tmp_path / "tokenizer.model"
    told = succeed("data.py", "train-tokenizer", text, "--vocab-size", 400, "--out", path).err
    tokenizer = load_tokenizer(str(path))
    trained_on = text.read_text()[: int(text.stat().st_size * 0.95)]
    per_token = len(trained_on.encode()) / len(tokenizer.encode(trained_on))
    assert f"400 of 400 tokens, {per_token:.2f} bytes a token; 1 documents, and 1" in told
    assert tokenizer.vocab_size == 400
    assert tokenizer.decode(tokenizer.encode(SNIPPET)) == SNIPPET
    line = "12 and 13 make 25\n"
    assert len(tokenizer.encode(line)) < len(line) / 1.5
    assert tokenizer.token_bytes[tokenizer.encode(SNIPPET)].sum() == len(SNIPPET.encode())
    assert tokenizer.token_bytes[tokenizer.bos] == 0
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
    tokenizer = load_tokenizer(str(shared("llama3.tokenizer.model")))
    assert tokenizer.vocab_size == 128_256
    assert tokenizer.bos == 128_000 and tokenizer.eos == 128_001
    assert tokenizer.special["<|finetune_right_pad_id|>"] == 128_004
    assert tokenizer.special["<|python_tag|>"] == 128_010
    assert tokenizer.special["<|reserved_special_token_247|>"] == 128_255
    assert set(tokenizer.stop) == {128_001, 128_008, 128_009}
    # Ids as published in Meta's and Hugging Face's documentation of Llama 3.
    assert tokenizer.encode("Hello, world!", bos=True) == [128_000, 9906, 11, 1917, 0]
    assert tokenizer.decode(tokenizer.encode(SNIPPET)) == SNIPPET
    assert 128_001 not in tokenizer.encode(SNIPPET)


HALF_A_FILE = {"added_tokens": [{"content": "<|begin_of_text|>"}], "pattern": WORD_PATTERN}


@pytest.mark.parametrize(
    "kind, content, message",
    [
        ("model", "YQ== 0\nYg==\n", "line 2"),
        ("model", "!! 0\n", "line 1"),
        ("model", "YQ== 5\n", "expected ids 0, 1, 2"),
        ("model", "", "expected ids 0, 1, 2"),
        ("json", "[]", "no tokenizer: "),
        ("json", "{", "no tokenizer: "),
        ("json", "{}", "no tokenizer: "),
        ("json", json.dumps(HALF_A_FILE), "is damaged: KeyError 'model'"),
        ("json", json.dumps(HALF_A_FILE)[:-1], "is damaged: JSONDecodeError"),
    ],
)
def test_tokenizer_files_that_are_damaged_or_of_other_models_are_refused(
    tmp_path, kind, content, message
):
    (tmp_path / f"tokenizer.{kind}").write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(tmp_path))


def test_fewer_tokens_than_asked_for_are_told(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("abab " * 99)
    train_tokenizer([tmp_path / "text.txt"], 400, tmp_path / "small.model")
    found = load_tokenizer(str(tmp_path / "small.model")).vocab_size
    assert capsys.readouterr().err.startswith(f"{found} of 400 tokens, ")
    assert 267 < found < 300


def test_the_cache_can_be_elsewhere(tmp_path):
    command = [sys.executable, "-c", "from text.tokenizer import CACHE; print(CACHE)"]
    environment = os.environ | {"FLATLLAMA_CACHE": str(tmp_path)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.stdout == f"{tmp_path}\n", result.stderr


def test_a_vocabulary_smaller_than_the_bytes_is_refused(tmp_path, text):
    with pytest.raises(UserError, match="tokenizer of 266 tokens is too small: ask for 267"):
        train_tokenizer([str(text)], 266, tmp_path / "tokenizer.model")
    train_tokenizer([str(text)], 267, tmp_path / "tokenizer.model")
    assert load_tokenizer(str(tmp_path)).encode(SNIPPET) == list(SNIPPET.encode())
