"""`find_divergence`: the first line at which the ranks' values are no longer those of one device.

Both programs run, and their values are recorded. One of the ranks is explained if it is, along
each axis, equal to a value on one device, a shard of it, or an addend. What is not explained is
suspected until something explained is made of it; the first suspect in the result is the answer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.backends.rank import RankBackend
from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.interpreter.messages import friendly
from shardmap_torch.checker.ir.observer import made_by
from shardmap_torch.checker.rules.infer import name_arguments, tensors_of
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.ambient import silently
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.functorch import base_of, is_smooth
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.core.torch_private.engine import TorchDispatchMode
from shardmap_torch.core.tree import flatten
from shardmap_torch.errors import ShardMapError, TransformError, show
from shardmap_torch.mesh import Mesh
from shardmap_torch.run import threads
from shardmap_torch.validate.numbers import differ, tolerance_of

Key = tuple[Any, ...]
Layout = tuple[str, ...]
"""Words for the values along each axis; "" for equal ones."""

_RANKS: Final = 64
_RESULT: Final = "the result"


@dataclass(frozen=True)
class Event:
    """An operation of one run, with its values; results of a body, and arguments, are some too."""

    operation: str
    site: Site | None
    operands: tuple[Key, ...]
    results: tuple[Key, ...]
    values: tuple[Tensor, ...]
    held: tuple[Tensor, ...]

    @property
    def place(self) -> str:
        """The operation and its line."""
        return self.operation if self.site is None else f"{self.operation} at {self.site}"


@dataclass(frozen=True)
class Divergence:
    """The first line at which the values of the ranks are no longer those of one device.

    Attributes:
        operation: the operation whose value nothing on one device explains.
        site: its line in the body; None for arguments.
        operands: how each of its operands relates to one device.
        difference: how the results of the two programs differ.
    """

    operation: str
    site: Site | None
    operands: tuple[str, ...]
    difference: str

    def __str__(self) -> str:
        """Formats it in a few lines."""
        place = "in the arguments" if self.site is None else f"at {self.site}"
        lines = [f"  operand {n}: {text}" for n, text in enumerate(self.operands, 1)]
        return "\n".join(
            [
                f"The programs part {place}",
                f"  {self.operation} makes what is neither equal to a value on one device, nor a "
                "shard of one, nor an addend",
                *lines,
                f"The results differ: {self.difference}",
            ]
        )

    __repr__ = __str__


def find_divergence(
    f: Callable[..., Any], one_device: Callable[..., Any], *args: Any
) -> Divergence | None:
    """Finds the first line at which `f` computes something else than `one_device`.

    It runs both forwards with these arguments, `f` on simulated ranks of its mesh, checked or not,
    and compares every value that they make. Use random arguments at small sizes: zeros, and numbers
    that repeat, are equal to too much. What ranks compute in other steps than one device is
    accepted once it leads to one of its values.

    Args:
        f: a shard_mapped function on a mesh of at most 64 ranks, of any kind.
        one_device: the same program without collectives, in any code.
        args: global arguments of both.

    Returns:
        None if the results are equal but for rounding, else where the programs part.

    Raises:
        TransformError: `f` is not shard_mapped, has too many ranks, or they run different code.
        Exception: as `f` and `one_device` raise.

    Example:
        >>> import torch
        >>> from shardmap_torch import I, P, all_reduce, find_divergence, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> specs = P(None, "tp"), P("tp"), P()
        >>> def biased(x, w, b):
        ...     return all_reduce(x @ w + b, "tp", dst=I)
        >>> f = shard_map(biased, mesh=mesh, in_specs=specs, out_specs=P())
        >>> x, w, b = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)
        >>> found = find_divergence(f, lambda x, w, b: x @ w + b, x, w, b)
        >>> found.operation, found.operands[1]
        ('add', 'equal to argument 3')
    """
    with silently():
        mesh, events, found = _run_ranks(f, args)
        recorder = _Recorder()
        expected = _tensors(_recorded(one_device, recorder, args, {}))
    difference = _difference(found, expected)
    if difference is None:
        return None
    return _Comparison(mesh, events, recorder.events).first_suspect(difference)


class _Recorder(TorchDispatchMode):
    """Records the operations of one rank, but those by which a collective moves data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._is_paused:
            arguments = name_arguments(func, args, kwargs or {})
            operands = [x for value in arguments.values() for x in tensors_of(value)]
            self.add(friendly(func), call_site(), operands, made_by(func, arguments, out))
        return out

    def add(
        self, operation: str, site: Site | None, operands: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        """Records an operation, with copies of its values."""
        self._is_paused = True
        try:
            operands, made = [base_of(x) for x in operands], [base_of(x) for x in made]
            values = tuple(x.detach().clone() for x in made)
            keys = tuple(map(_key, operands)), tuple(map(_key, made))
            held = (*operands, *made)  # so that no other storage gets their addresses
            self.events.append(Event(operation, site, *keys, values, held))
        finally:
            self._is_paused = False

    def watch(self, backend: RankBackend) -> None:
        """Records the collectives of a rank as one operation each."""
        run = backend.run

        def recorded(move: str, collective: Collective, x: Tensor) -> Tensor:
            self._is_paused = True
            try:
                y = run(move, collective, x)
            finally:
                self._is_paused = False
            self.add(str(collective), call_site(), [x], [y])
            return y

        vars(backend)["run"] = recorded


def _key(x: Tensor) -> Key:
    storage = x.untyped_storage()._cdata if x.layout == torch.strided else id(x)
    return storage, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype


def _recorded(function: Callable[..., Any], recorder: _Recorder, args: Any, kwargs: Any) -> Any:
    """Runs a program, of which arguments and results are recorded as well."""
    tensors = (leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor))
    for number, leaf in enumerate(tensors, 1):
        recorder.add(f"argument {number}", None, [], [leaf])
    with recorder:
        out = function(*args, **kwargs)
    recorder.add(_RESULT, None, _tensors(out), [])
    return out


