"""History: hashes of what this rank has done, which are equal on ranks that have done the same."""

import zlib
from collections.abc import Mapping
from typing import Any, Final

import torch

from shardmap_torch.control.deadlock import CHECK
from shardmap_torch.control.recorder import Recorder

_FACTOR: Final = 0x5851F42D4C957F2D
_MODULUS: Final = (1 << 61) - 1
_KEYS: Final = 4096
"""Number of collectives whose hashes are kept."""


class History:
    """The calls and collectives of this rank, hashed in order, and counted by group.

    Collectives are hashed together, right before a comparison, from what the flight recorder has of
    them: each by itself, after a computation or a wait, would find the processor's caches cold and
    take ten times as long.
    """

    def __init__(self, recorder: Recorder) -> None:
        """Starts empty; collectives are those of `recorder`."""
        self._recorder = recorder
        self._calls = self._moves = 0
        self._keys: dict[Any, tuple[Any, int]] = {}
        self._counts: dict[str, int] = {CHECK: 0}

    def extend(self, digest: int) -> tuple[int, int]:
        """Adds a call, or a collective that is compared by itself, of this hash.

        Returns:
            The hash of all, and that of the collectives alone.
        """
        if self._recorder.new:
            self.catch_up()
        self._counts[CHECK] += 1
        self._calls = (self._calls * _FACTOR + digest) % _MODULUS
        return (self._calls * _FACTOR + self._moves) % _MODULUS, self._moves

    @property
    def num_checks(self) -> int:
        """The number of comparisons."""
        return self._counts[CHECK]

    def counts(self) -> Mapping[str, int]:
        """Returns the number of operations by group; called on any thread."""
        new, counts = self._recorder.new.copy(), self._counts.copy()  # at once, while others write
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
        self._calls = self._moves = 0

    def restart(self) -> None:
        """Forgets everything."""
        self.clear()
        self._counts = {CHECK: 0}
