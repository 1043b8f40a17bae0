"""Rows that a tensor picks, and the tensors that they share memory with.

`x[i]` with a tensor `i` is a view of `x` in a run. Interpreted it is a copy, since where it lies
is not known. A write into the row is written back into `x`, and after any other write into `x`
the row is stale: reading it is refused.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch import Tensor

from shardmap_torch.checker.ir.program import Equation, StorageType
from shardmap_torch.checker.ir.symbolic import Numbers
from shardmap_torch.checker.rewrites import selections
from shardmap_torch.checker.rewrites.arrivals import Arrivals
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.torch_private.engine import DisableTorchFunction
from shardmap_torch.errors import ShardTypeError

_READ_AGAIN: Final = (
    "is read after a write into the tensor that it is a part of, at a position that a tensor gives"
)


class Host(selections.Host, Protocol):
    """An interpreter, as the functions of this package see it."""

    numbers: Numbers
    rows: "AliasedRows"

    def paused(self) -> AbstractContextManager[None]:
        """Ignores operations in a context."""

    def flows(self, tensor: Tensor) -> bool:
        """Returns whether a gradient flows through a tensor."""


@dataclass
class _Row:
    """Entries of `source` along `dim` at `index`, and what made the two as they are now."""

    row: Tensor
    source: Tensor
    dim: int
    index: Tensor
    of_row: Equation | None
    of_source: Equation | None


class AliasedRows:
    """The rows that are copies here and views in a run.

    Attributes:
        any: whether there are any, or selections, or arrivals; asked at every operation.
        selections: the tensors that stand for selections.
        arrivals: the memory that calls of torch.distributed read and write until they have ended.
    """

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self._taken: list[tuple[Tensor, Tensor, Any]] = []
        self._stale: set[int] = set()
        self.any = False
        self.selections = selections.Selections(self._begin)
        self.arrivals = Arrivals(self._begin)

    def _begin(self) -> None:
        self.any = True

    def reject(self, name: str, base: Tensor, found: StorageType | None) -> None:
        """Refuses a tensor, of a storage found, that has other numbers here than in a run."""
        self.selections.reject(name, base)
        self.arrivals.reject(name, found)
        reject_stale(name, _READ_AGAIN if self._is_stale(base) else None)

    def pick(self, host: Host, source: Tensor, dim: int, index: Tensor) -> Tensor:
        """Picks entries along a dim, which are kept the same as those of `source`."""
        host.needs_ranks()  # torch.func.vmap takes no number out of a tensor
        row = source.index_select(dim, index)
        from_, to = host.storage_type(source), host.storage_type(row)
        to.read_only = from_.read_only
        self._begin()
        self._rows.append(_Row(row, source, dim, index, to.made, from_.made))
        return row

    def take(self, out: Tensor, source: Tensor, index: Any) -> Tensor:
        """Remembers that `source[index]` is `out`."""
        self._taken.append((out, source, index))
        return out

    def is_taken(self, out: Any, source: Tensor, index: Any) -> bool:
        """Returns whether `source[index] = out` writes what is there, as `x[i] += 1` ends with."""
        return any(
            out is row and index is same and memory_of(source) == memory_of(of)
            for row, of, same in self._taken
        )

    def follow_writes(self, host: Host) -> None:
        """Writes rows back that have been written; marks those stale whose source has."""
        for each in reversed(self._rows):  # a row of a row comes after it
            if self._is_stale(each.row):
                continue
            if host.storage_type(each.row).made is not each.of_row:
                each.source.index_copy_(each.dim, each.index, each.row)
                each.of_row = host.storage_type(each.row).made
                each.of_source = host.storage_type(each.source).made
        for each in self._rows:
            if self._is_stale(each.row):
                continue
            if self._is_stale(each.source) or (
                host.storage_type(each.source).made is not each.of_source
            ):
                self._stale.add(memory_of(each.row))

    def _is_stale(self, tensor: Tensor) -> bool:
        return memory_of(tensor) in self._stale


def reject_stale(name: str, stale: str | None) -> None:
    """Refuses a tensor that is read where it has other numbers than in a run; `stale` says why."""
    if stale is not None:
        raise ShardTypeError(
            f"{name}: at {call_site()} a tensor {stale}.\n"
            "Fix: take it again after the write, or clone it before."
        )


def memory_of(tensor: Tensor) -> int:
    """Returns a number of a tensor's memory, which tensors that share it have in common."""
    with DisableTorchFunction():
        return int(base_of(tensor).untyped_storage()._cdata)
