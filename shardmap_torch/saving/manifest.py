"""Manifest of a checkpoint, in JSON: the file and byte range of each chunk of each tensor.

The file may come from an untrusted source. So nothing is unpickled, and no name, size or dtype is
used before it has been validated. Its digest tells of bytes that have changed, but anyone can make
one: that the chunks cover each tensor exactly once is validated all the same.
"""

import hashlib
import json
import math
import re
import stat
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
_FORMAT: Final = "shardmap_torch checkpoint 2"
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
        fields = {**parts, "values": dict(self.values), "tensors": tensors}
        return json.dumps({**fields, "digest": _digest(fields)})

    def sizes(self) -> dict[str, int]:
        """Returns the least size in bytes that each file must have."""
        ends: dict[str, int] = {}
        for entry in self.tensors.values():
            for chunk in entry.chunks:
                end = chunk.start + entry.num_bytes(chunk)
                ends[chunk.file] = max(ends.get(chunk.file, 0), end)
        return ends


def _digest(fields: Mapping[str, Any]) -> str:
    """Returns the hash of all fields, whatever their order and the spaces between them."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def folder_of(root: Path, step: int) -> Path:
    """Returns the folder of a step."""
    return root / f"step-{step:09}"


def read(folder: Path) -> Manifest:
    """Reads and validates the manifest of a complete checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged; names what is missing or wrong.
    """
    try:
        # A pipe in its place would never end.
        if not stat.S_ISREG((folder / FILE).lstat().st_mode):
            raise _incomplete(folder, f"{FILE} is no regular file")
        text = (folder / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _incomplete(folder, f"it has no {FILE}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _incomplete(folder, f"{FILE} cannot be read: {error}") from error
    try:
        manifest = _parse(json.loads(text))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _incomplete(folder, f"{FILE} is damaged: {error}") from error
    if folder.name.partition(".")[0] != folder_of(folder, manifest.step).name:
        raise _incomplete(folder, f"{FILE} is of step {manifest.step}")
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
    fields = dict(_dict(raw))
    _require(fields["format"] == _FORMAT, f"its format is {fields['format']!r}, not {_FORMAT!r}")
    digest = fields.pop("digest")
    _require(digest == _digest(fields), "its bytes have changed since it was written")
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
    _require(_is_grid(entry), f"{path} of shape {entry.shape} is not covered once by its chunks")
    return entry


def _is_grid(entry: Entry) -> bool:
    """Returns whether the chunks are the cells of a grid that divides each dim, each cell once.

    So are the shards of a DTensor; it takes one look at each chunk, however many a file has.
    """
    if math.prod(entry.shape) == 0:
        return not entry.chunks
    if any(
        len(c.offset) != len(entry.shape) or len(c.shape) != len(entry.shape) for c in entry.chunks
    ):
        return False
    ends: list[dict[int, int]] = []
    for dim, length in enumerate(entry.shape):
        starts = sorted({chunk.offset[dim] for chunk in entry.chunks})
        ends.append(dict(zip(starts, [*starts[1:], length], strict=True)))
        if not starts or starts[0] != 0 or starts[-1] >= length:
            return False
    fits = all(
        start + size == ends[dim][start]
        for chunk in entry.chunks
        for dim, (start, size) in enumerate(zip(chunk.offset, chunk.shape, strict=True))
    )
    cells = {chunk.offset for chunk in entry.chunks}
    return fits and len(cells) == len(entry.chunks) == math.prod(map(len, ends))


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
    _require(type(raw) is int and raw >= 0, f"{raw!r:.80} is no size")
    return int(raw)


def _sizes(raw: Any) -> tuple[int, ...]:
    _require(isinstance(raw, list), f"{raw!r:.80} is no list of sizes")
    return tuple(map(_size, raw))


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise ValueError(why)
