"""text/tokenizer.py: texts to ids, files of tokenizers, and training."""

import itertools
import json
import random
from collections import Counter

import pytest
from conftest import shared, succeed
from tiktoken.load import load_tiktoken_bpe

from plumbing.processes import UserError
from text.tokenizer import load_tokenizer, train_bpe, train_tokenizer

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
    told = succeed("data.py", "train-tokenizer", text, "--vocab-size", 400, "--out", path).err
    tokenizer = load_tokenizer(str(path))
    trained_on = text.read_text()[: int(text.stat().st_size * 0.95)]
    per_token = len(trained_on.encode()) / len(tokenizer.encode(trained_on))
    assert f"400 of 400 tokens, {per_token:.2f} bytes a token; 1 documents, and 1" in told
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
    tokenizer = load_tokenizer(str(shared("llama3.tokenizer.model")))
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


def test_sizes_of_tokenizers(tmp_path, text, capsys):
    """A text may hold fewer tokens than asked for; no tokenizer is smaller than that of bytes."""
    path = tmp_path / "tokenizer.model"
    (tmp_path / "short.txt").write_text("abab " * 99)
    train_tokenizer([tmp_path / "short.txt"], 400, path)
    found = load_tokenizer(str(path)).vocab_size
    assert capsys.readouterr().err.startswith(f"{found} of 400 tokens, ") and 267 < found < 300
    train_tokenizer([str(text)], 267, path)
    assert load_tokenizer(str(path)).encode(SNIPPET) == list(SNIPPET.encode())
    with pytest.raises(UserError, match="tokenizer of 266 tokens is too small: ask for 267"):
        train_tokenizer([str(text)], 266, path)
