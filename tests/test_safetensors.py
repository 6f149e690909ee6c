"""files/safetensors.py and the safetensors package read each other's files, in every bit.

Both refuse malformed headers. Files that shrink, or are shorter than they say, are refused, too."""

import json
import os

import pytest
import safetensors
import safetensors.torch as package
import torch

from files.safetensors import DTYPES, StoredTensor, open_safetensors, save_safetensors
from plumbing.messages import UserError


def test_the_package_reads_our_files_and_we_read_its_files(tmp_path):
    """A tensor of each dtype, and some of other shapes."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 5, generator=generator) * 4
    tensors = {str(dtype): values.abs().to(dtype) for dtype in DTYPES.values()}
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 4)
    tensors["transposed"] = values.T
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    expected = package.save(contiguous)  # names, dtypes, shapes, bits
    ours = tmp_path / "ours"
    theirs = tmp_path / "theirs"
    entries = {name: StoredTensor.of(tensor) for name, tensor in tensors.items()}
    save_safetensors(ours, entries, {"format": "pt"})
    assert package.save(package.load_file(ours)) == expected
    package.save_file(contiguous, theirs, {"made": "there"})
    found = {name: entry.read() for name, entry in open_safetensors(theirs).items()}
    assert package.save(found) == expected


def entry(begin=0, end=8, dtype="F32", shape=(2,)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize("header, message", [
    (b"{" * 100_000, "not a JSON object"),
    (b'{"a": 1' + b"0" * 5000 + b"}", "not a JSON object"),
    ({"a": entry(dtype="F7")}, "a known dtype, .*F7"),
    ({"a": entry(shape=(-2, -1))}, "needs a known dtype, a shape"),
    ({"a": entry(shape=(True, 2))}, "needs a known dtype, a shape"),
    ({"a": entry(shape=(0, 2**40, 2**40), end=0)}, "needs a known dtype, a shape"),
    ({"a": entry(shape=(1,) * 65, end=4)}, "needs a known dtype, a shape"),
    ({"a": entry(end=12)}, "does not fill"),
    ({"a": entry(), "b": entry()}, "overlap"),
    ({"a": entry(4, 12)}, "gap"),
    ({"a": entry(0, 4, shape=(1,))}, "do not end where the file ends"),
])  # fmt: skip
def test_malformed_headers_are_refused(header, message, tmp_path):
    """And by the safetensors package, too."""
    path = tmp_path / "file"
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(content).to_bytes(8, "little")
    path.write_bytes(length + content + bytes(8))
    with pytest.raises(UserError, match=message):
        open_safetensors(path)
    with pytest.raises(safetensors.SafetensorError):
        package.load(path.read_bytes())


def test_a_header_longer_than_the_file_or_than_100_mb(tmp_path):
    path = tmp_path / "file"
    for length, size in ((1, 7), (2**63, 10), (101_000_000, 200_000_000)):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        os.truncate(path, size)  # if the file grows, by a hole
        with pytest.raises(UserError, match="a header of"):
            open_safetensors(path)


def test_a_file_of_more_than_4_gb_that_shrinks(tmp_path):
    """Its data is a hole in a sparse file, except for the last two elements."""
    path = tmp_path / "file"
    n = 2**30 + 2**20
    hole = 4 * n  # bytes
    entries = {"a": entry(0, hole, shape=(n,))}
    entries["b"] = entry(hole, hole + 8)
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    begin = 8 + len(header) + hole  # of b
    os.truncate(path, begin)
    with open(path, "ab") as file:
        b = torch.tensor([1.0, 2.0])
        file.write(b.numpy().tobytes())
    tensors = open_safetensors(path)
    assert tensors["b"].read().tolist() == [1, 2]
    os.truncate(path, begin + 4)
    with pytest.raises(UserError, match="has changed"):  # it is not read beyond its end
        tensors["b"].read()
