"""Conversions of results: from their types to those that their specs promise."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from shardmap_torch.boundary.call import Call, Result
from shardmap_torch.boundary.casts import apply
from shardmap_torch.checker.communication.collectives import AbstractBackend
from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.insertions import to_spec
from shardmap_torch.checker.ir.observer import UNOBSERVED, Observer
from shardmap_torch.checker.ir.outcomes import Cast, Exit, Resolved, Where
from shardmap_torch.checker.ir.repairs import Insert, Repair, applied, nested, note_reached, propose
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.checker.rules.lattice import plain
from shardmap_torch.checker.verify.boundary_types import promised
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.scope import Scope, enter_scope
from shardmap_torch.core.functorch import base_of
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, K, Partial, R, V

_EXITS: dict[tuple[str, str], tuple[Cast, ...]] = {
    ("I", "I"): (),
    ("K", "I"): (),
    ("Z", "I"): (),
    ("R", "I"): (("convert", R, I),),
    ("V", "S"): (),
    ("I", "S"): (("convert", I, R), ("reinterpret", R, V)),
    ("R", "S"): (("reinterpret", R, V),),
    ("K", "S"): (("reinterpret", R, V),),
    ("Z", "S"): (),
    ("I", "P"): (("convert", I, Partial),),
    ("R", "P"): (("convert", R, Partial),),
    ("K", "P"): (("convert", R, Partial),),
    ("V", "P"): (("reinterpret", V, Partial),),
    ("P", "P"): (),
    ("Z", "P"): (),
}
"""Conversions from the type in the body to the promised one; other pairs are errors."""


_READINGS: Final = {
    **{("K", promise): "KIR" for promise in "IP"},
    ("K", "S"): "KIRV",
    **{("Z", promise): "ZKIR" for promise in "I"},
    **{("Z", promise): "ZKIRVP" for promise in "P"},
    ("Z", "S"): "ZKIRV",
}
"""Types that a result may be read as, by its own type and the promised one."""


class Uncommitted:
    """The type assumed of a result that is K and through which a gradient flows.

    Attributes:
        assumed: the assumed type: K, which is returned as I, or else R.
        met: whether there has been such a result.
    """

    def __init__(self, interpreter: Interpreter, axis_type: AxisType) -> None:
        self._interpreter, self.assumed, self.met = interpreter, axis_type, False

    def types_of(self, value: Tensor) -> Types:
        """Returns the types with which a result leaves the body."""
        types = self._interpreter.types(base_of(value))
        if K in types and self._interpreter.flows(base_of(value)):
            self.met = True
            return tuple(self.assumed if axis_type == K else axis_type for axis_type in types)
        return types


def casts_to(
    interpreter: Interpreter, path: str, spec: P, axis: str, axis_type: AxisType, value: Tensor
) -> tuple[Cast, ...] | str:
    """Returns the conversions from the body's type to the promised one, or the mismatch."""
    found = _EXITS.get((plain(axis_type).kind, promised(spec, axis).kind))
    if found is not None:
        return found
    storage_type = interpreter.storage_type(value)
    chain = " <- ".join(messages.chain_of(storage_type, interpreter.axes.index(axis)))
    if axis_type == Partial:
        return (
            f"  {path}: {spec!r} promises a finished value over {axis!r}, but the result is a "
            f"pending sum over {axis!r}\n    it comes from {chain}\n"
            f"    Fix: all_reduce it over {axis!r}, or name {axis!r} in partial=."
        )
    return (
        f"  {path}: {spec!r} promises one value on all ranks of {axis!r}, but the result "
        f"varies over it\n    it comes from {chain}\n"
        f"    Fix: reduce or gather it over {axis!r}, or name {axis!r} in the spec."
    )


@dataclass(frozen=True)
class ResultMismatch:
    """A result whose type along one axis is not the one that its spec promises.

    Attributes:
        path: the path of the result.
        spec: the spec that it does not match.
        axis: the axis along which it is wrong.
        is_sum: whether it is a pending sum; else it varies.
        origin: the step that it comes from.
        text: the mismatch in words.
    """

    path: str
    spec: P
    axis: str
    is_sum: bool
    origin: str
    text: str


_SHOWN: Final = 3
"""Maximal number of results with the same mismatch that a message names."""


def mismatch_paragraphs(mismatches: Sequence[ResultMismatch]) -> Iterator[str]:
    """Yields the paragraphs of a message: one for each cause, whatever the number of results."""
    causes: dict[tuple[str, bool], list[ResultMismatch]] = {}
    for mismatch in mismatches:
        causes.setdefault((mismatch.axis, mismatch.is_sum), []).append(mismatch)
    for (axis, is_sum), group in causes.items():
        if len(group) == 1:
            yield group[0].text
            continue
        what, fix = _CAUSES[is_sum]
        first = f"the first {_SHOWN}" if len(group) > _SHOWN else "they are"
        yield f"  {len(group)} results {what.format(axis=axis)}; {first}:"
        yield from (f"    {p.path}: {p.spec!r}, from {p.origin}" for p in group[:_SHOWN])
        yield f"    Fix: {fix.format(axis=axis)}"


_CAUSES: Final = {
    True: (
        "are pending sums over {axis!r}, and their specs promise finished values",
        "all_reduce them over {axis!r}, or name {axis!r} in partial=.",
    ),
    False: (
        "vary over {axis!r}, and their specs promise one value on all its ranks",
        "reduce or gather them over {axis!r}, or name {axis!r} in their specs.",
    ),
}


