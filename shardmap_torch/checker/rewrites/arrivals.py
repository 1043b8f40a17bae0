"""Calls of torch.distributed that have begun, and have not been waited for.

Until then nobody knows what is in the memory that they write, and what they read must not change.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from shardmap_torch.checker.ir.program import StorageType
from shardmap_torch.core.source_location import call_site
from shardmap_torch.errors import ShardTypeError

_LENT: Final = "a call of torch.distributed may still read"


class Arrivals:
    """The memory that such calls read and write."""

    def __init__(self, on_begin: Callable[[], None]) -> None:
        """There is none yet; `on_begin` is called where a call begins."""
        self._on_begin = on_begin
        self._written: list[StorageType] = []
        self._read: list[StorageType] = []

    def reject(self, name: str, found: StorageType | None) -> None:
        """Refuses to use memory that a call is about to write."""
        if found is not None and found in self._written:
            raise ShardTypeError(
                f"{name}: {call_site()} uses what a call of torch.distributed writes, which "
                "has not been waited for.\nFix: call wait() first on what async_op=True returns."
            )

    def begin(
        self, written: Sequence[StorageType], read: Sequence[StorageType]
    ) -> Callable[[], AbstractContextManager[None]]:
        """Notes that a call begins; returns a context, for its end, in which its results arrive."""
        self._on_begin()
        read = [each for each in read if each.read_only in (None, _LENT)]
        self._written += written
        self._read += read
        for each in read:
            each.read_only = _LENT

        @contextmanager
        def arriving() -> Iterator[None]:
            for each in read:
                self._read.remove(each)
                each.read_only = _LENT if each in self._read else None
            for each in written:
                self._written.remove(each)
            others, self._written = self._written, []  # calls that write the rest of this memory
            yield
            self._written = others

        return arriving
