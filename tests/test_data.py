"""data.py and text/corpora.py: every text is trained on once an epoch, or held out, by files as
llm.c's. They are compared with the texts that were written, and with llm.c's header."""

import gzip
import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from test_chat import BYTES, marked

import data
from data import Windows, open_windows
from model import IGNORE, Llama, LlamaConfig
from plumbing.messages import UserError
from runs.flags import Pretraining
from runs.rules import last_step
from text import token_files
from text.bpe import train_tokenizer
from text.conversations import conversations, files_of
from text.corpora import Reading, document_name, find_files, read_pieces, read_records
from text.exams import Exam
from text.order import row_of, window_of
from text.token_files import TokenFileWriter, open_token_file
from text.tokenizer import load_tokenizer

# -------------------------------------------------------------------------- corpora, token files


def documents(directory, split: str) -> str:
    """Return the text of all token files of a split, with special tokens in curly brackets."""
    tokenizer = load_tokenizer(data.tokenizer_of_token_files([str(directory)]))
    paths = sorted(directory.glob(f"{split}_*.bin"))
    tokens = np.concatenate([open_token_file(path) for path in paths])
    return marked(tokens.tolist(), tokenizer)


def test_tokenize_files_and_lines(tmp_path, text, monkeypatch):
    """By a tokenizer.json, which the token files keep as a tokenizer.model."""
    monkeypatch.setattr(token_files, "TOKENS_PER_FILE", 500)
    train_tokenizer([str(text)], 300, tmp_path / "tokenizer.model")
    load_tokenizer(str(tmp_path)).save_published(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    source = tmp_path / "source"
    out = tmp_path / "out"
    source.mkdir()
    (source / "a.txt").write_text("first\nfile\n")
    (source / "b.md").write_text("second")
    (source / "image.png").write_bytes(b"\x89PNG\0")  # not text, and not searched for
    lines = [f"line {i}" for i in range(200)]
    records = [json.dumps({"text": line}) for line in lines]
    (source / "c.jsonl").write_text("\n".join(records) + "\n")
    files = find_files([str(source)])
    data.tokenize(files, tokenizer, out, Reading(val_fraction=0.2))
    between = "{eot_id}{begin_of_text}"
    train = ("{eot_id}" + documents(out, "train")).split(between)
    val = ("{eot_id}" + documents(out, "val")).split(between)
    assert sorted(train + val) == sorted(["", "", "first\nfile\n", "second", *lines])
    assert 20 <= len(val) <= 60
    paths = sorted(out.glob("train_*.bin"))
    sizes = [len(open_token_file(path)) for path in paths]
    assert sizes[:-1] == [500] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= 500
    metadata = json.loads((out / "data.json").read_text())
    assert metadata["train_tokens"] == sum(sizes)
    assert metadata["tokenizer_hash"] == tokenizer.hash
    assert load_tokenizer(str(out)).hash == tokenizer.hash


def write_tokens(directory, name: str, vocab_size: int, tokens: np.ndarray) -> None:
    writer = TokenFileWriter(directory, name, vocab_size)
    writer.write(tokens.astype(np.uint32))
    writer.close()


@pytest.mark.parametrize(
    "vocab_size, kind, dtype", [(1 << 16, (20240520, 1), "<u2"), (70_000, (20240801, 7), "<u4")]
)
def test_token_files_are_llm_c_format(tmp_path, vocab_size, kind, dtype):
    """A vocabulary of more than 2^16 tokens takes four bytes a token."""
    tokens = np.array([1, vocab_size - 1, 7])
    path = tmp_path / "train_000000.bin"
    write_tokens(tmp_path, "train", vocab_size, tokens)
    header = np.fromfile(path, "<i4", 256)
    assert header[:3].tolist() == [*kind, 3]
    assert not header[3:].any()
    assert np.fromfile(path, dtype, offset=1024).tolist() == tokens.tolist()
    assert open_token_file(path).tolist() == tokens.tolist()


def test_the_end_of_a_few_texts_is_held_out(tmp_path):
    files = [tmp_path / f"{i}.txt" for i in range(3)]
    files[0].write_text("0\n" * 1500)
    files[1].write_text("1\n" * 250)
    files[2].write_text("2\n" * 750)
    for fraction, expected in [
        (0.4, "0: 3000 train, 1: 500 val, 2: 1500 val"),
        (0.2, "0: 3000 train, 1: 500 train, 2: 502 train, 2: 998 val"),
    ]:
        pieces = read_pieces(files, Reading(val_fraction=fraction))
        found = [f"{piece.text[0]}: {len(piece.text)} {piece.split}" for piece in pieces]
        assert ", ".join(found) == expected


def test_token_files_of_other_projects_without_validation(tmp_path):
    """fineweb_train_000001.bin and the like: the end of the last file is held out."""
    for i in range(2):
        write_tokens(tmp_path, f"medieval_{i}", 267, np.full(2000, i))
    train, val = open_windows([str(tmp_path)], BYTES, 50)
    assert [len(file) for file in train.files] == [2000, 1900]
    assert val[0].tolist() == [1] * 51
    write_tokens(tmp_path, "fineweb_val_0", 267, np.full(60, 7))
    train, val = open_windows([str(tmp_path)], BYTES, 50)
    assert [len(file) for file in train.files + val.files] == [2000, 2000, 60]


def header(*values: int) -> bytes:
    """The first 1024 bytes of a token file."""
    header = np.zeros(256, "<i4")
    header[: len(values)] = values
    return header.tobytes()


UNUSABLE = [
    ("a.bin", bytes(2000), "is not a token file"),
    ("a.bin", header(20240520, 1, 900) + bytes(1000), "says 900 tokens, and it holds 500"),
    ("a.txt", b"a few words", "too short: --seq-len 64 needs 65 consecutive tokens"),
    ("a.txt", b"some\0thing", "zero byte"),
    ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', 'line 2: there is no "text" but txt'),
    (
        "a.jsonl",
        b'{"messages": []}\n',
        "conversations are for fine-tuning, and for evaluate.py --chat",
    ),
    ("a.jsonl", b'{"text": null}\n', 'line 1: "text" is None: give it as a string'),
    ("a.json", b'[{"text": "x"}, 3]', "element 2: 3 is not a JSON object"),
    ("a.txt.gz", gzip.compress(b"words" * 99, mtime=0)[:-9], "a.txt.gz is damaged: "),
    ("a.json", b'{\n "text": "x"\n}', "one JSON object: give a list of objects, or an object"),
    ("a.json", b'{"data": [{"text": "x"}]}', "one JSON object: give the list in 'data', or"),
    ("a.json", b'[{"text": "x"},\n{"text": "y"}\n', "begins as a list, and is no JSON: is it"),
    ("a.jsonl", b'{"text": "x"}\r{"text": "y"}\r', "line 1: its lines end in CR alone: run  tr"),
    ("a.jsonl.zst", b"(\xb5/\xfd\x04X", "a.jsonl.zst is zstd: run  zstd -d"),
    ("a.txt", b"\xfd7zXZ\0\0", "a.txt is xz: run  xz -dk"),
]


@pytest.mark.parametrize("name, content, message", UNUSABLE)
def test_unusable_data_is_refused(tmp_path, name, content, message, monkeypatch):
    monkeypatch.setattr(data, "CACHE", tmp_path / "cache")
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_windows([str(path)], BYTES, 64)


def test_compressed_files_and_arrays_are_read_as_their_text(tmp_path):
    """Held out is the end of the uncompressed text. A byte order mark is no text."""
    lines = "".join(f"{i}\n" for i in range(500))
    records = [{"text": f"{i}", "body": f"b{i}"} for i in range(300)]
    texts = [record["text"] for record in records]
    contents = {"a.txt": lines}
    contents["a.jsonl"] = "\n".join(map(json.dumps, records))
    contents["a.json"] = json.dumps(records)
    for name, content in contents.items():
        plain = tmp_path / name
        packed = tmp_path / f"{name}.gz"
        plain.write_text(f"\ufeff{content}")
        packed.write_bytes(gzip.compress(plain.read_bytes()))
        for path in (plain, packed):
            pieces = read_pieces([path], Reading(val_fraction=0.3))
            found = [piece.text for piece in pieces]
            if name == "a.txt":
                assert "".join(found) == lines
                assert len(found) == 2  # for training, and held out
            else:
                assert found == texts
    with pytest.raises(UserError, match=r"a\.jsonl would be read twice"):
        find_files([tmp_path])
    bodies = read_pieces([tmp_path / "a.json"], Reading(text_field="body"))
    assert [piece.text for piece in bodies] == [record["body"] for record in records]


def test_the_split_does_not_depend_on_where_a_directory_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (Path("x/a.jsonl"), tmp_path / "x/a.jsonl", tmp_path / "y/x/a.jsonl"):
        assert document_name(path) == "x/a.jsonl"


def test_what_cannot_be_read_is_left_out_and_listed(tmp_path, capsys):
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "a.txt").write_text("good " * 99)
    (sources / "b.txt").write_bytes(b"caf\xe9 " * 99)
    (sources / "c.jsonl").write_text('{"text": "one"}\n{\n{"txt": "two"}\n{"text": "three"}\n')
    out = tmp_path / "tokens"
    data.tokenize(find_files([sources]), BYTES, out, Reading(skip_bad=True))
    listed = out / "left-out.txt"
    places = re.findall(rf"^{sources}/(.*?): ", listed.read_text(), re.MULTILINE)
    assert places == ["b.txt", "c.jsonl, line 2", "c.jsonl, line 3"]
    assert f"left out 3 documents: {listed}" in capsys.readouterr().err
    kept = documents(out, "train")
    assert "good good" in kept
    assert kept.endswith(("one", "three"))


