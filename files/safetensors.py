"""Read and write safetensors files, the format of Hugging Face's weights.

    8 bytes      length of the header in bytes, little-endian
    header       JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    data         the bytes of all tensors without gaps, little-endian; offsets count from here

The format holds no code, so a file from an unknown source is safe to read if the reader checks
everything in the header before using it.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from plumbing.json_files import parse_json
from plumbing.messages import Progress, UserError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is still in a file. `read` returns the full tensor, on the CPU."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> "StoredTensor":
        """Return a StoredTensor that reads a tensor in memory."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def map(self, function: Callable[[Tensor], Tensor]) -> "StoredTensor":
        """Return a StoredTensor that reads function(tensor), of the same dtype and shape."""
        return replace(self, read=lambda: function(self.read()))

    def to(self, dtype: torch.dtype) -> "StoredTensor":
        return StoredTensor(dtype, self.shape, lambda: self.read().to(dtype))


Weights = dict[str, StoredTensor]  # a model's, by name


def open_safetensors(path: Path) -> Weights:
    """Return the tensors of a file by name, without reading their data.

    Raises UserError if the file is malformed."""

    def refuse(reason: str):
        raise UserError(f"{path} is not a safetensors file, or it is damaged: {reason}")

    file_size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if file_size < 8 or length > min(file_size - 8, MAX_HEADER_BYTES):
            refuse(f"a header of {length:,} bytes in a file of {file_size:,} bytes")
        header = file.read(length)
    try:
        entries = parse_json(header, path)
        entries.pop("__metadata__", None)  # what a program notes about the file
    except (AttributeError, TypeError, UserError) as error:
        refuse(f"its header is not a JSON object ({error})")

    tensors = {}
    ranges = []
    data_start = 8 + length
    for name, entry in entries.items():
        try:
            dtype = DTYPES[entry["dtype"]]
            shape = tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            are_sizes = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        except (KeyError, TypeError, ValueError):
            are_sizes = False
        if not are_sizes or len(shape) > 64 or math.prod(max(n, 1) for n in shape) >= 2**63:
            refuse(f"{name!r} needs a known dtype, a shape and data_offsets: {entry!s:.200}")
        if begin + math.prod(shape) * dtype.itemsize != end:
            refuse(f"{name!r} does not fill its data_offsets: {entry}")
        read = partial(_map, path, file_size, data_start + begin, dtype, shape)
        tensors[name] = StoredTensor(dtype, shape, read)
        ranges.append((begin, end))
    previous_end = 0
    for begin, end in sorted(ranges):
        if begin != previous_end:
            refuse("its tensors overlap, or leave a gap")
        previous_end = end
    if data_start + previous_end != file_size:
        refuse("its tensors do not end where the file ends")
    return tensors


def _map(
    path: Path, file_size: int, position: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """Return a tensor over the bytes of a memory-mapped file from `position` on.

    The operating system reads only what is used of it, and unmaps the file with the tensor."""
    if path.stat().st_size != file_size:
        raise UserError(f"{path} has changed while it was read")
    file = torch.from_file(str(path), shared=False, size=file_size, dtype=torch.uint8)
    data = file[position : position + math.prod(shape) * dtype.itemsize]
    if position % dtype.itemsize:  # torch views only aligned bytes as another dtype
        data = data.clone()
    return data.view(dtype).view(shape)


def with_progress_of(stored: Weights, what: str) -> Weights:
    """Return weights that print how many GB of them have been read, and the time left."""
    progress = Progress(what, sum(weight.nbytes for weight in stored.values()) / 1e9, " GB")

    def counted(tensor: Tensor) -> Tensor:
        progress.add(tensor.nbytes / 1e9)
        return tensor

    return {name: weight.map(counted) for name, weight in stored.items()}


def save_safetensors(path: Path, tensors: Weights, metadata: dict[str, str]) -> None:
    """Write a file, reading one tensor at a time.

    The widest dtypes come first, so that every tensor is aligned to its dtype."""
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header = {"__metadata__": metadata}
    begin = 0
    for name in order:
        end = begin + tensors[name].nbytes
        header[name] = {
            "dtype": dtype_names[tensors[name].dtype],
            "shape": tensors[name].shape,
            "data_offsets": (begin, end),
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned, too
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            tensor = tensors[name].read().contiguous()
            file.write(tensor.view(-1).view(torch.uint8).numpy())