def _tensors(out: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(out)[0] if isinstance(leaf, Tensor)]


def _run_ranks(
    f: Callable[..., Any], args: Sequence[Any]
) -> tuple[Mesh, list[list[Event]], list[Tensor] | ShardMapError]:
    """Runs all ranks as threads; returns results, or the error of what specs promise of them."""
    make: Callable[..., Call] | None = getattr(f, "_shardmap_call", None)
    if make is None:
        raise TransformError(f"find_divergence takes a shard_mapped function, not {show(f)}.")
    call, recorders = make(args), dict[int, _Recorder]()
    names, sizes = call.mesh.axis_names, tuple(call.mesh.shape.values())
    mesh = Mesh(names, sizes, "simulated", call.mesh.device, "ranks", aliases=call.mesh.aliases)
    if mesh.size > _RANKS:
        raise TransformError(f"find_divergence runs at most {_RANKS} ranks, not {mesh.size}.")

    @wraps(call.function)
    def body(*args: Any, **kwargs: Any) -> Any:
        scope = current_scope()
        assert scope is not None  # it is a body
        assert isinstance(scope.backend, RankBackend)  # that of a thread
        recorder = recorders[scope.backend.rank] = _Recorder()
        recorder.watch(scope.backend)
        return _recorded(call.function, recorder, args, kwargs)

    found: list[Tensor] | ShardMapError
    try:
        found = _tensors(threads.run(replace(call, mesh=mesh, function=body, out_matches=Memo())))
    except ShardMapError as error:
        found = error
    events = [recorders[rank].events for rank in sorted(recorders)]
    is_complete = all(each and each[-1].operation == _RESULT for each in events)
    if isinstance(found, ShardMapError) and not (is_complete and len(events) == mesh.size):
        raise found
    for same in zip(*events, strict=False):
        if len({(event.operation, event.site) for event in same}) > 1:
            raise TransformError(f"find_divergence: ranks run different code: {same[0].place}.")
    return mesh, events, found


