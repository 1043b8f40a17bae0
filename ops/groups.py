"""Groups of ranks for code that calls `torch.distributed` itself."""

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.collectives.protocol import is_checker
from shardmap_torch.collectives.scope import Scope, current_scope, enter_scope, scope_of
from shardmap_torch.core.ambient import SCOPES
from shardmap_torch.core.functorch import can_receive_gradient
from shardmap_torch.core.source_location import call_site
from shardmap_torch.errors import CollectiveError, ShardMapError, ShardTypeError
from shardmap_torch.mesh import Mesh
from shardmap_torch.ops.arguments import X, read_axes
from shardmap_torch.ops.gather import all_gather, all_to_all, broadcast
from shardmap_torch.ops.reduce import all_reduce, reduce_scatter
from shardmap_torch.ops.transfers import transfers_of
from shardmap_torch.types import AxisType, I, R

_OPS: Final[Mapping[str, str]] = MappingProxyType(
    {"SUM": "sum", "AVG": "mean", "MAX": "max", "MIN": "min"}
)


class Arriving(dist.Work):
    """Work as `async_op=True` returns it: what is written arrives when it is waited for.

    Whoever reads it earlier gets what was there before, and a check refuses it. On processes it
    may be either.
    """

    def __init__(self, arrive: Callable[[], object]) -> None:
        super().__init__()
        self._arrivals = [arrive]

    def wait(self, timeout: object = None) -> bool:
        """Writes what has come."""
        while self._arrivals:
            self._arrivals.pop()()
        return True

    def is_completed(self) -> bool:
        """Writes it too, and returns True."""
        return self.wait()


_ProcessGroup: Any = dist.ProcessGroup  # it types its methods by more overloads than torch calls


