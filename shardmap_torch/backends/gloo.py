"""Communicator on gloo: parts go from rank to rank, and no wait outlasts the ranks it is for.

gloo's own all-gather and all-to-all announce what they receive behind what they send. The rank that
comes last then gets nothing before it has sent everything: 1.5 and 2 times the time of the link.
Its reduce-scatter is an all-reduce of twice the bytes, and no wait for it can be ended.
"""

from collections.abc import Callable, Mapping, Sequence
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

_SMALL: Final = 2**14
"""Bytes of a sum that all ranks send to all; of more, gloo's ring sends less or as quickly."""


def _added(stack: Tensor) -> Tensor:
    return stack.sum(0, dtype=stack.dtype)


_COMBINED: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "sum": _added,
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
}


@dataclass(frozen=True)
class GlooWire(Wire):
    """`Wire` on gloo. A long wait checks if the other ranks can still arrive; see `control`."""

    def reduce(self, x: Tensor, op: str) -> Tensor:
        """Combines all ranks' values: small ones in one message to each, not 2 (n-1) in turn."""
        return _COMBINED[op](self.gather(x)) if x.nbytes <= _SMALL else super().reduce(x, op)

    def gather(self, x: Tensor) -> Tensor:
        """Stacks all ranks' values along a new leading dim."""
        out = x.new_empty((self.size, *x.shape))
        x = x.contiguous()
        self._swap(dict.fromkeys(range(self.size), x), _by_rank(out.unbind(0)))
        return out

    def gather_along(self, x: Tensor, dim: int) -> Tensor:
        """Concatenates all ranks' values along `dim`."""
        stacked = self.gather(x)
        return stacked.flatten(0, 1) if dim == 0 else torch.cat(stacked.unbind(0), dim)

    def sum_scatter_along(self, x: Tensor, dim: int) -> Tensor:
        """Sums all ranks' values, in their order; each rank keeps its shard of `dim`."""
        parts = x.split(x.shape[dim] // self.size, dim)
        out = x.new_empty((self.size, *parts[0].shape))
        self._swap({r: part.contiguous() for r, part in enumerate(parts)}, _by_rank(out.unbind(0)))
        return _added(out)

    def exchange(self, parts: Tensor) -> Tensor:
        """Sends row r to rank r; row r of the result comes from rank r."""
        out = torch.empty_like(parts, memory_format=torch.contiguous_format)
        self._swap(_by_rank(parts.contiguous().unbind(0)), _by_rank(out.unbind(0)))
        return out

    def exchange_rows(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Sends the next `send[r]` rows to each rank r; the next `receive[r]` come from it."""
        out = x.new_empty((sum(receive), *x.shape[1:]))
        self._swap(_by_rank(x.contiguous().split(send)), _by_rank(out.split(receive)))
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
        works = [group.recv([theirs[r]], r, _TAG) for r in others if _has_numbers(theirs.get(r))]
        works += [group.send([mine[r]], r, _TAG) for r in others if _has_numbers(mine.get(r))]
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
        return _added(self.exchange(parts))

    def sum_scatter_along(self, x: Tensor, dim: int) -> Tensor:
        """Sums all ranks' values; each rank keeps its shard of `dim`."""
        return self.sum_scatter(torch.stack(x.split(x.shape[dim] // self.size, dim)))


def _by_rank(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    return dict(enumerate(tensors))


def _has_numbers(x: Tensor | None) -> bool:
    return x is not None and x.numel() > 0
