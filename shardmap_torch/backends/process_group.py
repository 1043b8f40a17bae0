"""Backend of process-group meshes: this process is one rank, over torch.distributed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

from shardmap_torch.backends import reference
from shardmap_torch.backends.communicator import GlooWire, TracedGlooWire, TracedWire, Wire
from shardmap_torch.backends.rank import LOCAL_MOVEMENTS, LocalMovement, RankBackend, on_one_rank
from shardmap_torch.backends.reference import combined, fill, gather, scatter, with_rest
from shardmap_torch.backends.traffic import TALLIES, pass_door
from shardmap_torch.collectives.operations import Collective, Extremum, Planned
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.control.board import RankGroup
from shardmap_torch.control.start import current
from shardmap_torch.control.waiting import StuckError
from shardmap_torch.core.caching import Memo, constant, lazy, memo
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.core.storage import SENT, of_parts, parts_of, unviewed
from shardmap_torch.core.torch_private.engine import current_graph_task_id, is_profiling
from shardmap_torch.mesh import Mesh

T = TypeVar("T")

_FEW: Final = 2**15
"""Bytes up to which all ranks' values are combined by each rank: one message in place of two."""

_PLANS: Final = 1024
"""Collectives that a backend remembers at a time."""


@dataclass(frozen=True)
class Line:
    """The ranks along some axes, the first axis major, as one of them communicates with them.

    Attributes:
        wire: the communicator of their group, which numbers them in mesh order.
        order: the group rank at each position along the axes.
        own: this rank's position.
        rank_group: the ranks themselves, by their global numbers.
    """

    wire: Wire | TracedWire
    order: tuple[int, ...]
    own: int
    rank_group: RankGroup

    @lazy
    def in_order(self) -> bool:
        """Returns whether the group rank at each position is the position itself."""
        return self.order == tuple(range(len(self.order)))

    def from_group(self, stacked: Tensor) -> Tensor:
        """Reorders rows from group ranks to positions."""
        return _pick(stacked, self.order)

    def to_group(self, stacked: Tensor) -> Tensor:
        """Reorders rows from positions to group ranks."""
        return _pick(stacked, [self.order.index(rank) for rank in range(len(self.order))])


def _pick(stacked: Tensor, rows: Sequence[int]) -> Tensor:
    if list(rows) == list(range(len(rows))):
        return stacked
    return stacked[list(rows)]