def test_what_is_left_out_of_a_directory_is_counted(tmp_path, capsys):
    for name in "a.txt b.md c.html d.html LICENSE .git/e.py .venv/f/g.py h/i.py .j.txt".split():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    names = ["a.txt", "b.md", "h/i.py"]
    assert find_files([tmp_path]) == [tmp_path / name for name in names]
    counts = "3 files; left out: 3 hidden, 2 .html, 1 without a suffix"
    assert capsys.readouterr().err.startswith(f"{tmp_path}: {counts}")


def test_conversations_and_exams_are_found_as_texts_are(tmp_path, capsys):
    """Prompts of rewards.py, too, are files that files_of returns."""
    line = {"prompt": "a", "completion": "b", "question": "c", "answer": "d", "text": "e", "n": 0}
    names = "a.jsonl b/c.jsonl .ipynb_checkpoints/a-checkpoint.jsonl .d.jsonl e.csv f.json"
    for name in names.split():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(line))
    expected = [tmp_path / "a.jsonl", tmp_path / "b/c.jsonl"]
    counts = "2 files; left out: 2 hidden, 1 .csv, 1 .json"
    for find in (find_files, partial(files_of, expected="lines")):
        assert find([str(tmp_path)]) == expected
        assert capsys.readouterr().err.startswith(f"{tmp_path}: {counts}")
    samples = conversations([str(tmp_path)], Reading())
    places = [sample.where for sample in samples]
    assert places == [f"{path}, line 1" for path in expected]
    assert capsys.readouterr().err.startswith(f"{tmp_path}: {counts}")
    assert len(Exam(tmp_path, BYTES, 64).questions) == 2
    said = capsys.readouterr().err
    assert counts in said
    assert said.count("fields that are not read: completion, n, prompt, te") == 2


