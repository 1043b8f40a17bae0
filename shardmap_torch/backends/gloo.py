"""Communicator on gloo: large parts go from rank to rank, and no wait outlasts the ranks it is for.

gloo's own all-gather and all-to-all announce what they receive behind what they send. The rank that
comes last then gets nothing before it has sent everything: 1.5 and 2 times the time of the link.
Its reduce-scatter is an all-reduce of twice the bytes, and no wait for it can be ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.backends.communicator import TracedWire, Wire
from shardmap_torch.control.start import current, peers
from shardmap_torch.control.waiting import is_done

_TAG: Final = 7_301
"""Tag of the messages: what a program sends itself on the group has another one, as a rule."""

_LARGE: Final = 2**20
"""Bytes of a part from which it goes from rank to rank; smaller ones wait more for threads so."""


@dataclass(frozen=True)
class GlooWire(Wire):
    """`Wire` on gloo. A long wait checks if the other ranks can still arrive; see `control`."""

    def gather(self, x: Tensor) -> Tensor:
        """Stacks all ranks' values along a new leading dim."""
        if x.nbytes < _LARGE:
            return super().gather(x)
        out = x.new_empty((self.size, *x.shape))
        self._swap(dict.fromkeys(range(self.size), x.contiguous()), _by_rank(out))
        return out

    def gather_along(self, x: Tensor, dim: int) -> Tensor:
        """Concatenates all ranks' values along `dim`."""
        if x.nbytes < _LARGE:
            return super().gather_along(x, dim)
        stacked = self.gather(x)
        return stacked.flatten(0, 1) if dim == 0 else torch.cat(stacked.unbind(0), dim)

    def sum_scatter_along(self, x: Tensor, dim: int) -> Tensor:
        """Sums all ranks' values, in their order; each rank keeps its shard of `dim`."""
        return _sum_scattered(self, x, dim)

    def exchange(self, parts: Tensor) -> Tensor:
        """Sends row r to rank r; row r of the result comes from rank r."""
        if parts.nbytes < _LARGE * self.size:
            return super().exchange(parts)
        out = torch.empty_like(parts, memory_format=torch.contiguous_format)
        self._swap(_by_rank(parts.contiguous()), _by_rank(out))
        return out

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
        """Sends each pair's first rank's value to its second; zeros where none arrives."""
        sources = [source for source, target in pairs if target == self.rank]
        x = x.contiguous()
        out = torch.empty_like(x) if sources else torch.zeros_like(x)
        mine = {target: x for source, target in pairs if source == self.rank}
        self._swap(mine, dict.fromkeys(sources, out))
        return out

    def _swap(self, mine: Mapping[int, Tensor], theirs: Mapping[int, Tensor]) -> None:
        """Sends tensors to ranks and receives others from them, all of them contiguous."""
        group = self.group
        others = [(self.rank + hops) % self.size for hops in range(1, self.size)]
        # A receive that is announced late comes after what this rank sends.
        works = [group.recv([theirs[r]], r, _TAG) for r in others if r in theirs]
        works += [group.send([mine[r]], r, _TAG) for r in others if r in mine]
        if self.rank in theirs:
            theirs[self.rank].copy_(mine[self.rank])
        watch = peers()
        for work in works:
            if watch is None:
                work.wait()
            else:
                watch.wait(work)

    def _wait(self, work: dist.Work) -> None:
        control = None if is_done(work) else current()
        if control is not None:
            control.waiting.wait_on(work)
        else:
            work.wait()


@dataclass(frozen=True)
class TracedGlooWire(TracedWire):
    """`TracedWire` on gloo, without its reduce-scatter."""

    def sum_scatter(self, parts: Tensor) -> Tensor:
        """Sums all ranks' stacks; each rank keeps its row."""
        return self.sum_scatter_along(parts, 0)[0]

    def sum_scatter_along(self, x: Tensor, dim: int) -> Tensor:
        """Sums all ranks' values; each rank keeps its shard of `dim`."""
        return _sum_scattered(self, x, dim)


def _sum_scattered(wire: GlooWire | TracedGlooWire, x: Tensor, dim: int) -> Tensor:
    length = x.shape[dim] // wire.size
    rows = x.unflatten(0, (wire.size, length)) if dim == 0 else torch.stack(x.split(length, dim))
    return wire.exchange(rows).sum(0, dtype=x.dtype)


def _by_rank(stack: Tensor) -> dict[int, Tensor]:
    return dict(enumerate(stack.unbind(0)))
