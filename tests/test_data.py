"""data.py and text/corpora.py: corpora, token files, windows, and their order."""

import json

import numpy as np
import pytest
import torch
from conftest import succeed

import data
from data import TokenFileWriter, Windows, open_token_file, open_windows, window_of
from model import IGNORE
from plumbing.processes import UserError
from text.corpora import find_files, read_pieces
from text.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

# -------------------------------------------------------------------------- corpora, token files


def documents(directory, split) -> str:
    """Everything in the token files of one split, as text with visible special tokens."""
    tokenizer = load_tokenizer(data.tokenizer_of_token_files([str(directory)]))
    names = {token: name for name, token in tokenizer.special.items()}
    tokens = np.concatenate([open_token_file(p) for p in sorted(directory.glob(f"{split}_*.bin"))])
    return "".join(names.get(i) or chr(i) for i in tokens.tolist())


def test_tokenize_files_and_lines(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("first\nfile\n")
    (source / "b.md").write_text("second")
    (source / "image.png").write_bytes(b"\x89PNG\0")  # not text, and not searched for
    lines = [{"text": f"line {i}"} for i in range(200)]
    (source / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    succeed("data.py", "tokenize", source, "--tokenizer", "bytes", "--out", out,
            "--shard-tokens", 500, "--val-fraction", 0.2)  # fmt: skip
    found = {}
    for split in ("train", "val"):
        text = documents(out, split)
        assert text.startswith("<|begin_of_text|>")
        text = text.removeprefix("<|begin_of_text|>")
        found[split] = text.split("<|eot_id|><|begin_of_text|>")
    expected = ["first\nfile\n", "second", *(line["text"] for line in lines)]
    assert sorted(found["train"] + found["val"]) == sorted(expected)
    assert 20 <= len(found["val"]) <= 60
    sizes = [len(open_token_file(path)) for path in sorted(out.glob("train_*.bin"))]
    assert sizes[:-1] == [500] * (len(sizes) - 1) and 0 < sizes[-1] <= 500
    metadata = json.loads((out / "data.json").read_text())
    assert metadata["train_tokens"] == sum(sizes)


def test_token_files_are_llm_c_format(tmp_path, text):
    out, small_bpe = tmp_path / "out", tmp_path / "tokenizer.model"
    train_tokenizer([str(text)], 400, small_bpe)
    succeed("data.py", "tokenize", text, "--tokenizer", small_bpe, "--out", out)
    raw = (out / "train_000000.bin").read_bytes()
    header = np.frombuffer(raw[:1024], "<i4")
    body = np.frombuffer(raw[1024:], "<u2")
    assert header[:3].tolist() == [20240520, 1, len(body)] and not header[3:].any()
    tokenizer = load_tokenizer(data.tokenizer_of_token_files([str(out)]))
    written = tokenizer.decode(body[1:].tolist())
    assert body[0] == tokenizer.bos and text.read_text().startswith(written)


def test_the_end_of_a_few_texts_is_held_out(tmp_path):
    files = [tmp_path / f"{i}.txt" for i in range(3)]
    for i, size in enumerate((3000, 500, 1500)):
        files[i].write_text(f"{i}\n" * (size // 2))
    for fraction, expected in [
        (0.4, "0: 3000 train, 1: 500 val, 2: 1500 val"),
        (0.2, "0: 3000 train, 1: 500 train, 2: 502 train, 2: 998 val"),
    ]:
        pieces = [f"{p.text[0]}: {len(p.text)} {p.split}" for p in read_pieces(files, fraction)]
        assert ", ".join(pieces) == expected


def test_raw_text_is_tokenized_once(tmp_path, text, monkeypatch):
    monkeypatch.setattr(data, "CACHE", tmp_path / "cache")
    tokenizer = load_tokenizer("bytes")
    train, _ = open_windows([str(text)], tokenizer, 32)
    assert bytes(train[0][1:].tolist()) == text.read_bytes()[:32]
    monkeypatch.setattr(data, "tokenize", None)  # is not called again
    again, _ = open_windows([str(text)], tokenizer, 32)
    assert len(again) == len(train)


def test_token_files_made_with_a_tokenizer_json_keep_their_tokenizer(tmp_path, text):
    train_tokenizer([str(text)], 300, tmp_path / "tokenizer.model")
    save_tokenizer(tmp_path, load_tokenizer(str(tmp_path)))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    data.tokenize([text], tokenizer, tmp_path / "out")
    kept = load_tokenizer(data.tokenizer_of_token_files([str(tmp_path / "out")]))
    assert kept.hash == tokenizer.hash
    open_windows([str(tmp_path / "out")], kept, 32)


def write_tokens(directory, name: str, vocab_size: int, tokens: np.ndarray) -> None:
    writer = TokenFileWriter(directory, name, vocab_size, tokens_per_file=10**6)
    writer.write(tokens.astype(np.uint32))
    writer.close()


def test_large_vocabularies_take_four_bytes(tmp_path):
    tokens = np.array([1, 128_255, 70_000])
    write_tokens(tmp_path, "train", 128_256, tokens)
    header = np.fromfile(tmp_path / "train_000000.bin", "<i4", 256)
    assert header[:3].tolist() == [20240801, 7, 3]
    assert open_token_file(tmp_path / "train_000000.bin").tolist() == tokens.tolist()


def test_token_files_of_other_projects_without_validation(tmp_path):
    """fineweb_train_000001.bin and the like: the end of the last file is held out."""
    for i in range(2):
        write_tokens(tmp_path, f"fineweb_train_{i}", 267, np.full(2000, i))
    train, val = open_windows([str(tmp_path)], load_tokenizer("bytes"), 50)
    assert [len(file) for file in train.files] == [2000, 1900]
    assert val[0].tolist() == [1] * 51


def header(*values: int) -> bytes:
    """The first 1024 bytes of a token file."""
    return np.array([*values, *[0] * (256 - len(values))], "<i4").tobytes()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.bin", b"", "is not a token file"),
        ("a.bin", bytes(2000), "magic 0, version 0"),
        ("a.bin", header(20240520, 1, 9)[:12], "is not a token file"),
        ("a.bin", header(20240520, 1, 900) + bytes(1000), "says 900 tokens, it holds 500"),
        ("a.txt", b"a few words", "too short: --seq-len 64 needs 65 consecutive tokens"),
        ("a.txt", b"some\0thing", "zero byte"),
        ("a.txt", b"caf\xe9 " * 99, "byte 0xe9"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', 'line 2: there is no "text" but txt'),
        ("a.jsonl", b'{"text": null}\n', 'line 1: "text" is None: give it as a string'),
        ("a.jsonl", b"{", "line 1"),
    ],
)
def test_unusable_data_is_refused(tmp_path, name, content, message, monkeypatch):
    monkeypatch.setattr(data, "CACHE", tmp_path / "cache")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_windows([str(tmp_path / name)], load_tokenizer("bytes"), 64)


def test_lone_surrogates_and_blank_lines_in_json(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud83db"}\n\n{"text": "\\ud83d\\ude42"}\n')
    assert [piece.text for piece in read_pieces([path], 0)] == ["a\ufffdb", "🙂"]


def test_what_is_left_out_of_a_directory_is_counted(tmp_path, capsys):
    for name in "a.txt b.md c.html d.html LICENSE .git/e.py .venv/f/g.py h/i.py .j.txt".split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in find_files([tmp_path])]
    assert found == ["a.txt", "b.md", "h/i.py"]
    told = capsys.readouterr().err
    assert told.startswith(f"{tmp_path}: 3 files; left out: 3 hidden, 2 .html, 1 without a suffix")
    with pytest.raises(UserError, match="there is no text to train on"):
        data.tokenize(find_files([tmp_path / "h"]), load_tokenizer("bytes"), tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()


def test_default_corpus_is_python_source():
    files = find_files(["python"])
    assert any(path.name == "argparse.py" for path in files)
    assert not any("test" in path.parts for path in files)
    pieces = list(read_pieces(files))
    held_out = sum(len(p.text) for p in pieces if p.split == "val")
    assert 0.01 < held_out / sum(len(p.text) for p in pieces) < 0.15


# ---------------------------------------------------------------------------- windows and order


def test_windows_cover_token_files():
    files = [np.arange(0, 21), np.arange(100, 104), np.arange(200, 211)]
    windows = Windows(files, 5, load_tokenizer("bytes"))
    rows = [windows[i].tolist() for i in range(len(windows))]
    starts = [0, 5, 10, 15, 200, 205]
    assert rows == [list(range(start, start + 6)) for start in starts]


@pytest.mark.parametrize("size", [5000, (1 << 24) + 1])
def test_a_checksum_notices_other_files(size):
    """Of many tokens it reads only some; the first of each file is one of them."""
    tokens = np.zeros(size, np.uint16)
    other = tokens.copy()
    other[0 if size > 5000 else 3001] = 1
    datasets = [[tokens], [other], [tokens[:-1]], [tokens, tokens[:100]], [tokens[:100], tokens]]
    checksums = [Windows(files, 10, load_tokenizer("bytes")).checksum() for files in datasets]
    assert len(set(checksums)) == len(datasets)
    assert Windows([tokens], 20, load_tokenizer("bytes")).checksum() == checksums[0]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_every_window_comes_once_an_epoch(n):
    for seed in (0, 1):
        for epoch in (0, 3):
            order = [window_of(epoch * n + i, n, seed) for i in range(n)]
            assert sorted(order) == list(range(n))


def test_order_differs_by_epoch_and_seed_looks_random_and_is_not_stored():
    assert len({window_of(i, 10**12, 0) for i in range(1000)}) == 1000
    n = 1000
    orders = [
        np.array([window_of(epoch * n + i, n, seed) for i in range(n)])
        for seed, epoch in [(0, 0), (0, 1), (1, 0)]
    ]
    for i, a in enumerate(orders):
        for b in [np.arange(n), *orders[:i]]:
            assert (a == b).sum() < 10  # one is to be expected
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.15
        steps = np.corrcoef(a[1:], a[:-1])[0, 1]
        assert abs(steps) < 0.15


def test_batch_holds_targets_positions_and_bytes(monkeypatch):
    monkeypatch.setattr("text.batch.LARGEST_R", {})
    tokenizer = load_tokenizer("bytes")
    bos, eos = tokenizer.bos, tokenizer.eos
    stream = np.array([65, 66, eos, bos, 67, 68, 69, eos, bos, 70, 71, 72, 73], dtype=np.uint16)
    batch = Windows([stream], 6, tokenizer, document_mask=True).batch([0, 1, None])
    assert batch.tokens[:2].tolist() == [[65, 66, eos, bos, 67, 68], [69, eos, bos, 70, 71, 72]]
    assert batch.targets[:2].tolist() == [[66, eos, bos, 67, 68, 69], [eos, bos, 70, 71, 72, 73]]
    assert (batch.targets[2] == IGNORE).all()
    assert batch.positions[:2].tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]]
    assert batch.text_bytes == 4 + 4
    microbatches = batch.microbatches(2)
    assert [len(part.tokens) for part in microbatches] == [2, 1]
    assert torch.equal(torch.cat([part.positions for part in microbatches]), batch.positions)
    assert batch.starts.tolist() == [[0, 3], [0, 2], [0, 3]]
    assert microbatches[0].documents.starts.tolist() == [0, 3, 6, 8, 12]
    assert microbatches[1].documents.max_length == 6


def test_ids_beyond_the_vocabulary_are_refused():
    windows = Windows([np.array([1, 2, 267, 3, 4])], 4, load_tokenizer("bytes"))
    with pytest.raises(UserError, match=r"holds token 267.*has only 267"):
        windows.batch([0])


def test_reading_ahead_keeps_order_and_raises_errors():
    def read(step):
        if step == 3:
            raise UserError("damaged")
        tokens = torch.full((1, 2), step)
        return data.Batch(tokens, tokens, None, 0)

    seen = []
    with pytest.raises(UserError, match="damaged"):
        for batch in data.read_ahead(read, range(1, 9), torch.device("cpu")):
            seen.append(batch.tokens[0, 0].item())
    assert seen == [1, 2]
