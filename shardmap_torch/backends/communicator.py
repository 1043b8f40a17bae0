"""Communicators: they alone call the collectives of torch.distributed.

In eager they are called directly; an all-reduce costs 7 us on a backend that does nothing, the
functional ops 18 and torch's Python wrappers of these 73. torch.compile needs the functional ops,
which its passes recognise and overlap with computation.

On gloo large parts go from rank to rank, and no wait outlasts the ranks it is for. Its own
all-gather and all-to-all announce what they receive behind what they send: the rank that comes last
then gets nothing before it has sent everything, 1.5 and 2 times the time of the link. Its
reduce-scatter is an all-reduce of twice the bytes, and no wait for it can be ended.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.control.start import current, peers
from shardmap_torch.control.waiting import is_done
from shardmap_torch.core.storage import is_spare
from shardmap_torch.core.torch_private.engine import c10d
from shardmap_torch.core.torch_private.world import METHODS, Aside

# Methods of the group, called as torch's functions do, whose argument checks cost as much again,
# and as torch has them: in a body those of the class call the typed collectives.
_ALL_GATHER: Final = METHODS["all_gather_single"]
_REDUCE_SCATTER: Final = METHODS["reduce_scatter_single"]
_REDUCE: Final = METHODS["allreduce"]
_EXCHANGE: Final = METHODS["alltoall_base"]
_SEND: Final = METHODS["send"]
_RECEIVE: Final = METHODS["recv"]

_OPS: Final = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _asynchronous(options: Any, op: dist.ReduceOp.RedOpType | None = None) -> Any:
    options.asyncOp = True
    if op is not None:
        options.reduceOp = op
    return options


_REDUCE_OPTIONS: Final = {
    name: _asynchronous(c10d.AllreduceOptions(), op) for name, op in _OPS.items()
}
_GATHER_OPTIONS: Final = _asynchronous(c10d.AllgatherOptions())
_SCATTER_OPTIONS: Final = _asynchronous(c10d.ReduceScatterOptions(), dist.ReduceOp.SUM)
_EXCHANGE_OPTIONS: Final = _asynchronous(c10d.AllToAllOptions())


_WHOLE_NUMBERS: Final = frozenset({torch.int64, torch.int32, torch.int8, torch.uint8})
_WIDE: Final = frozenset({torch.float64, torch.float32})
_HALVES: Final = frozenset({torch.float16, torch.bfloat16})

_EXTREMA: Final = {"max": _WHOLE_NUMBERS, "min": _WHOLE_NUMBERS}

_BY_GROUP: Final = {"sum": _WHOLE_NUMBERS | _WIDE | _HALVES, **_EXTREMA}
"""Dtypes that groups reduce as simulated ranks do; of a maximum all that has no NaN to lose.

