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
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)) * 4
    tensors = {str(dtype): values.abs().to(dtype) for dtype in DTYPES.values()}
    return tensors | dict(scalar=torch.tensor(2.5), empty=torch.empty(0, 4), transposed=values.T)


def read(path) -> bytes:
    """Return what the package makes of the tensors that we read: names, dtypes, shapes, bits."""
    return package.save({name: entry.read() for name, entry in open_safetensors(path).items()})


def test_the_package_reads_our_files_and_we_read_its_files(tmp_path):
    entries = {name: StoredTensor.of(tensor) for name, tensor in samples().items()}
    save_safetensors(tmp_path / "ours", entries, {"format": "pt"})
    expected = {name: tensor.contiguous() for name, tensor in samples().items()}
    assert package.save(package.load_file(tmp_path / "ours")) == package.save(expected)
    package.save_file(expected, tmp_path / "theirs", {"made": "there"})
    assert read(tmp_path / "theirs") == package.save(expected)


def with_header(header: bytes | dict, data: bytes = bytes(8)) -> bytes:
    """Return the content of a file."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


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
    (path := tmp_path / "file").write_bytes(with_header(header))
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
    n, path = 2**30 + 2**20, tmp_path / "file"
    header = with_header({"a": entry(0, 4 * n, shape=(n,)), "b": entry(4 * n, 4 * n + 8)}, b"")
    path.write_bytes(header)
    os.truncate(path, len(header) + 4 * n)
    with open(path, "ab") as file:
        file.write(torch.tensor([1.0, 2.0]).numpy().tobytes())
    tensors = open_safetensors(path)
    assert tensors["b"].read().tolist() == [1, 2]
    os.truncate(path, len(header) + 4 * n + 4)
    with pytest.raises(UserError, match="has changed"):  # it is not read beyond its end
        tensors["b"].read()