def _refusing(name: str) -> Any:
    """Makes a method, or a row of `_CALLS`, of what no type describes: it refuses its call."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ShardTypeError(
            f"{name} of torch.distributed is called in the body, and no type describes it.\n"
            f"  at {call_site()}\nFix: use {REFUSED[name]}, which all ranks call alike."
        )

    return refuse


REFUSED: Final[Mapping[str, str]] = {
    "reduce": "shardmap_torch.all_reduce",
    "gather": "shardmap_torch.all_gather",
    "scatter": "shardmap_torch.broadcast, and convert(x, axis, src=R, dst=V, dim=0)",
    "allgather_coalesced": "shardmap_torch.all_gather of a list",
}
"""Methods of groups that no type describes, with what to use."""


class AxisGroup(_ProcessGroup):  # type: ignore[misc]
    """The process group of mesh axes where ranks are no processes; see `ops.asking.axis_group`.

    `torch.distributed` calls these methods, as it calls those of a ProcessGroup, and each calls the
    typed collective.

    Attributes:
        mesh: whose axes they are.
        axes: the axes, in mesh order.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        """Takes the axes, in mesh order."""
        super().__init__(0, 1)
        self.mesh, self.axes = mesh, axes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AxisGroup) and (self.mesh, self.axes) == (other.mesh, other.axes)

    def __hash__(self) -> int:
        return hash((self.mesh, self.axes))

    def __repr__(self) -> str:
        return f"AxisGroup({self.mesh!r}, {self.axes!r})"

    @property
    def group_name(self) -> str:
        """Its name, by which functional collectives find it."""
        return ",".join(self.axes)

    def size(self) -> int:
        """Returns the number of ranks; in a body, of the mesh on which it runs."""
        scope = asked_scope()
        return self.mesh.num_ranks(self.axes) if scope is None else size_along(scope, self.axes)

    def rank(self) -> int:
        """Returns this rank's position, where each rank runs the body by itself.

        A check follows the number: it differs by rank, and so does what the body makes of it.

        Raises:
            CollectiveError: all ranks run as one program, as on a batched mesh.
        """
        scope = asked_scope()
        return 0 if scope is None else asked_rank(scope, self.axes)

    def position(self, rank: int) -> int:
        """Returns the position of one of all ranks, which belongs to the group."""
        rest = [axis for axis in self.mesh.axis_names if axis not in self.axes]
        if self.mesh.device_mesh is None and self.mesh.num_ranks(rest) == 1:
            return self.mesh.index(self.axes, self.mesh.coordinates(rank))
        return dist.get_group_rank(self, rank)

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> Arriving:
        """Sums a tensor over the ranks, in place."""
        x = _only(tensors)
        return self._write("all_reduce", [x], [], lambda: [self.reduced(x, options)])

    def allreduce_coalesced(self, tensors: Sequence[Tensor], options: Any) -> Arriving:
        """Sums several tensors over the ranks, in place."""
        xs = [*tensors]
        return self._write("all_reduce", xs, [], lambda: [self.reduced(x, options) for x in xs])

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Arriving:
        """Gives all ranks the value of one, in place."""
        x = _only(tensors)

        def move() -> Sequence[Tensor]:
            return [broadcast(x, self.axes, options.rootRank, dst=I)]

        return self._write("broadcast", [x], [], move)

    def all_gather_single(self, output: Tensor, x: Tensor, options: Any = None) -> Arriving:
        """Writes the values of all ranks, one after the other along dim 0, into `output`."""
        tiled = output.ndim == x.ndim
        return self._write("all_gather", [output], [x], lambda: [self.gathered(x, tiled)])

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], options: Any = None
    ) -> Arriving:
        """Writes the value of each rank into a tensor of a list."""
        listed, x = _only(outputs), _only(tensors)
        return self._write("all_gather", listed, [x], lambda: self.gathered(x, False).unbind(0))

    def reduce_scatter_single(self, output: Tensor, x: Tensor, options: Any) -> Arriving:
        """Writes this rank's shard along dim 0 of the sum into `output`."""
        tiled = output.ndim == x.ndim
        return self._write(
            "reduce_scatter", [output], [x], lambda: [self.scattered(x, options, tiled)]
        )

    def reduce_scatter(
        self, outputs: Sequence[Tensor], tensors: Sequence[Sequence[Tensor]], options: Any
    ) -> Arriving:
        """Writes this rank's tensor of the sums of those of a list."""
        listed = _only(tensors)

        def move() -> Sequence[Tensor]:
            return [self.scattered(torch.stack([*listed]), options, False)]

        return self._write("reduce_scatter", outputs, listed, move)

    def all_to_all_single(
        self, output: Tensor, x: Tensor, received: Any, sent: Any, options: Any = None
    ) -> Arriving:
        """Sends shard i along dim 0 to rank i, and writes those that arrive into `output`."""
        return self._write("all_to_all", [output], [x], lambda: [self.exchanged(x, received, sent)])

    def alltoall(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], options: Any = None
    ) -> Arriving:
        """Sends tensor i of a list to rank i, and writes those that arrive into another."""
        return self._write(
            "all_to_all", outputs, tensors, lambda: self.swapped(torch.stack([*tensors])).unbind(0)
        )

    def barrier(self, *options: Any, **others: Any) -> Arriving:
        """Does nothing: ranks wait for one another where values move."""
        return Arriving(lambda: None)

    def send(self, tensors: Sequence[Tensor], peer: Any, tag: int = 0) -> Arriving:
        """Sends a tensor to one rank; until it has been waited for, nothing may write into it."""
        x = _only(tensors)
        with self._entered("send", tensors) as scope:
            transfers_of(scope.backend).send(self.axes, peer, tag, x)
        return Arriving(partial(_end, begun(scope, [], tensors)))

    def recv(self, tensors: Sequence[Tensor], peer: Any, tag: int = 0) -> Arriving:
        """Writes what one rank has sent into a tensor."""
        x = _only(tensors)
        with self._entered("recv", tensors) as scope:
            receive = transfers_of(scope.backend).receive(self.axes, peer, tag, x)
        arriving = begun(scope, tensors, [])

        def arrive() -> None:
            with self._entered("recv", []):
                found = receive()
            with arriving(), torch.no_grad():
                x.copy_(found)

        return Arriving(arrive)

    def _get_backend(self, device: Any) -> None:
        """Has none that joins messages: torch 2.14 asks that before it sends a batch of them."""

    # The names of methods that torch calls differ between releases.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    reduce, gather, scatter, allgather_coalesced = map(_refusing, REFUSED)

    def reduced(self, x: Tensor, options: Any, dst: AxisType = I) -> Tensor:
        """Sums over the ranks; pending sums become invariant, or R."""
        total = all_reduce(x, self.axes, dst=dst, op=_read_op("all_reduce", options))
        return total.to(x.dtype)  # a sum of booleans is whether one of them is true

    def gathered(self, x: Tensor, tiled: bool = True, dst: AxisType = I) -> Tensor:
        """Gathers along dim 0; varying values become invariant, or R."""
        return all_gather(x, self.axes, dim=0, dst=dst, tiled=tiled and x.ndim > 0)

    def scattered(self, x: Tensor, options: Any, tiled: bool = True) -> Tensor:
        """Sums over the ranks, and leaves each its shard along dim 0."""
        op = _read_op("reduce_scatter", options)
        return reduce_scatter(x, self.axes, dim=0, op=op, tiled=tiled).to(x.dtype)

    def exchanged(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """Exchanges shards along dim 0, all of one size."""
        share = x.shape[0] // (len(sent) or len(received) or 1)
        if any(size != share for size in (*received, *sent)):
            raise CollectiveError(
                "all_to_all_single of torch.distributed is called in the body with split sizes "
                f"{[*received]} and {[*sent]}, and only equal shares of all rows, {share} each, "
                "are typed. Use shardmap_torch.ragged_all_to_all."
            )
        return self.swapped(x)

    def swapped(self, x: Tensor) -> Tensor:
        """Sends shard i along dim 0 to rank i, and joins those that arrive."""
        return all_to_all(x, self.axes, split_dim=0, concat_dim=0)

    @contextmanager
    def _entered(self, name: str, tensors: Sequence[Tensor]) -> Iterator[Scope]:
        """Yields the scope of a call that autograd does not see."""
        with in_backward(), _unmonitored():
            _, scope = read_axes(name, self.axes)
            if is_checker(scope.backend):
                scope.backend.needs_ranks()  # torch.func.vmap writes into what it batches alone
            if any(map(can_receive_gradient, tensors)):
                raise unseen_by_autograd(name)
            yield scope

    def _write(
        self,
        name: str,
        outputs: Sequence[Tensor],
        operands: Sequence[Tensor],
        move: Callable[[], Sequence[Tensor]],
    ) -> Arriving:
        """Moves values, and writes them into the outputs when they are waited for."""
        with self._entered(name, [*outputs, *operands]) as scope:
            results = move()
        shapes = [[list(x.shape) for x in tensors] for tensors in (results, outputs)]
        if shapes[0] != shapes[1]:
            gives, has = (each[0] if len(each) == 1 else each for each in shapes)
            raise CollectiveError(
                f"{name} of torch.distributed gives {gives} over {self.axes}, and its output has "
                f"{has}."
            )
        arriving = begun(scope, outputs, operands)

        def arrive() -> None:
            with arriving(), torch.no_grad():
                for output, result in zip(outputs, results, strict=True):
                    _copy(name, output, result)

        return Arriving(arrive)


def _unmonitored() -> AbstractContextManager[None]:
    """Returns a context whose calls are no steps that runs are compared by.

    A group of one rank may take none of them, where several call.
    """
    scope = current_scope()
    return nullcontext() if scope is None else enter_scope(Scope(scope.backend, scope.axes))


def _only(given: Sequence[X]) -> X:
    """Returns what a list has, for torch's own groups take one alone."""
    if len(given) != 1:
        raise CollectiveError(f"A group takes lists of one tensor, not of {len(given)}.")
    return given[0]


def _copy(name: str, output: Tensor, result: Tensor) -> None:
    """Writes a result; vmap cannot write rows of its own into what has none."""
    try:
        output.copy_(result)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        raise CollectiveError(
            f"{name} of torch.distributed writes into a tensor that is not batched, under vmap. "
            f"Use shardmap_torch.{name}, which returns its result."
        ) from error


def _end(arriving: Callable[[], AbstractContextManager[None]]) -> None:
    with arriving():
        pass


def asked_scope() -> Scope | None:
    """Returns the scope of the body that runs, or whose backward runs, as torch's groups know it.

    Only calls of torch.distributed do: our own fail on processes in the backward of a plain
    Function. A check has that applied as one of ours, which refuses to be differentiated again.
    """
    scope: Scope | None = current_scope() or SCOPES.backward
    if scope is not None and current_scope() is None and is_checker(scope.backend):
        scope.backend.reject_lost("its group")
        return scope_of("its group", ())  # raises: then it is applied as a Function of ours
    return scope


def asked_rank(scope: Scope, axes: tuple[str, ...]) -> Any:
    """Returns the position of the rank whose body asks; an error where all run as one program."""
    rank, mesh = scope.backend.rank_along(axes), scope.backend.mesh
    # torch asks for its log where a call has failed: that error is the one to see.
    is_logged = isinstance(sys.exc_info()[1], ShardMapError)
    if rank is None and mesh.num_ranks(axes) > 1 and not is_logged:
        raise CollectiveError(
            "The body asks for its rank, a number, and here all ranks run it as one program. Use "
            "axis_index(axis), a tensor that varies, or let a spec or convert(x, axis, src=R, "
            "dst=V, dim=0) take this rank's part."
        )
    return 0 if rank is None else rank


def in_backward() -> AbstractContextManager[None]:
    """Returns a context with the scope of the body whose backward runs."""
    scope = asked_scope()
    return nullcontext() if scope is None or scope is current_scope() else enter_scope(scope)


def _of_two(operation: Callable[[Any, Any], bool]) -> Any:
    return lambda self, other: operation(2, other)


class _OneRank(int):
    """The size of an axis of one rank in a check: one, which is ordered as two and equals none.

    So a body is typed that returns early for one rank. What it does then no types can judge, and
    needs none: nothing is shared.
    """

    __lt__, __le__ = _of_two(operator.lt), _of_two(operator.le)
    __gt__, __ge__ = _of_two(operator.gt), _of_two(operator.ge)
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:  # torch takes a dim of two for one of the group's size
        return type(other) is _OneRank

    def __ne__(self, other: object) -> bool:
        return type(other) is not _OneRank


def size_along(scope: Scope, axes: tuple[str, ...]) -> int:
    """Returns the number of ranks of a group that a body asks for."""
    size = scope.backend.mesh.num_ranks(axes)
    if not is_checker(scope.backend):
        return size
    scope.backend.note_asked(axes)
    # On the resized mesh of one device early returns are what is compared.
    is_one_device = scope.backend.mesh.full is not None and scope.backend.mesh.kind == "abstract"
    return _OneRank(1) if size == 1 and not is_one_device else size


def begun(
    scope: Scope, written: Sequence[Tensor], read: Sequence[Tensor]
) -> Callable[[], AbstractContextManager[None]]:
    """Tells a checker that a call has begun; returns a context in which its results arrive."""
    return scope.backend.begin_call(written, read) if is_checker(scope.backend) else nullcontext


Typed: TypeAlias = tuple[Any, Sequence[Tensor], Callable[[AxisGroup, AxisType], Any]]
"""The group of a call, its operands, and what calls the typed collective on a group.

Where all ranks get one value it is of the type that is passed.
"""


def _listed(called: Callable[..., Typed]) -> Callable[..., Typed]:
    """Makes the row of a call on a list of tensors from that on one."""

    def row(xs: Sequence[Tensor], *rest: Any) -> Typed:
        moves = [called(x, *rest)[2] for x in xs]
        return rest[-1], xs, lambda group, dst: [move(group, dst) for move in moves]

    return row


def _reduce(x: Tensor, op: Any, group: Any) -> Typed:
    return group, [x], lambda group, dst: group.reduced(x, op, dst)


def _gather(x: Tensor, size: int, group: Any) -> Typed:
    return group, [x], lambda group, dst: group.gathered(x, True, dst)


def _scatter(x: Tensor, op: Any, size: int, group: Any) -> Typed:
    return group, [x], lambda group, dst: group.scattered(x, op)


def _exchange(x: Tensor, received: Any, sent: Any, group: Any) -> Typed:
    return group, [x], lambda group, dst: group.exchanged(x, received or [], sent or [])


def _broadcast(x: Tensor, source: int, group: Any) -> Typed:
    return group, [x], lambda group, dst: broadcast(x, group.axes, source, dst=dst)


_CALLS: Final[Mapping[str, Callable[..., Typed]]] = {
    "all_reduce": _reduce,
    "all_gather_into_tensor": _gather,
    "reduce_scatter_tensor": _scatter,
    "all_to_all_single": _exchange,
    "broadcast": _broadcast,
    "all_reduce_coalesced": _listed(_reduce),
    "all_gather_into_tensor_coalesced": _listed(_gather),
    "reduce_scatter_tensor_coalesced": _listed(_scatter),
    "_AllReduce": lambda op, group, x: _reduce(x, op, group),
    "_AllGather": lambda group, x: (
        *(group, [x]),
        lambda group, dst: group.gathered(x, False, dst).unbind(0),
    ),
    "_AllGatherBase": lambda out, x, group: (
        *(group, [x]),
        lambda group, dst: group.gathered(x, out.ndim == x.ndim, dst),
    ),
    "_Reduce_Scatter": lambda op, group, out, *xs: (
        *(group, xs),
        lambda group, dst: group.scattered(torch.stack(xs), op, False),
    ),
    "_AlltoAll": lambda group, out, *xs: (
        *(group, xs),
        lambda group, dst: group.swapped(torch.stack(xs)).unbind(0),
    ),
    "_AlltoAllSingle": lambda group, out, received, sent, x: _exchange(x, received, sent, group),
    "_Broadcast": lambda source, group, x: (
        *(group, [x]),
        lambda group, dst: broadcast(x, group.axes, group.position(source), dst=dst),
    ),
    "_Reduce": _refusing("reduce"),
    "_Gather": _refusing("gather"),
    "_Scatter": _refusing("scatter"),
}
"""Functional collectives, and Functions of `torch.distributed.nn.functional`, as they are typed."""


def _is_untraced(name: str, args: tuple[Any, ...]) -> bool:
    """Returns whether torch.compile, which takes torch's own derivative, finds none.

    It leaves Functions to run uncompiled.
    """
    return name == "broadcast" or not {"avg", "max", "min"}.isdisjoint(
        [each for each in args if isinstance(each, str)]
    )


_OUTPUTS: Final = {"_AllGatherBase": 0, "_Reduce_Scatter": 2, "_AlltoAll": 1, "_AlltoAllSingle": 1}
"""Positions of the arguments of Functions that torch writes results into."""

_WAITS: Final = ("wait_tensor", "_wrap_tensor_autograd")
"""Operators by which functional collectives wait for what they have begun."""


def typed_call(scope: Scope, name: str, args: tuple[Any, ...]) -> Any:
    """Calls the typed collective for an operator or a Function of torch.distributed.

    NotImplemented for what is not typed, and for groups that are not those of bound axes.
    """
    is_alone = scope.backend.mesh.device_mesh is not None and not is_checker(scope.backend)
    if name in _WAITS:  # of DTensors, in bodies with automatic axes, it is torch's
        return NotImplemented if is_alone and "_arrived" not in vars(args[0]) else args[0]
    called = _CALLS.get(name)
    if called is None:
        return NotImplemented
    group, operands, move = called(*args)
    own = own_group(scope, group)
    if own is None:
        return NotImplemented
    if is_checker(scope.backend) and name in _OUTPUTS:
        written = args[_OUTPUTS[name]]  # which torch writes and returns, and the typed one does not
        scope.backend.begin_call([written] if isinstance(written, Tensor) else written, [])
    needed = any(map(can_receive_gradient, operands))
    if needed and is_checker(scope.backend) and _is_untraced(name, args):
        instead = f"shardmap_torch.{name.split('_tensor')[0]}"
        scope.backend.note_untraced(f"{name} of torch.distributed at {call_site()}; use {instead}")
    with in_backward(), _unmonitored():
        out = move(own, R if needed else I)
    for each in out if isinstance(out, list | tuple) else [out]:
        each._arrived = True
    return out


def own_group(scope: Scope, group: Any) -> AxisGroup | None:
    """Returns the group of axes that a call in a body means; None for one of no axes.

    On processes a group of axes that the body has not bound is torch's own, as DTensors use it.
    """
    mesh = scope.backend.mesh
    if isinstance(group, AxisGroup):
        return group
    if group is None and mesh.device_mesh is None and mesh.full is None:
        return AxisGroup(mesh, mesh.axis_names)
    group = dist.group.WORLD if group is None else group
    axes = group_axes(mesh, group if isinstance(group, str) else str(group.group_name))
    if axes is None or not (scope.axes.issuperset(axes) or is_checker(scope.backend)):
        return None
    return AxisGroup(mesh, axes)


def unseen_by_autograd(name: str) -> CollectiveError:
    """Returns the error for a call on tensors through which a gradient flows."""
    return CollectiveError(
        f"{name} of torch.distributed is called on a tensor that needs a gradient, and autograd "
        f"does not see the call. Use shardmap_torch.{name}, or detach it."
    )


def _read_op(name: str, options: Any) -> Any:
    op = getattr(options, "reduceOp", options)
    for known, ours in _OPS.items():
        if op == getattr(dist.ReduceOp, known) or op == known.lower():
            return ours
    raise CollectiveError(f"{name} of torch.distributed: only {', '.join(_OPS)} are typed.")


def group_axes(mesh: Mesh, name: str) -> tuple[str, ...] | None:
    """Returns the axes whose group has this name; None if no axes have it."""
    mesh = mesh.full or mesh
    if mesh.device_mesh is None:
        axes = tuple(name.split(","))
        return axes if {*axes} <= {*mesh.axis_names} else None
    known: dict[str, tuple[str, ...]]
    known = {str(mesh.group(axis).group_name): (axis,) for axis in mesh.axis_names}
    known |= {
        str(group.group_name): axes
        for (axes, purpose), group in mesh._groups.items()
        if purpose == "collectives"
    }
    world = dist.group.WORLD
    if world is not None and world.size() == mesh.device_mesh.size():
        known.setdefault(str(world.group_name), mesh.axis_names)
    return known.get(name)