class ProcessGroupBackend(RankBackend):
    """This process as one rank of a mesh."""

    bundles = True  # see `sends_bundles`

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh, mesh.rank)
        self.readings = Memo[Any]()
        self._plans: dict[int, Planned] = {}
        self._lines: dict[tuple[str, ...], Line] = {}
        self._backward: tuple[int, Site | None] = -1, None
        self._compares_all = mesh.debug == "collectives"

    def plan(self, collective: Collective) -> Planned | None:
        """Returns the plan of a collective; None where code is compiled, or dtypes are cast."""
        if torch.compiler.is_compiling():
            return None
        known = self._plans.get(id(collective))  # which a plan keeps, or its id would be another's
        if known is None and collective.keeps_dtype and not collective.movement.ragged:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            known = self._plans[id(collective)] = self._make_plan(collective)
        return known

    def _make_plan(self, c: Collective) -> Planned:
        alone = super().plan(c)
        if alone is not None:
            return alone
        index, num_ranks = self.position(c.axes)
        local = LOCAL_MOVEMENTS.get(c.move)
        if local is not None:
            return Planned(self, c, partial(_move_here, local, index, num_ranks, c))
        if num_ranks == 1:
            return Planned(self, c, partial(_copy, c))
        return Planned(
            self, c, partial(_send, self.line(c.axes), partial(_eager, _on_wire(c.move)), c)
        )

    def communicate(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        """Runs the move on the group of the collective's axes.

        Raises:
            CommunicationError: torch.distributed failed, as when a peer is gone.
            CollectiveMismatchError: the ranks run different collectives.
        """
        if not collective.axes:
            return on_one_rank(move, collective, x)
        line = self.line(collective.axes)
        if len(line.order) == 1:
            return on_one_rank(move, collective, x)
        on_wire = _on_wire(move)
        if not isinstance(line.wire, TracedWire):
            told = collective if move == collective.move else _extremum(move, collective)
            return _send(line, partial(_eager, on_wire), told, self, x)
        return _of_any_dtype(on_wire, line, collective, x)

    def start_gather(self, collective: Collective, x: Tensor) -> Callable[[], Tensor] | None:
        """Starts a gather of equal shards; returns what waits for it, None where it must not.

        Raises:
            CommunicationError: torch.distributed failed, as when a peer is gone.
            CollectiveMismatchError: the ranks run different collectives.
        """
        return self._start("gather", collective, x)

    def start(self, move: str, collective: Collective, x: Tensor) -> Callable[[], Tensor]:
        """Starts a movement; returns what waits for its result. Does it now where it must.

        The operand must not be written before the wait.

        Raises:
            CommunicationError: torch.distributed failed, as when a peer is gone.
            CollectiveMismatchError: the ranks run different collectives.
        """
        finish = self._start(move, collective, x)
        if finish is None:
            y = self.communicate(move, collective, x)
            return lambda: y
        return finish

    def _start(self, move: str, c: Collective, x: Tensor) -> Callable[[], Tensor] | None:
        begin, line = STARTS.get(move), self.line(c.axes)
        if begin is None or len(line.order) == 1 or isinstance(line.wire, TracedWire):
            return None
        is_raw = x.dtype in SENT and not x.is_neg() and x.numel() > 0
        if not is_raw or c.sizes is not None or not line.in_order:
            return None
        if move == "sum" and x.dtype not in line.wire.reduces[move]:
            if not _are_combined_here(line, x):
                return None
            begin = _start_combining
        finish = _send(line, lambda line, c, x: begin(line.wire, c, x), c, self, x)
        return partial(self._finish, line, c, finish)

    def _finish(self, line: Line, collective: Collective, finish: Callable[[], Tensor]) -> Tensor:
        control = current()
        if control is None:
            return unviewed(finish())
        control.resume(line.rank_group)
        try:
            return unviewed(finish())
        except (RuntimeError, StuckError) as error:
            control.fail(f"{collective} on the {self.mesh}", error)

    def site(self) -> Site | None:
        """Returns the user's line of this collective, or of the call of the backward."""
        task = current_graph_task_id()
        if task == -1:
            scope = current_scope()
            site: Site | None = getattr(scope.monitor, "site", None) if scope is not None else None
            return call_site() if site is None else site
        if task != self._backward[0]:  # one line for all collectives of a backward
            self._backward = task, call_site()
        return self._backward[1]

    def line(self, axes: tuple[str, ...]) -> Line:
        """Returns the ranks along `axes`, for eager or for compiled code."""
        if torch.compiler.is_compiling():
            is_gloo, name, order, own = _constants(self, axes)
            kind = TracedGlooWire if is_gloo else TracedWire
            # Made here: Dynamo cannot trace an object of a default that the backward comes upon.
            return Line(kind(name, len(order), order[own]), order, own, RankGroup())
        known = self._lines.get(axes)
        if known is None:
            known = self._lines[axes] = self._make_line(axes)
        return known

    def _make_line(self, axes: tuple[str, ...]) -> Line:
        ranks = self.mesh.processes_of(self.mesh.peers(axes, self.place))
        in_group = sorted(ranks)
        order = tuple(in_group.index(rank) for rank in ranks)
        own = self.mesh.index(axes, self.place)
        group = self.mesh.group(axes)
        kind = GlooWire if _is_gloo(group) else Wire
        wire = kind(group, len(order), order[own])
        name = f"{','.join(axes)} from rank {in_group[0]} of {len(in_group)}"
        return Line(wire, order, own, RankGroup(name, tuple(in_group)))


@constant
def _constants(
    backend: ProcessGroupBackend, axes: tuple[str, ...]
) -> tuple[bool, str, tuple[int, ...], int]:
    line, group = backend._make_line(axes), backend.mesh.group(axes)
    return _is_gloo(group), group.group_name, line.order, line.own


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return bool(dist.get_backend(group) == "gloo")


def _move_here(
    local: LocalMovement, index: int, num_ranks: int, c: Collective, _: object, x: Tensor
) -> Tensor:
    return local(c, x, index, num_ranks)


def _copy(c: Collective, _: object, x: Tensor) -> Tensor:
    return on_one_rank(c.move, c, x)


OnWire: TypeAlias = Callable[[Line, Collective, Tensor], Tensor]
"""Does one movement with the other ranks of a line."""

_extremum: Final = memo(Extremum)


def _send(line: Line, act: Callable[..., T], c: Any, backend: ProcessGroupBackend, x: Tensor) -> T:
    """Begins a collective in eager code: counts its bytes, and compares what the ranks are at."""
    if TALLIES:  # as `pass_door`, whose call each collective would pay
        pass_door(getattr(c, "total", c), x.nbytes, len(line.order))
    if is_profiling():
        act = partial(_recorded, act, backend.site())
    control = current()
    if control is None:
        return act(line, c, x)
    control.begin(c, x, backend.site(), line.rank_group, backend._compares_all)
    try:
        return act(line, c, x)
    except (RuntimeError, StuckError) as error:
        control.fail(f"{c} on the {backend.mesh}", error)


def _recorded(act: Callable[..., T], site: Site | None, line: Line, c: Collective, x: Tensor) -> T:
    """Runs a collective as an event of torch's profiler, by its name and the user's line."""
    with profiler.record_function(f"{c} at {site.place}" if site is not None else str(c)):
        return act(line, c, x)


def _eager(move: OnWire, line: Line, c: Collective, x: Tensor) -> Tensor:
    """Does a movement, whose result is no view, as by `unviewed`."""
    if x.is_neg():  # its memory has the other sign
        x = x.resolve_neg()
    y = move(line, c, x) if x.dtype in SENT else _of_any_dtype(move, line, c, x)
    return y.data if y._is_view() else y


def _of_any_dtype(move: OnWire, line: Line, c: Collective, x: Tensor) -> Tensor:
    """Does a movement; where it adds nothing, bits arrive as they were."""
    if x.dtype in SENT or c.movement.adds or c.movement.extremum:  # which know all dtypes
        return move(line, c, x)
    return of_parts(move(line, c, parts_of(x)), x.dtype)


def _on_wire(move: str) -> OnWire:
    """Returns what does a movement; one without a function here is done to all ranks' operands."""
    return WIRE.get(move) or partial(_gathered, move)


def _gathered(move: str, line: Line, c: Collective, x: Tensor) -> Tensor:
    every = line.from_group(line.wire.gather(x))
    result = reference.REFERENCE[move](c, reference.Stack(every, True, len(line.order)))
    return result.every()[line.own].clone()


def _reduce(op: str, line: Line, c: Collective, x: Tensor) -> Tensor:
    """Combines the ranks' values, by the group itself where it does so as simulated ranks do.

    It does not where it would round at each hop, or lose a NaN, or lacks the dtype: see
    `Wire.reduces`. There the ranks combine the parts that they have exchanged, in their order and
    with one rounding, and gather the results, which sends as much as a ring does.
    """
    if x.dtype in line.wire.reduces[op]:
        return line.wire.reduce(x, op)
    if x.is_complex():
        return of_parts(_reduce(op, line, c, parts_of(x)), x.dtype)
    if _are_combined_here(line, x):
        return combined(op, c, _every(line, x))
    num_ranks = len(line.order)
    length = -(-x.numel() // num_ranks)
    rows = fill(x.reshape(-1), 0, num_ranks * length).unflatten(0, (num_ranks, length))
    own = combined(op, c, _swapped(line, rows))
    return _every(line, own).flatten()[: x.numel()].view(x.shape)


def _are_combined_here(line: Line, x: Tensor) -> bool:
    return len(line.order) == 2 or x.nbytes <= _FEW


def _every(line: Line, x: Tensor) -> Tensor:
    """Stacks the values of all ranks."""
    if x.dtype not in SENT:
        return of_parts(_every(line, parts_of(x)), x.dtype)
    return line.from_group(line.wire.gather(x))


def _swapped(line: Line, rows: Tensor) -> Tensor:
    """Sends row r to rank r, and stacks the rows that arrive."""
    if rows.dtype not in SENT:
        return of_parts(_swapped(line, parts_of(rows)), rows.dtype)
    return line.from_group(line.wire.exchange(line.to_group(rows)))


def _is_plain(line: Line, c: Collective, x: Tensor) -> bool:
    return c.tiled and c.sizes is None and line.in_order and x.numel() > 0


def _gather(line: Line, c: Collective, x: Tensor) -> Tensor:
    if _is_plain(line, c, x):
        return line.wire.gather_along(x, c.dim)
    return gather(line.from_group(line.wire.gather(x)), c.dim, c.tiled, c.sizes)


def _sum_scatter(line: Line, c: Collective, x: Tensor) -> Tensor:
    if x.is_complex():
        return of_parts(_sum_scatter(line, c, parts_of(x)), x.dtype)
    if x.dtype in SENT and _is_plain(line, c, x):
        return line.wire.sum_scatter_along(x, c.dim)
    parts = scatter(x, c.dim, c.tiled, c.sizes, len(line.order))
    if x.dtype in line.wire.reduces["sum"]:
        return line.wire.sum_scatter(line.to_group(parts))
    return combined("sum", c, _swapped(line, parts))


def _exchange(line: Line, c: Collective, x: Tensor) -> Tensor:
    parts = scatter(x, c.dim, c.tiled, c.sizes, len(line.order))
    return gather(_swapped(line, parts), c.concat_dim, c.tiled, c.concat_sizes)


def _ragged(line: Line, c: Collective, x: Tensor) -> Tensor:
    send = with_rest(c)[line.own]
    receive = [counts[line.own] for counts in c.counts]
    if line.in_order:
        rows = line.wire.exchange_rows(x.narrow(0, 0, sum(send[:-1])), send[:-1], receive)
        return fill(rows, 0, c.lengths[1])
    positions = [line.order.index(rank) for rank in range(len(line.order))]
    blocks = x.split(send)
    rows = line.wire.exchange_rows(
        torch.cat([blocks[at] for at in positions]),
        [send[at] for at in positions],
        [receive[at] for at in positions],
    )
    received = rows.split([receive[at] for at in positions])
    return fill(torch.cat([received[rank] for rank in line.order]), 0, c.lengths[1])


def _permute(line: Line, c: Collective, x: Tensor) -> Tensor:
    pairs = [(line.order[source], line.order[target]) for source, target in c.perm]
    return line.wire.permute(x, pairs)


def _broadcast(line: Line, c: Collective, x: Tensor) -> Tensor:
    return line.wire.broadcast(x, line.order[c.source])


def _sum_mask(line: Line, c: Collective, x: Tensor) -> Tensor:
    return LOCAL_MOVEMENTS["mask"](c, _reduce("sum", line, c, x), line.own, len(line.order))


Start: TypeAlias = Callable[[Wire, Collective, Tensor], Callable[[], Tensor]]
"""Starts a movement, and returns what waits for its result."""


def _start_gather(wire: Wire, c: Collective, x: Tensor) -> Callable[[], Tensor]:
    finish = wire.start_gather(x)
    return lambda: gather(finish(), c.dim, c.tiled, None)


def _start_combining(wire: Wire, c: Collective, x: Tensor) -> Callable[[], Tensor]:
    finish = wire.start_gather(x)
    return lambda: combined("sum", c, finish())


def _start_sum_scatter(wire: Wire, c: Collective, x: Tensor) -> Callable[[], Tensor]:
    if c.tiled:
        return wire.start_sum_scatter(x, c.dim)
    finish = wire.start_sum_scatter(scatter(x, c.dim, c.tiled, None, wire.size), 0)
    return lambda: finish()[0]


WIRE: Final[Mapping[str, OnWire]] = {
    **{op: partial(_reduce, op) for op in ("sum", "max", "min")},
    "gather": _gather,
    "exchange": _exchange,
    "ragged": _ragged,
    "permute": _permute,
    "broadcast": _broadcast,
    "sum_scatter": _sum_scatter,
    "sum_mask": _sum_mask,
}
"""Functions of movements on the communicator of a line."""

STARTS: Final[Mapping[str, Start]] = {
    "sum": lambda wire, c, x: wire.start_reduce(x, "sum"),
    "gather": _start_gather,
    "sum_scatter": _start_sum_scatter,
}
"""Starts of the movements that may be under way while others are done."""
