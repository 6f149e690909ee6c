"""files/safetensors.py against the safetensors package; malformed files are refused."""

import json
import os

import pytest
import safetensors
import safetensors.torch as package
import torch

from files.safetensors import DTYPES, StoredTensor, open_safetensors, save_safetensors
from plumbing.messages import UserError


def samples() -> dict[str, torch.Tensor]:
    """Return a tensor of each dtype, and some of other shapes."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 5, generator=generator) * 4
    tensors = {}
    for dtype in DTYPES.values():
        tensors[str(dtype)] = values.abs().to(dtype)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 4)
    tensors["transposed"] = values.T
    return tensors


def read(path) -> bytes:
    """Return what the package makes of the tensors that we read: names, dtypes, shapes, bits."""
    tensors = {}
    for name, entry in open_safetensors(path).items():
        tensors[name] = entry.read()
    return package.save(tensors)


def test_the_package_reads_our_files_and_we_read_its_files(tmp_path):
    ours = tmp_path / "ours"
    theirs = tmp_path / "theirs"
    entries = {}
    contiguous = {}
    for name, tensor in samples().items():
        entries[name] = StoredTensor.of(tensor)
        contiguous[name] = tensor.contiguous()
    expected = package.save(contiguous)
    save_safetensors(ours, entries, {"format": "pt"})
    assert package.save(package.load_file(ours)) == expected
    package.save_file(contiguous, theirs, {"made": "there"})
    assert read(theirs) == expected


def with_header(header: bytes | dict, data: bytes = bytes(8)) -> bytes:
    """Return the content of a file."""
    if isinstance(header, dict):
        header = json.dumps(header).encode()
    length = len(header).to_bytes(8, "little")
    return length + header + data


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
    path.write_bytes(with_header(header))
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
    header = with_header(entries, b"")
    path.write_bytes(header)
    begin = len(header) + hole  # of b
    os.truncate(path, begin)
    with open(path, "ab") as file:
        b = torch.tensor([1.0, 2.0])
        file.write(b.numpy().tobytes())
    tensors = open_safetensors(path)
    assert tensors["b"].read().tolist() == [1, 2]
    os.truncate(path, begin + 4)
    with pytest.raises(UserError, match="has changed"):  # it is not read beyond its end
        tensors["b"].read()
