"""Flight recorder: the last collectives of this rank, written to a file when something fails.

Source: NCCL's flight recorder in PyTorch (`TORCH_NCCL_DUMP_ON_TIMEOUT`), for every backend.
"""

import os
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from shardmap_torch.errors import PostmortemError

VARIABLE: Final = "SHARDMAP_TORCH_DUMPS"
"""The environment variable that names the folder of the dumps."""

COLUMNS: Final = ("seq", "call", "function", "operation", "axes", "operand", "line", "state")
_LENGTH: Final = 256


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


Raw: TypeAlias = tuple[int, int, str, Any, tuple[Any, Any], Any, int]
"""An entry before it is formatted, and the call whose backward it is in, or 0."""


class Recorder:
    """The last collectives of this process; a call of `begin` costs about half a microsecond."""

    def __init__(self) -> None:
        """Starts empty."""
        self._entries: deque[Raw] = deque(maxlen=_LENGTH)
        self._new: list[Raw] = []
        self.seq = 0
        self.done = 0

    def begin(
        self, call: int, function: str, operation: Any, operand: Any, site: Any, made_in: int = 0
    ) -> bool:
        """Records that a collective begins; its text is formatted only when needed.

        `made_in` is the call whose backward it is in, or 0. Returns whether so many are new that
        the caller must `take` them.
        """
        self.seq += 1
        new = self._new
        new.append((self.seq, call, function, operation, operand, site, made_in))
        return len(new) >= _LENGTH

    def take(self) -> "Sequence[Raw]":
        """Returns the collectives that have been recorded since it was called last."""
        new = self._new
        self._entries.extend(new)
        self._new = []
        return new

    def end(self) -> None:
        """Records that the newest collective is done."""
        self.done = self.seq

    def entries(self) -> Iterator[Entry]:
        """Yields the recorded collectives, oldest first."""
        return map(self._entry, [*self._entries, *self._new][-_LENGTH:])

    def last(self) -> Entry | None:
        """Returns the newest collective, or None."""
        known = self._new or self._entries  # read once: called on any thread
        return self._entry(known[-1]) if known else None

    def _entry(self, raw: "Raw") -> Entry:
        seq, call, function, operation, (dtype, shape), site, _ = raw
        operand = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
        line = getattr(site, "place", "an unknown line")
        state = "done" if seq <= self.done else "begun"
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
