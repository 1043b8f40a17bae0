"""Flight recorder: the last collectives of this rank, written to a file when something fails.

Its history is their hash, which is equal on ranks that have done the same.

Source: NCCL's flight recorder in PyTorch (`TORCH_NCCL_DUMP_ON_TIMEOUT`), for every backend.
"""

import json
import os
import stat
import tempfile
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from shardmap_torch.control.board import CHECK, RankGroup, Step
from shardmap_torch.core.source_location import Standing, mark_lines, read_lines
from shardmap_torch.errors import PostmortemError, show_shape

VARIABLE: Final = "SHARDMAP_TORCH_DUMPS"
"""The environment variable that names the folder of the dumps."""

LENGTH: Final = 256

_STEPS: Final = 48
"""Comparisons that are kept, to tell where ranks parted."""

_UNKNOWN: Final = "an unknown line"

_FACTOR: Final = 0x5851F42D4C957F2D
_MODULUS: Final = (1 << 61) - 1
_KEYS: Final = 4096
"""Number of collectives whose hashes are kept."""


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


class FlightRecorder:
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
        line = getattr(site, "place", _UNKNOWN)
        is_open = self.is_open and seq == self._taken + len(self.new)
        state = "begun" if is_open else "done"
        axes = ",".join(operation.axes)
        return Entry(seq, call, function, str(operation), axes, operand, line, state)

    def write(self, rank: int, reason: str) -> Path | None:
        """Writes the dump of this rank; returns its path, None if it cannot be written."""
        folder = usable_folder()
        if folder is None:
            return None
        path = folder / f"rank-{rank:05}.json"
        dump = {"rank": rank, "reason": reason, "entries": [*map(astuple, self.entries())]}
        # No link is followed, nor a pipe waited for: whoever may write here may have put one there.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with suppress(OSError), open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump(dump, file, indent=1, default=str)
            return path
        return None


class History:
    """The calls and collectives of this rank, hashed in order, and counted by group.

    Collectives are hashed together, right before a comparison, from what the flight recorder has of
    them: each by itself, after a computation or a wait, would find the processor's caches cold and
    take ten times as long.

    Attributes:
        num_checks: the number of comparisons.
    """

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._calls = self._moves = self.num_checks = 0
        self._keys: dict[Any, tuple[Any, int]] = {}
        self._counts: dict[str, int] = {}
        self._trail: deque[tuple[int, str, Standing]] = deque(maxlen=_STEPS)

    def note(self, what: str) -> None:
        """Adds what others do too and is compared with the next call."""
        self._trail.append((self.num_checks, what, mark_lines()))
        self._calls = (self._calls * _FACTOR + zlib.crc32(what.encode())) % _MODULUS

    @property
    def newest(self) -> str:
        """Formats the line of the newest step as ` at model.py:12`; empty if there is none."""
        lines = read_lines(self._trail[-1][2][:1]) if self._trail else ()
        return "".join(f" at {site.place}" for site in lines)

    def trail(self) -> Sequence[Step]:
        """Returns the last steps; called on any thread."""
        steps = []
        for number, what, standing in self._trail.copy():  # at once, while the program adds others
            site, *callers = map(str, read_lines(standing)) if standing else (_UNKNOWN,)
            steps.append(Step(number, what, site, callers))
        return steps

    def extend(self, digest: int, what: str = "") -> tuple[int, int]:
        """Adds a call, or a collective that is compared by itself, of this hash.

        Its name and line are kept, if it has a name, for errors that show where ranks part.

        Returns:
            The hash of all, and that of the collectives alone.
        """
        if self._recorder.new:
            self.catch_up()
        if what:
            self._trail.append((self.num_checks, what, mark_lines()))
        self.num_checks += 1
        self._calls = (self._calls * _FACTOR + digest) % _MODULUS
        return (self._calls * _FACTOR + self._moves) % _MODULUS, self._moves

    def counts(self) -> Mapping[str, int]:
        """Returns the number of operations by group; called on any thread."""
        new, counts = self._recorder.new.copy(), self._counts.copy()  # at once, while others write
        counts[CHECK] = self.num_checks
        for *_, rank_group in new:
            counts[rank_group.name] = counts.get(rank_group.name, 0) + 1
        return counts

    def catch_up(self) -> None:
        """Adds the collectives recorded since the last time."""
        moves, counts = self._moves, self._counts
        for _, operation, dtype, shape, _, made_in, rank_group in self._recorder.take():
            moves = (moves * _FACTOR + self.key(operation, dtype, shape, made_in)) % _MODULUS
            counts[rank_group.name] = counts.get(rank_group.name, 0) + 1
        self._moves = moves

    def key(self, operation: Any, dtype: torch.dtype, shape: torch.Size, made_in: int) -> int:
        """Returns the hash of one collective, in the backward of call `made_in` or in none (0)."""
        known = self._keys.get((id(operation), dtype, shape))
        if known is None:
            if len(self._keys) > _KEYS:
                self._keys.clear()
            text = f"{operation!r} {dtype} {tuple(shape)}"
            known = operation, zlib.crc32(text.encode())  # kept, or its id would be another's
            self._keys[id(operation), dtype, shape] = known
        return known[1] + (made_in << 32)

    def clear(self) -> None:
        """Forgets what was done, but not how often."""
        self.catch_up()
        self._trail.clear()
        self._calls = self._moves = 0

    def restart(self) -> None:
        """Forgets everything."""
        self.clear()
        self._counts, self.num_checks = {}, 0


def dump_folder() -> Path:
    """Returns the folder of the dumps: the same for all ranks that one agent has started."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else _own_folder() / f"run-{os.getppid()}"


def _own_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"shardmap_torch-{_user()}"


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def usable_folder() -> Path | None:
    """Makes the folder of the dumps; None where it cannot be made, or is not this user's alone.

    Its name in the system's temporary folder can be foreseen, and others may write there.
    """
    folder = dump_folder()
    try:
        if not os.environ.get(VARIABLE):
            own = _own_folder()
            own.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = own.lstat()
            is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == _user()
            if not is_own or found.st_mode & 0o022:
                return None
            own.chmod(0o700)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder


def read_dump(path: Path) -> Dump:
    """Reads a dump that `FlightRecorder.write` wrote.

    Raises:
        PostmortemError: the file is no dump.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        raw = json.loads(text)
        entries = [
            Entry(int(seq), int(call), *map(str, rest)) for seq, call, *rest in raw["entries"]
        ]
        return Dump(int(raw["rank"]), str(raw["reason"]), entries)
    except (KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        text = f"{path} is no dump of shardmap_torch's flight recorder."
        raise PostmortemError(text) from error
