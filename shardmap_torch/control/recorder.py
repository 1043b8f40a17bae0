"""Flight recorder: the last collectives of this rank, written to a file when something fails.

Source: NCCL's flight recorder in PyTorch (`TORCH_NCCL_DUMP_ON_TIMEOUT`), for every backend.
"""

import os
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from shardmap_torch.control.deadlock import RankGroup
from shardmap_torch.errors import PostmortemError, show_shape

VARIABLE: Final = "SHARDMAP_TORCH_DUMPS"
"""The environment variable that names the folder of the dumps."""

COLUMNS: Final = ("seq", "call", "function", "operation", "axes", "operand", "line", "state")
LENGTH: Final = 256


@dataclass(frozen=True)
class Entry:
    """One collective of one rank, as read from a dump."""

    seq: int
    call: int
    function: str
    operation: str
    axes: str
    operand: str
    line: str
    state: str

    @property
    def what(self) -> tuple[object, ...]:
        """The fields that must be equal on all ranks."""
        return self.seq, self.call, self.function, self.operation, self.axes, self.operand

    def __str__(self) -> str:
        """Formats it as `#2 call 3 of f: all_reduce('i', Partial -> I) at a.py:12, done`."""
        return (
            f"#{self.seq} call {self.call} of {self.function}: {self.operation} of {self.operand} "
            f"at {self.line}, {self.state}"
        )


@dataclass(frozen=True)
class Dump:
    """The flight record that one rank has written."""

    rank: int
    reason: str
    entries: Sequence[Entry]


Raw: TypeAlias = tuple[tuple[int, str], Any, torch.dtype, torch.Size, Any, int, RankGroup]
"""A collective as it is recorded: the call and its function, the operation, dtype and shape of its
operand, the user's line, the call whose backward it is in or 0, and the ranks it is among."""


class Recorder:
    """The last collectives of this process.

    Attributes:
        new: those since the last `take`. Whoever begins a collective appends it, without a call.
        is_open: whether the newest is known not to be done.
    """

    def __init__(self) -> None:
        self._entries: deque[Raw] = deque(maxlen=LENGTH)
        self._taken = 0
        self.new: list[Raw] = []
        self.is_open = False

    def take(self) -> "Sequence[Raw]":
        """Returns the collectives that have been recorded since it was called last."""
        new, self.new = self.new, []
        self._entries.extend(new)
        self._taken += len(new)
        return new

    def entries(self) -> Sequence[Entry]:
        """Returns the recorded collectives, oldest first."""
        raw = [*self._entries, *self.new][-LENGTH:]
        seq = self._taken + len(self.new)
        return [self._entry(each, seq - len(raw) + at + 1) for at, each in enumerate(raw)]

    def last(self) -> Entry | None:
        """Returns the newest collective, or None."""
        new, taken = self.new, self._taken  # read once: called on any thread
        if new:
            return self._entry(new[-1], taken + len(new))
        return self._entry(self._entries[-1], taken) if self._entries else None

    def _entry(self, raw: "Raw", seq: int) -> Entry:
        (call, function), operation, dtype, shape, site, _, _ = raw
        operand = show_shape(dtype, shape)
        line = getattr(site, "place", "an unknown line")
        is_open = self.is_open and seq == self._taken + len(self.new)
        state = "begun" if is_open else "done"
        axes = ",".join(operation.axes)
        return Entry(seq, call, function, str(operation), axes, operand, line, state)

    def write(self, rank: int, reason: str) -> Path | None:
        """Writes the dump of this rank; returns its path, None if the folder cannot be written."""
        lines = [f"rank\t{rank}", *(f"reason\t{line}" for line in reason.splitlines())]
        lines.append("\t".join(COLUMNS))
        for entry in self.entries():
            lines.append("\t".join(_cell(getattr(entry, name)) for name in COLUMNS))
        path = dump_folder() / f"rank-{rank:05}.txt"
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            return path
        return None


def _cell(value: object) -> str:
    return str(value).replace("\t", " ").replace("\n", " ")


def dump_folder() -> Path:
    """Returns the folder of the dumps: the same for all ranks that one agent has started."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"shardmap_torch-{user}" / f"run-{os.getppid()}"


def read_dump(path: Path) -> Dump:
    """Reads a dump that `Recorder.write` wrote.

    Raises:
        PostmortemError: the file is no dump.
    """
    rank, reason, entries = None, [], []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, *cells = line.split("\t")
        if name == "rank" and cells and cells[0].isdigit():
            rank = int(cells[0])
        elif name == "reason":
            reason.append("\t".join(cells))
        elif name.isdigit() and len(cells) == len(COLUMNS) - 1 and cells[0].isdigit():
            entries.append(Entry(int(name), int(cells[0]), *cells[1:]))
    if rank is None:
        raise PostmortemError(f"{path} is no dump of shardmap_torch's flight recorder.")
    return Dump(rank, "\n".join(reason), entries)