@pytest.mark.slow
def test_a_text_without_a_token_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}')
    with pytest.raises(UserError, match="holds no text"):
        data.open_text([str(tmp_path / "a.jsonl")], BYTES, 8, Reading(), False)


def test_other_formats_are_named_with_a_command_that_converts_them(tmp_path):
    pandas = pytest.importorskip("pandas")
    datasets = pytest.importorskip("datasets")
    records = [{"text": "a\nb", "n": "1"}, {"text": 'é "x"', "n": "2"}]
    frame = pandas.DataFrame(records)
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_feather(tmp_path / "b.feather")
    frame.to_csv(tmp_path / "c.csv", index=False)
    frame.to_csv(tmp_path / "d.tsv", sep="\t", index=False)
    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "e")
    (tmp_path / "e/data-00000-of-00001.arrow").rename(tmp_path / "e.arrow")
    shutil.rmtree(tmp_path / "e")
    names = dict(parquet="Parquet", feather="Arrow", csv="CSV", tsv="CSV", arrow="Arrow")
    for path in sorted(tmp_path.iterdir()):
        name = names[path.suffix[1:]]
        with pytest.raises(UserError, match=f"{path} is {name}: run") as error:
            list(read_pieces([path]))
        command = str(error.value).split("run  ")[1]
        assert command.startswith("python ")
        command = command.replace("python", sys.executable, 1)  # which has the packages
        subprocess.run(command, shell=True, check=True)
        converted = path.with_suffix(".jsonl")
        assert [record for *_, record in read_records(converted, "")] == records
        converted.unlink()
    with pytest.raises(UserError, match=r"1 \.parquet, .*: of each Parquet file .* run  python"):
        find_files([tmp_path])


