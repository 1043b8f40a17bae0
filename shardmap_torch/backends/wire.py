"""Talking to the other ranks: the one file that calls the collectives of torch.distributed.

In eager they are called directly; an all-reduce costs 7 us on a backend that does nothing, the
functional ops 18 and torch's Python wrappers of these 73. torch.compile needs the functional ops,
which its passes recognise and overlap with computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both and warns at the old names; 2.11 has only those.
_all_gather_single: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Final = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

_OPS: Final = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class Wire:
    """A group of ranks as one of them sees it; stacks are in the order of group ranks.

    Attributes:
        group: the process group.
        size: how many ranks it has.
        rank: which of them this one is.
    """

    group: dist.ProcessGroup
    size: int
    rank: int

    def reduce(self, x: Tensor, op: str) -> Tensor:
        """Combines all ranks' values."""
        # all_reduce works in place, and a body's value is not ours to change.
        y = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, _OPS[op], group=self.group)
        return y

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' values along a new leading dim."""
        out = x.new_empty((self.size, *x.shape))
        _all_gather_single(out, x.contiguous().unsqueeze(0), group=self.group)
        return out

    def sum_scatter(self, parts: Tensor) -> Tensor:
        """Sums all ranks' stacks; each rank keeps its row."""
        out = parts.new_empty((1, *parts.shape[1:]))
        _reduce_scatter_single(out, parts.contiguous(), group=self.group)
        return out[0]

    def exchange(self, parts: Tensor) -> Tensor:
        """Sends row r to rank r; row r of the result comes from rank r."""
        parts = parts.contiguous()
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts, group=self.group)
        return out

    def permute(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Sends `x` to at most one rank and receives from at most one; zeros where from none."""
        if sends == receives == [self.rank]:
            return x.clone()
        x = x.contiguous()
        out = torch.empty_like(x) if receives else torch.zeros_like(x)
        # A receive that is posted late doubles the time of an exchange on gloo.
        works = [dist.P2POp(dist.irecv, out, group=self.group, group_peer=r) for r in receives]
        works += [dist.P2POp(dist.isend, x, group=self.group, group_peer=r) for r in sends]
        for work in dist.batch_isend_irecv(works) if works else []:
            work.wait()
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """The value of rank `source`."""
        y = x.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(y, group=self.group, group_src=source)
        return y


@dataclass(frozen=True)
class TracedWire:
    """`Wire` in functional collectives, for torch.compile; knows its group by name."""

    group: str
    size: int

    def reduce(self, x: Tensor, op: str) -> Tensor:
        """As in `Wire`."""
        return _wait(_functional().all_reduce(x.contiguous(), op, self.group))

    def gather(self, x: Tensor) -> Tensor:
        """As in `Wire`."""
        row = x.contiguous().unsqueeze(0)
        return _wait(_functional().all_gather_into_tensor(row, self.size, self.group))

    def sum_scatter(self, parts: Tensor) -> Tensor:
        """As in `Wire`."""
        whole = parts.contiguous()
        row = _functional().reduce_scatter_tensor(whole, "sum", self.size, self.group)
        return _wait(row)[0]

    def exchange(self, parts: Tensor) -> Tensor:
        """As in `Wire`."""
        ones = [1] * self.size
        parts = parts.contiguous()
        return _wait(_functional().all_to_all_single(parts, ones, ones, self.group))

    def permute(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """As in `Wire`."""
        # As torch.distributed._functional_collectives.permute_tensor does it.
        to = [int(rank in sends) for rank in range(self.size)]
        of = [int(rank in receives) for rank in range(self.size)]
        row = x.contiguous().unsqueeze(0)
        # Rows that are sent, one or none; every rank takes part in the exchange.
        out = _wait(_functional().all_to_all_single(row[: len(sends)], of, to, self.group))
        return out[0] if receives else torch.zeros_like(x)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """As in `Wire`."""
        return _wait(_functional().broadcast(x.contiguous(), source, self.group))


def _functional() -> Any:
    return torch.ops._c10d_functional


def _wait(x: Tensor) -> Tensor:
    done: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return done
