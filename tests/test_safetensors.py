"""files/safetensors.py against the safetensors package; malformed files are refused."""

import json
import os
import random
from pathlib import Path

import pytest
import safetensors.torch
import torch

from files.safetensors import DTYPES, StoredTensor, open_safetensors, save_safetensors
from plumbing.processes import UserError


def samples() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        str(dtype): (torch.randn(3, 5, generator=generator) * 4).abs().to(dtype)
        for dtype in DTYPES.values()
    }
    transposed = torch.randn(4, 6, generator=generator).T
    return tensors | dict(scalar=torch.tensor(2.5), empty=torch.empty(0, 4), transposed=transposed)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    of_a, of_b = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and of_a.equal(of_b)


def test_the_package_reads_our_files_and_we_read_its_files(tmp_path):
    tensors = samples()
    entries = {n: StoredTensor.of(t) for n, t in tensors.items()}
    save_safetensors(tmp_path / "ours", entries, {"format": "pt"})
    by_them = safetensors.torch.load_file(tmp_path / "ours")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(contiguous, tmp_path / "theirs", {"made": "there"})
    by_us = {name: entry.read() for name, entry in open_safetensors(tmp_path / "theirs").items()}
    assert by_them.keys() == by_us.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(by_them[name], tensor) and same(by_us[name], tensor), name


def write_raw(path: Path, header: bytes | dict, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin=0, end=8, dtype="F32", shape=(2,)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header, message",
    [
        (b"[]", "not a JSON object"),
        (b"{" * 100_000, "not a JSON object"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not a JSON object"),
        (b"\xff{}", "not a JSON object"),
        ({"a": 3}, "'a' needs a known dtype, a shape"),
        ({"a": entry(dtype="F7")}, "a known dtype, .*F7"),
        ({"a": entry(end=12)}, "does not fill"),
        ({"a": entry(shape=(-2, -1))}, "needs a known dtype, a shape"),
        ({"a": entry(shape=(True, 2))}, "needs a known dtype, a shape"),
        ({"a": entry(shape=(0, 2**40, 2**40), end=0)}, "needs a known dtype, a shape"),
        ({"a": entry(shape=(1,) * 65, end=4)}, "needs a known dtype, a shape"),
        ({"a": entry(), "b": entry()}, "overlap"),
        ({"a": entry(4, 12)}, "gap"),
        ({"a": entry(0, 4, shape=(1,))}, "do not end where the file ends"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_safetensors_are_refused(header, message, tmp_path):
    with pytest.raises(UserError, match=message):
        open_safetensors(write_raw(tmp_path / "file", header, bytes(8)))


def test_a_header_longer_than_the_file_or_than_100_mb(tmp_path):
    path = tmp_path / "file"
    for length, size in ((1, 0), (1, 7), (2**63, 10), (101_000_000, 200_000_000)):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        os.truncate(path, size)  # if the file grows, by a hole
        with pytest.raises(UserError, match="a header of"):
            open_safetensors(path)


def test_a_file_of_more_than_4_gb(tmp_path):
    """Its data is a hole in a sparse file, except for the last two elements."""
    n = 2**30 + 2**20
    header = {"a": entry(0, 4 * n, shape=(n,)), "b": entry(4 * n, 4 * n + 8)}
    path = write_raw(tmp_path / "file", header, b"")
    with open(path, "r+b") as file:
        begin = file.seek(0, 2) + 4 * n
        file.seek(begin)
        file.write(torch.tensor([1.0, 2.0]).numpy().tobytes())
    assert open_safetensors(path)["b"].read().tolist() == [1, 2]


def test_a_file_that_shrinks_is_not_read_beyond_its_end(tmp_path):
    path = write_raw(tmp_path / "file", {"a": entry()}, bytes(8))
    tensors = open_safetensors(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="has changed"):
        tensors["a"].read()


def mutated(content: bytes, choice: random.Random) -> bytes:
    """Return a file in which a few bits, bytes, lengths or stretches are changed."""
    data = bytearray(content)
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(choice.choice([1, 1, 1, 2, 4])):
        at = choice.randrange(header if choice.random() < 0.9 else len(data)) % max(len(data), 1)
        kind = choice.randrange(6)
        if kind == 0:
            data[at] ^= 1 << choice.randrange(8)
        elif kind == 1:
            data[at] = choice.choice(b'0123456789{}[]",:-eE. \x00\xff')
        elif kind == 2:
            del data[at : at + choice.choice([1, 2, 8, 100])]
        elif kind == 3:
            data[at:at] = choice.choice([b"0", b"9", b"[", b'"', b"-", b"18446744073709551616"])
        elif kind == 4:
            data[:8] = choice.choice([0, 1, header, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little")
        else:
            end = at + choice.choice([4, 16, 64])
            data[at:end] = data[at:end][::-1]
        if not data:
            break
    return bytes(data)


def test_mutated_files_never_crash_and_are_judged_as_by_the_safetensors_package(tmp_path):
    """Of all files, the package accepts those that we accept, and reads the same bytes."""
    tensors = {name: t.contiguous() for name, t in samples().items() if "uint" not in name}
    few = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(3, dtype=torch.int64)}
    originals = [safetensors.torch.save(few, {"x": "y"}), safetensors.torch.save(tensors)]
    choice, path = random.Random(0), tmp_path / "file"
    accepted = refused_by_us_alone = 0
    for i in range(1000):
        path.write_bytes(mutated(originals[i % 4 == 0], choice))
        try:
            their = safetensors.torch.load(path.read_bytes())
        except Exception:  # of many types, some of its own, some of Python's
            their = None
        try:
            our = {name: entry.read() for name, entry in open_safetensors(path).items()}
        except UserError:
            refused_by_us_alone += their is not None
            continue
        assert their is not None and their.keys() == our.keys(), i
        assert all(same(our[name], their[name]) for name in our), i
        accepted += 1
    assert accepted > 16  # a mutation of names or data leaves a valid file
    assert refused_by_us_alone < 10, refused_by_us_alone
