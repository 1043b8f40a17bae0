"""Manifest of a checkpoint, in JSON: the file and byte range of each chunk of each tensor.

The file may come from an untrusted source. So nothing is unpickled, and no name, size or dtype is
used before it has been validated.
"""

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from shardmap_torch.errors import CheckpointError

Value: TypeAlias = bool | int | float | str
"""A leaf that is no tensor."""

FILE: Final = "checkpoint.json"
_FORMAT: Final = "shardmap_torch checkpoint 1"
_DATA_FILE: Final = re.compile(r"rank-\d{5,}\.bin")
_DTYPES: Final[Mapping[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, stored row-major in a file.

    Attributes:
        offset: offset of the block in the global tensor.
        shape: shape of the block.
        file: name of the file.
        start: offset of its first byte in the file.
        crc: `zlib.crc32` of the bytes.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    crc: int


@dataclass(frozen=True)
class Entry:
    """A saved tensor: its global shape, and the chunks that cover it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def num_bytes(self, chunk: Chunk) -> int:
        """Returns the size of a chunk in its file."""
        return math.prod(chunk.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, by the paths of the leaves."""

    step: int
    tensors: Mapping[str, Entry]
    values: Mapping[str, Value]

    def to_json(self) -> str:
        """Serialises it; `read` is the inverse."""
        tensors = {
            path: {
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": entry.shape,
                "chunks": [asdict(chunk) for chunk in entry.chunks],
            }
            for path, entry in self.tensors.items()
        }
        parts = {"format": _FORMAT, "byte_order": sys.byteorder, "step": self.step}
        return json.dumps({**parts, "values": dict(self.values), "tensors": tensors})

    def sizes(self) -> dict[str, int]:
        """Returns the least size in bytes that each file must have."""
        ends: dict[str, int] = {}
        for entry in self.tensors.values():
            for chunk in entry.chunks:
                end = chunk.start + entry.num_bytes(chunk)
                ends[chunk.file] = max(ends.get(chunk.file, 0), end)
        return ends


def read(folder: Path) -> Manifest:
    """Reads and validates the manifest of a complete checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged; names what is missing or wrong.
    """
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _incomplete(folder, f"it has no {FILE}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _incomplete(folder, f"{FILE} cannot be read: {error}") from error
    try:
        manifest = _parse(json.loads(text))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _incomplete(folder, f"{FILE} is damaged: {error}") from error
    for name, size in manifest.sizes().items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise _incomplete(folder, f"{name} is missing")
        if path.stat().st_size < size:
            raise _incomplete(folder, f"{name} has {path.stat().st_size} bytes of {size}")
    return manifest


def _incomplete(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {folder} is incomplete: {why}. A kill while it was copied or deleted may "
        "have left it; delete it, or load another step."
    )


def _parse(raw: Any) -> Manifest:
    fields = _dict(raw)
    _require(fields["format"] == _FORMAT, f"its format is {fields['format']!r}, not {_FORMAT!r}")
    order = fields["byte_order"]
    _require(order == sys.byteorder, f"its bytes are {order}-endian, this machine's are not")
    tensors = {path: _entry(path, entry) for path, entry in _dict(fields["tensors"]).items()}
    values = _dict(fields["values"])
    for path, value in values.items():
        _require(isinstance(value, Value), f"{path} is no number or string")
    return Manifest(_size(fields["step"]), tensors, values)


def _entry(path: str, raw: Any) -> Entry:
    fields = _dict(raw)
    dtype = _DTYPES.get(fields["dtype"])
    if dtype is None:
        raise ValueError(f"{path} has the unknown dtype {fields['dtype']!r}")
    entry = Entry(dtype, _sizes(fields["shape"]), tuple(map(_chunk, fields["chunks"])))
    for chunk in entry.chunks:
        inside = len(chunk.offset) == len(chunk.shape) == len(entry.shape) and all(
            start + size <= length
            for start, size, length in zip(chunk.offset, chunk.shape, entry.shape, strict=True)
        )
        _require(inside, f"{path} of shape {entry.shape} has a chunk outside of it")
    covered = sum(math.prod(chunk.shape) for chunk in entry.chunks)
    _require(covered == math.prod(entry.shape), f"{path} is not covered by its chunks")
    return entry


def _chunk(raw: Any) -> Chunk:
    fields = _dict(raw)
    name = fields["file"]
    # A path such as ../x would read files outside of the checkpoint.
    known = isinstance(name, str) and _DATA_FILE.fullmatch(name) is not None
    _require(known, f"{name!r} is no name of a data file")
    start, crc = _size(fields["start"]), _size(fields["crc"])
    return Chunk(_sizes(fields["offset"]), _sizes(fields["shape"]), name, start, crc)


def _dict(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"{raw!r:.80} is no object")
    return raw


def _size(raw: Any) -> int:
    if not (type(raw) is int and raw >= 0):
        raise ValueError(f"{raw!r:.80} is no size")
    return raw


def _sizes(raw: Any) -> tuple[int, ...]:
    if not isinstance(raw, list):
        raise ValueError(f"{raw!r:.80} is no list of sizes")
    return tuple(map(_size, raw))


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise ValueError(why)