def test_a_byte_order_mark_within_a_text_is_none_of_it(tmp_path):
    """Where files that begin with one were joined."""
    path = tmp_path / "a.txt"
    path.write_text("\ufeffone\n\ufefftwo\nth\ufeffree\n" * 3)
    text = "".join(piece.text for piece in read_pieces([path]))
    assert text == "one\ntwo\nth\ufeffree\n" * 3


# ---------------------------------------------------------------------------- windows and order


def test_windows_cover_token_files():
    files = [np.arange(0, 21), np.arange(100, 104), np.arange(200, 211)]
    windows = Windows(files, 5, BYTES)
    starts = [0, 5, 10, 15, 200, 205]
    assert len(windows) == len(starts)
    for i, start in enumerate(starts):
        assert windows[i].tolist() == [*range(start, start + 6)]


@pytest.mark.parametrize("size", [5000, (1 << 24) + 1])
def test_a_checksum_notices_other_files(size):
    """Of many tokens it reads only some; the first of each file is one of them."""
    tokens = np.zeros(size, np.uint16)
    other = tokens.copy()
    place = 0 if size > 5000 else 3001
    other[place] = 1
    datasets = [[tokens], [other], [tokens[:-1]], [tokens, tokens[:100]], [tokens[:100], tokens]]
    checksums = [Windows(files, 10, BYTES).checksum() for files in datasets]
    assert len(set(checksums)) == len(datasets)
    assert Windows([tokens], 20, BYTES).checksum() == checksums[0]


def test_every_window_comes_once_an_epoch_in_an_order_that_looks_random():
    """The order differs by epoch and seed, and is not stored."""
    for n in (1, 2, 3, 5, 64, 65, 1000, 4097):
        for seed, epoch in ((0, 0), (1, 3)):
            start = epoch * n
            windows = [window_of(start + i, n, seed) for i in range(n)]
            assert sorted(windows) == list(range(n))
    assert len({window_of(i, 10**12, 0) for i in range(1000)}) == 1000
    orders = [range(1000)]
    for seed, start in [(0, 0), (0, 1000), (1, 0)]:  # of epochs
        order = [window_of(start + i, 1000, seed) for i in range(1000)]
        orders.append(order)
    orders = np.array(orders)
    for i in range(1, len(orders)):
        order = orders[i]
        earlier = orders[:i]
        assert ((order == earlier).sum(1) < 10).all()  # one is to be expected
        with_earlier = np.corrcoef(order, earlier)[0, 1:]
        assert (abs(with_earlier) < 0.15).all()
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.15  # with the next