class Exits:
    """Checks and converts the results of one path through a body.

    Attributes:
        exits: the conversions of each result.
    """

    def __init__(
        self,
        call: Call,
        interpreter: Interpreter,
        backend: AbstractBackend,
        resolved: Resolved,
        repair: Repair,
        uncommitted: Uncommitted,
    ) -> None:
        """Takes `resolved`, the choices that all paths share, and the `repair` that is tried."""
        self._call, self._interpreter, self._backend = call, interpreter, backend
        self._resolved, self._repair, self._uncommitted = resolved, repair, uncommitted
        self.exits: dict[Where, Exit] = {}

    def leave(self, result: Result) -> None:
        """Converts every result to the type that its spec promises.

        Raises:
            ShardTypeError: names all that do not match, and where they come from.
        """
        mismatches: list[ResultMismatch] = []
        wrong: dict[int, list[str]] = {}
        repair_results(self._call, self._backend, self._repair, result)
        for position in result.match.crossing:
            spec, path = result.match.spec(position), result.match.paths[position]
            value = result.leaves[position]
            # A real tensor that the body returns as it is was closed over.
            result.leaves[position] = value = self._interpreter.fakify(value)
            self._interpreter.copies.reject_stale(self._interpreter.name, [value])
            types = self._interpreter.by_axis(self._uncommitted.types_of(value))
            for axis, axis_type in types.items():
                if axis not in self._call.mapped:
                    continue
                found = casts_to(self._interpreter, path, spec, axis, axis_type, value)
                if isinstance(found, str):
                    origin = self._interpreter.storage_type(value).origin()
                    mismatch = ResultMismatch(path, spec, axis, axis_type == Partial, origin, found)
                    mismatches.append(mismatch)
                    wrong.setdefault(position, []).append(axis)
                else:
                    self.exits[position, axis] = self._exit((position, axis), found, spec, value)
        if mismatches:
            head = f"{self._call.name}: the result does not match out_specs:"
            error = ShardTypeError("\n".join([head, *mismatch_paragraphs(mismatches)]))
            error.findings = tuple(mismatch.text for mismatch in mismatches)
            raise self._proposed(error, result, [*wrong], [self._summed(result, wrong)])
        for position in result.match.crossing:
            spec, path = result.match.spec(position), result.match.paths[position]
            try:
                self._interpreter.observer.on_result(path, result.leaves[position], spec)
            except ShardTypeError as error:
                raise self._proposed(error, result, [position], []) from None
        report_values(self._interpreter.observer, result)
        self._interpreter.observer = UNOBSERVED  # conversions of the boundary keep the meaning
        for (position, axis), exit_ in self.exits.items():
            casts = [Collective(name, src, dst, (axis,)) for name, src, dst in exit_.casts]
            with self._backend.inserting():  # which no body calls
                value = apply(self._backend, casts, result.leaves[position])
            result.leaves[position] = value

    def _exit(self, where: Where, found: tuple[Cast, ...], spec: P, value: Tensor) -> Exit:
        """Returns the conversions, or those that all paths share if they are right as well."""
        _, axis = where
        storage_type = self._interpreter.storage_type(value)
        axis_type = self._interpreter.types(base_of(value))[self._interpreter.axes.index(axis)]
        promise = promised(spec, axis).kind
        # What does not type as I is known by the retry as R.
        is_free = self._uncommitted.assumed == K or not self._interpreter.flows(base_of(value))
        readings = _READINGS.get((axis_type.kind, promise), "") if is_free else ""
        others = frozenset(_EXITS[reading, promise] for reading in readings)
        shared = self._resolved.exits.get(where, found)
        return Exit(shared if shared in others else found, others, storage_type.origin())

    def _summed(self, result: Result, axes: dict[int, list[str]]) -> Repair:
        """Returns the repair that sums every result over its axes."""
        names = [
            f"{result.match.paths[position]} over {', '.join(map(repr, names))}"
            for position, names in axes.items()
        ]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        what = " and ".join(names[:_SHOWN]) + more
        exits = {
            position: tuple(Insert("all_reduce", axis, (("dst", I),)) for axis in over)
            for position, over in axes.items()
        }
        return Repair(f"all_reduce {what} with dst=I before the return", exits=exits)

    def _proposed(
        self, error: ShardTypeError, result: Result, wrong: Sequence[int], repairs: list[Repair]
    ) -> ShardTypeError:
        """Attaches repairs that give results, by their layouts, those that specs promise."""
        spots = self._interpreter.spots
        if spots is None:
            return propose(error, repairs)
        note_reached(error, spots.step(False) + 0.25)
        repairs += spots.factors
        chains = []
        for position in wrong:
            repairs += spots.regathers(result.leaves[position])
            state, own = spots.state(result.leaves[position])
            chains.append(to_spec(state, own, result.match.spec(position)))
        for each in zip(*chains, strict=False):
            named = zip(wrong, each, strict=True)
            names = [nested(c, result.match.paths[p]) for p, c in named]
            more = f" and {len(names) - _SHOWN} more alike" if len(names) > _SHOWN else ""
            exits = dict(zip(wrong, each, strict=True))
            text = f"return {', '.join(names[:_SHOWN])}{more}"
            repairs.append(Repair(text, exits=exits))
        return propose(error, repairs)


def report_values(observer: Observer, result: Result) -> None:
    """Shows an observer the results that are no tensors."""
    for path, leaf in zip(result.match.paths, result.leaves, strict=True):
        if not isinstance(leaf, Tensor):
            observer.on_python_result(path, leaf)


def repair_results(call: Call, backend: AbstractBackend, repair: Repair, result: Result) -> None:
    """Applies to results what the repair that is tried says."""
    for position, chain in repair.exits.items():
        with enter_scope(Scope(backend, call.bound)), backend.inserting():
            value = applied(chain, result.leaves[position])
        result.leaves[position] = value