def _difference(results: list[Tensor] | ShardMapError, expected: list[Tensor]) -> str | None:
    """Says how the results differ; None if they are equal."""
    if isinstance(results, ShardMapError):
        return str(results)
    if len(results) != len(expected):
        return f"{len(results)} tensors on ranks, {len(expected)} on one device"
    tolerance = tolerance_of(x.dtype for x in expected)
    faults = [
        differ(a.detach(), b.detach(), tolerance, f"result {number}")
        for number, (a, b) in enumerate(zip(results, expected, strict=True), 1)
    ]
    return next((str(fault) for fault in faults if fault is not None), None)


class _Comparison:
    """Relates each value of the ranks to values on one device."""

    def __init__(self, mesh: Mesh, ranks: Sequence[Sequence[Event]], one: Sequence[Event]) -> None:
        self._mesh, self._ranks = mesh, ranks
        self._known: dict[tuple[int, ...], list[tuple[Tensor, Event]]] = {}
        for event in one:
            for value in event.values:
                self._known.setdefault(tuple(value.shape), []).append((value, event))
        self._tolerance = tolerance_of(x.dtype for event in one for x in event.values)
        self._suspects: dict[Key, frozenset[int]] = {}
        self._texts: dict[Key, str] = {}

    def first_suspect(self, difference: str) -> Divergence:
        """Follows all values, and returns the first suspect in the results."""
        first = self._ranks[0]
        for at, event in enumerate(first[:-1]):
            before = self._before(event)
            for number, key in enumerate(event.results):
                values = [events[at].values[number] for events in self._ranks]
                text = self._explain(values)
                self._texts[key] = text or f"{event.place}, which nothing on one device is"
                self._suspects[key] = frozenset() if text else before or frozenset({at})
        suspects = self._before(first[-1])
        blamed = first[min(suspects)] if suspects else first[-1]
        operands = tuple(self._texts.get(key, "a value from outside") for key in blamed.operands)
        return Divergence(blamed.operation, blamed.site, operands, difference)

    def _before(self, event: Event) -> frozenset[int]:
        none: frozenset[int] = frozenset()
        return none.union(*(self._suspects.get(key, none) for key in event.operands))

    def _explain(self, values: Sequence[Tensor]) -> str | None:
        """Says which value on one device these are, and how; None if there is none."""
        if len({x.shape for x in values}) > 1:
            return None
        axes = [axis for axis, size in self._mesh.shape.items() if size > 1]
        sizes = [self._mesh.shape[axis] for axis in axes]
        stacked = torch.stack([*values]).reshape(*sizes, *values[0].shape)
        for layout, whole in _assembled(axes, stacked):
            for value, event in reversed(self._known.get(tuple(whole.shape), ())):
                if value.dtype.is_floating_point == whole.dtype.is_floating_point and (
                    differ(whole, value, self._tolerance, "") is None
                ):
                    words = ", ".join(how for how in layout if how) or "equal to"
                    return f"{words} {event.place}"
        return None


def _assembled(axes: Sequence[str], stacked: Tensor) -> Iterator[tuple[Layout, Tensor]]:
    """Yields the global values that the ranks' may be, stacked along a dim for each axis.

    Axes that shard one dim are taken in each order.
    """
    if not axes:
        yield (), stacked
    for at, axis in enumerate(axes):
        rest = (*axes[:at], *axes[at + 1 :])
        for how, whole in _joined(axis, at, len(rest), stacked):
            yield from (((how, *layout), found) for layout, found in _assembled(rest, whole))


def _joined(axis: str, at: int, others: int, stacked: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields what the values along one axis make: one of equal ones, shards joined, or a sum."""
    values = stacked.unbind(at)
    if at == 0 and all(torch.allclose(x, values[0], equal_nan=True) for x in values):
        yield "", values[0]
    for dim in range(stacked.ndim - 1 - others):
        yield f"a shard of dim {dim} over {axis!r} of", torch.cat(values, others + dim)
    if at == 0 and is_smooth(stacked):
        yield f"an addend over {axis!r} of", stacked.sum(0)