def test_sources_have_their_shares_in_any_round():
    """Of three sources; each is read in the order that it has alone."""
    sources = [(50, 7), (1000, 2), (3, 1)]
    seed = 4
    rows = [row_of(i, sources, seed) for i in range(600)]
    starts = [0, 50, 1050, 1053]
    for start, end, (n, places) in zip(starts, starts[1:], sources):
        for first in range(0, 600, 10):
            in_round = rows[first : first + 10]
            share = [row for row in in_round if start <= row < end]
            assert len(share) == places
        own = [row - start for row in rows if start <= row < end]
        alone = [window_of(i, n, seed) for i in range(len(own))]
        for first in range(0, len(own), places):  # within a round in another order
            part = slice(first, first + places)
            assert sorted(own[part]) == sorted(alone[part])
    of_one = [row_of(i, [(50, 1)], seed) for i in range(120)]
    assert of_one == [window_of(i, 50, seed) for i in range(120)]


def test_weights_of_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CACHE", tmp_path / "cache")
    for name, size in (("a", 300), ("b=1", 200)):
        (tmp_path / name).write_text(name[0] * size)
    a = str(tmp_path / "a")
    b = str(tmp_path / "b=1")
    assert data.sources_of([a, b]) == [([a, b], 1)]  # a name, not a weight
    weighted = [f"{a}=3", f"{b}=.5"]
    assert data.sources_of(weighted) == [([a], 857), ([b], 143)]
    windows, held_out = open_windows(weighted, BYTES, 9)
    # 95 % of the bytes and a BOS, less a last target.
    assert windows.sources == [((285 + 1 - 1) // 9, 857), ((190 + 1 - 1) // 9, 143)]
    first_of_b = windows.sources[0][0]
    for i in (first_of_b, len(windows) - 1):
        assert bytes(windows[i][1:].tolist()) == b"b" * 9
    assert len(held_out) == 2  # one window of each source


@pytest.mark.parametrize("masked", [False, True])
def test_all_of_a_text_is_evaluated_as_windows_are(tmp_path, masked):
    """Windows of training have the same loss where they cover the file. A row of padding, None, has
    no targets."""
    T = 12
    tokens = np.random.default_rng(0).integers(0, 256, 5 * T + 1)
    tokens[[0, 3, 11, 12, 13, 24, 40, 59, 60]] = BYTES.bos
    write_tokens(tmp_path, "train", 267, tokens)
    model = Llama(LlamaConfig(16, 1, 2, 1, ffn_dim=16, vocab_size=267)).double()
    model.init_weights()
    windows = Windows([tokens.astype(np.uint16)], T, BYTES, document_mask=masked)
    rows = data.open_text([str(tmp_path)], BYTES, T, Reading(), masked)
    trained = windows.batch([*range(len(windows)), None])
    evaluated = rows.batch([*range(len(rows)), None])
    with torch.no_grad():
        expected = model(*trained.inputs).item()
        loss = model(*evaluated.inputs).item()
    assert loss == pytest.approx(expected, rel=1e-12)
    for batch in (trained, evaluated):
        has_target = batch.targets != IGNORE
        assert has_target.sum().item() == 5 * T
    assert trained.text_bytes == evaluated.text_bytes
    lengths = windows.batch([*range(len(windows))]).lengths
    assert sum(lengths) == 5 * T and sorted(lengths) == sorted(evaluated.lengths)
    assert len(lengths) == (10 if masked else 5)


@pytest.mark.parametrize("epochs, steps", [(1, 13), (2, 25), (0.5, 7)])
def test_epochs_are_steps(epochs, steps):
    assert last_step(Pretraining(epochs=epochs, batch=8), 100) == steps


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