NCCL takes the larger of a number and a NaN for the number, gloo by one comparison."""

_BY_GLOO: Final = {"sum": _WHOLE_NUMBERS | _WIDE, **_EXTREMA}
"""Those of gloo, which rounds sums of halves at each hop, in an order that the position decides."""


@dataclass(frozen=True)
class Wire:
    """Eager communicator of one rank in a process group; stacks are in the order of group ranks.

    Attributes:
        reduces: the dtypes that `reduce` is for, by operation.
        group: the process group.
        size: number of its ranks.
        rank: this rank in it.
    """

    reduces: ClassVar = _BY_GROUP

    group: dist.ProcessGroup
    size: int
    rank: int

    def reduce(self, x: Tensor, op: str) -> Tensor:
        """Combines all ranks' values."""
        return self.start_reduce(x, op)()

    def start_reduce(self, x: Tensor, op: str) -> Callable[[], Tensor]:
        """Starts `reduce`; returns what waits for its result."""
        # all_reduce works in place, and the body's tensor must not change.
        y = x if is_spare(x) else x.clone(memory_format=torch.contiguous_format)
        return partial(self._arrived, _REDUCE(self.group, [y], _REDUCE_OPTIONS[op]), y)

    def gather(self, x: Tensor) -> Tensor:
        """Stacks all ranks' values along a new leading dim."""
        return self.start_gather(x)()

    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Starts `gather`; returns what waits for its result."""
        out = x.new_empty((self.size, *x.shape))
        row = x.contiguous().unsqueeze(0)
        return partial(self._arrived, _ALL_GATHER(self.group, out, row, _GATHER_OPTIONS), out)

    def gather_along(self, x: Tensor, dim: int) -> Tensor:
        """Concatenates all ranks' values along `dim`."""
        if dim != 0:
            return torch.cat(self.gather(x).unbind(0), dim)
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._wait(_ALL_GATHER(self.group, out, x.contiguous(), _GATHER_OPTIONS))
        return out

    def sum_scatter(self, parts: Tensor) -> Tensor:
        """Sums all ranks' stacks; each rank keeps its row."""
        return self.sum_scatter_along(parts, 0)[0]

    def sum_scatter_along(self, x: Tensor, dim: int) -> Tensor:
        """Sums all ranks' values; each rank keeps its shard of `dim`."""
        return self.start_sum_scatter(x, dim)()

    def start_sum_scatter(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        """Starts `sum_scatter_along`; returns what waits for its result."""
        x = x.contiguous() if dim == 0 else torch.cat(x.split(x.shape[dim] // self.size, dim))
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        return partial(self._arrived, _REDUCE_SCATTER(self.group, out, x, _SCATTER_OPTIONS), out)

    def exchange(self, parts: Tensor) -> Tensor:
        """Sends row r to rank r; row r of the result comes from rank r."""
        return self.start_exchange(parts)()

    def start_exchange(self, parts: Tensor) -> Callable[[], Tensor]:
        """Starts `exchange`; returns what waits for its result."""
        return self._start_exchange(parts, parts.shape, [], [])

    def exchange_rows(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Sends the next `send[r]` rows to each rank r; the next `receive[r]` come from it."""
        shape = sum(receive), *x.shape[1:]
        return self._start_exchange(x, shape, list(send), list(receive))()

    def _start_exchange(
        self, x: Tensor, shape: Sequence[int], send: list[int], receive: list[int]
    ) -> Callable[[], Tensor]:
        x = x.contiguous()
        out = x.new_empty(shape)
        return partial(
            self._arrived, _EXCHANGE(self.group, out, x, receive, send, _EXCHANGE_OPTIONS), out
        )

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
        """Sends each pair's first rank's value to its second; zeros where none arrives."""
        sends = [target for source, target in pairs if source == self.rank]
        receives = [source for source, target in pairs if target == self.rank]
        if sends == receives == [self.rank]:
            return x.clone()
        x = x.contiguous()
        out = torch.empty_like(x) if receives else torch.zeros_like(x)
        works = [dist.P2POp(dist.irecv, out, group=self.group, group_peer=r) for r in receives]
        works += [dist.P2POp(dist.isend, x, group=self.group, group_peer=r) for r in sends]
        with Aside():
            begun = dist.batch_isend_irecv(works) if works else []
        for work in begun:
            work.wait()
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Returns the value of rank `source`."""
        y = x.clone(memory_format=torch.contiguous_format)
        with Aside():
            work = dist.broadcast(y, group=self.group, group_src=source, async_op=True)
        self._wait(work)
        return y

    def _arrived(self, work: dist.Work, out: Tensor) -> Tensor:
        """Waits for a collective that has been started, and returns its result."""
        self._wait(work)
        return out

    def _wait(self, work: dist.Work) -> None:
        """Waits for a collective; for NCCL's the stream waits, and not the process."""
        work.wait()


@dataclass(frozen=True)
class TracedWire:
    """`Wire` in functional collectives, for torch.compile; knows its group by name."""

    reduces: ClassVar = _BY_GROUP

    group: str
    size: int
    rank: int

    def reduce(self, x: Tensor, op: str) -> Tensor:
        return _wait(_functional().all_reduce(x.contiguous(), op, self.group))

    def gather(self, x: Tensor) -> Tensor:
        return self.gather_along(x.unsqueeze(0), 0)

    def sum_scatter(self, parts: Tensor) -> Tensor:
        return self.sum_scatter_along(parts, 0)[0]

    # The next two are written as inductor's micro-pipeline pass looks for them, which fuses them
    # with the matmul before or after: dim 0 as it is, another dim through split and cat.

    def gather_along(self, x: Tensor, dim: int) -> Tensor:
        """Concatenates all ranks' values along `dim`."""
        full = _wait(_functional().all_gather_into_tensor(x.contiguous(), self.size, self.group))
        return full if dim == 0 else torch.cat(full.split(x.shape[0]), dim)

    def sum_scatter_along(self, x: Tensor, dim: int) -> Tensor:
        """Sums all ranks' values; each rank keeps its shard of `dim`."""
        x = x if dim == 0 else torch.cat(x.split(x.shape[dim] // self.size, dim))
        return _wait(
            _functional().reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.group)
        )

    def exchange(self, parts: Tensor) -> Tensor:
        return self.exchange_rows(parts, [1] * self.size, [1] * self.size)

    def exchange_rows(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Sends the next `send[r]` rows to each rank r; the next `receive[r]` come from it."""
        own = x.contiguous()
        return _wait(_functional().all_to_all_single(own, list(receive), list(send), self.group))

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
        target_of = _completed(pairs, self.size)
        to = [int(target_of[self.rank] == rank) for rank in range(self.size)]
        of = [int(target_of[rank] == self.rank) for rank in range(self.size)]
        row = x.contiguous().unsqueeze(0)
        out = _wait(_functional().all_to_all_single(row, of, to, self.group))[0]
        if any(target == self.rank for _, target in pairs):
            return out
        # Zeros that still depend on the exchange: a partitioner may drop what nothing needs, on
        # this rank only, and the others would wait for it.
        return out.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return _wait(_functional().broadcast(x.contiguous(), source, self.group))


def _completed(pairs: Sequence[tuple[int, int]], size: int) -> dict[int, int]:
    """Pairs ranks that send nothing with free targets: some backends refuse empty messages."""
    target_of = dict(pairs)
    targets = list(target_of.values())
    idle = [rank for rank in range(size) if rank not in target_of]
    free = [rank for rank in range(size) if rank not in targets]
    return target_of | dict(zip(idle, free, strict=True))


def _functional() -> Any:
    return torch.ops._c10d_functional


def _wait(x: Tensor) -> Tensor:
    done: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return done


_TAG: Final = 7_301
"""Tag of the messages: what a program sends itself on the group has another one, as a rule."""

_LARGE: Final = 2**20
"""Bytes of a part from which it goes from rank to rank; smaller ones wait more for threads so."""


@dataclass(frozen=True)
class GlooWire(Wire):
    """`Wire` on gloo. A long wait checks if the other ranks can still arrive; see `control`.

    Attributes:
        under_way: transfers that have been started. Where an error comes before their wait, the
            other ranks still need them; gloo (torch 2.13) gives up those whose objects are gone.
    """

    reduces: ClassVar = _BY_GLOO
    under_way: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        if x.nbytes < _LARGE:
            return super().start_gather(x)
        out = x.new_empty((self.size, *x.shape))
        return self._start_swap(dict.fromkeys(range(self.size), x.contiguous()), _by_rank(out), out)

    def gather_along(self, x: Tensor, dim: int) -> Tensor:
        if x.nbytes < _LARGE:
            return super().gather_along(x, dim)
        stacked = self.gather(x)
        return stacked.flatten(0, 1) if dim == 0 else torch.cat(stacked.unbind(0), dim)

    def start_sum_scatter(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        finish = self.start_exchange(_rows(x, dim, self.size))
        return lambda: finish().sum(0, dtype=x.dtype)

    def start_exchange(self, parts: Tensor) -> Callable[[], Tensor]:
        if parts.nbytes < _LARGE * self.size:
            return super().start_exchange(parts)
        out = torch.empty_like(parts, memory_format=torch.contiguous_format)
        return self._start_swap(_by_rank(parts.contiguous()), _by_rank(out), out)

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
        sources = [source for source, target in pairs if target == self.rank]
        x = x.contiguous()
        out = torch.empty_like(x) if sources else torch.zeros_like(x)
        mine = {target: x for source, target in pairs if source == self.rank}
        return self._start_swap(mine, dict.fromkeys(sources, out), out)()

    def _start_swap(
        self, mine: Mapping[int, Tensor], theirs: Mapping[int, Tensor], out: Tensor
    ) -> Callable[[], Tensor]:
        """Sends tensors to ranks and receives others from them, parts of `out`, all contiguous.

        Exchanges may overlap, since messages between two ranks arrive in the order of their starts.
        """
        group = self.group
        others = [(self.rank + hops) % self.size for hops in range(1, self.size)]
        # A receive that is announced late comes after what this rank sends.
        works = [_RECEIVE(group, [theirs[r]], r, _TAG) for r in others if r in theirs]
        works += [_SEND(group, [mine[r]], r, _TAG) for r in others if r in mine]
        if self.rank in theirs:
            theirs[self.rank].copy_(mine[self.rank])
        self.under_way[id(works)] = works, mine, theirs

        def finish() -> Tensor:
            watch = peers()
            for work in works:
                if watch is None:
                    work.wait()
                else:
                    watch.wait(work)
            self.under_way.pop(id(works), None)
            return out

        return finish

    def _wait(self, work: dist.Work) -> None:
        control = None if is_done(work) else current()
        if control is not None:
            control.waiting.wait_on(work)
        else:
            work.wait()


@dataclass(frozen=True)
class TracedGlooWire(TracedWire):
    """`TracedWire` on gloo, without its reduce-scatter."""

    reduces: ClassVar = _BY_GLOO

    def sum_scatter_along(self, x: Tensor, dim: int) -> Tensor:
        return self.exchange(_rows(x, dim, self.size)).sum(0, dtype=x.dtype)


def _rows(x: Tensor, dim: int, size: int) -> Tensor:
    """Stacks the shards of `dim`, one for each of `size` ranks."""
    length = x.shape[dim] // size
    return x.unflatten(0, (size, length)) if dim == 0 else torch.stack(x.split(length, dim))


def _by_rank(stack: Tensor) -> dict[int, Tensor]:
    return dict(enumerate(stack.unbind(0)))
