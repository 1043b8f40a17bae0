"""Conversions of results: from their types to those that their specs promise."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

from torch import Tensor

from shardmap_torch.boundary.call import Call, Result
from shardmap_torch.boundary.casts import apply
from shardmap_torch.checker.interpreter import messages, proposals
from shardmap_torch.checker.interpreter.collectives import AbstractBackend
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.interpreter.proposals import to_spec
from shardmap_torch.checker.ir.observer import Observer
from shardmap_torch.checker.ir.program import Cast, Exit, Where
from shardmap_torch.checker.ir.repairs import Insert, Op, Repair, applied, nested, propose
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.checker.rules.lattice import plain
from shardmap_torch.checker.verify.request import Request, promised
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.scope import Scope, enter_scope
from shardmap_torch.core.functorch import base_of
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, K, Partial, R, V

if TYPE_CHECKING:  # an interpretation asks here for the types of results
    from shardmap_torch.checker.verify.interpretation import Interpretation

Exits: TypeAlias = Mapping[Where, Exit]
"""The conversions of each result along each axis."""

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
    chain = messages.joined([*messages.chain_of(storage_type, interpreter.axes.index(axis))])
    if axis_type == Partial:
        return (
            f"  {path}: {spec!r} promises a finished value over {axis!r}, but the result is a "
            f"pending sum over {axis!r}\n    it comes from {chain}\n"
            f"    Fix: all_reduce it over {axis!r}, or name {axis!r} in partial=."
        )
    is_mean = interpreter.observer.scale_of(base_of(value)) > 1
    what, fix = _MEAN if is_mean else _VARIES
    return (
        f"  {path}: {spec!r} promises one value on all ranks of {axis!r}, but the result {what}\n"
        f"    it comes from {chain}\n    Fix: {fix.format(axis=axis)}"
    )


_VARIES: Final = (
    "varies over it",
    "reduce or gather it over {axis!r}, or name {axis!r} in the spec.",
)
_MEAN: Final = "is each rank's mean of its own part", "all_reduce it over {axis!r} with op='mean'."


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


def convert_results(request: Request, made: "Interpretation", result: Result) -> Exits:
    """Converts every result of a path to the type that its spec promises.

    Raises:
        ShardTypeError: names all that do not match, and where they come from.
    """
    interpreter, backend = made.interpreter, made.backend
    exits = _matching_exits(request, made, result)
    for position in result.match.crossing:
        spec, path = result.match.spec(position), result.match.paths[position]
        try:
            interpreter.observer.on_result(path, result.leaves[position], spec)
        except ShardTypeError as error:
            _propose(made, error, result, [position])
            raise
    report_values(interpreter.observer, result)
    # Conversions of the boundary keep the meaning.
    interpreter.observer = interpreter.observer.aside
    for (position, axis), exit_ in exits.items():
        casts = [Collective(name, src, dst, (axis,)) for name, src, dst in exit_.casts]
        result.leaves[position] = apply(backend, casts, result.leaves[position])
    return exits


def _matching_exits(request: Request, made: "Interpretation", result: Result) -> Exits:
    """Finds the conversions of results; raises one error about all that match no spec."""
    interpreter, exits = made.interpreter, dict[Where, Exit]()
    mismatches: list[ResultMismatch] = []
    wrong: dict[int, list[str]] = {}
    for position in result.match.crossing:
        spec, path = result.match.spec(position), result.match.paths[position]
        value = result.leaves[position]
        # A real tensor that the body returns as it is was closed over.
        result.leaves[position] = value = interpreter.fakify(value)
        interpreter.copies.reject_stale(interpreter, [value])
        types = interpreter.by_axis(made.uncommitted.types_of(value))
        for axis, axis_type in types.items():
            if axis not in request.call.mapped:
                continue
            found = casts_to(interpreter, path, spec, axis, axis_type, value)
            if isinstance(found, str):
                origin = interpreter.storage_type(value).origin()
                is_sum = axis_type == Partial
                mismatches.append(ResultMismatch(path, spec, axis, is_sum, origin, found))
                wrong.setdefault(position, []).append(axis)
            else:
                exits[position, axis] = _exit(request, made, (position, axis), found, spec, value)
    if mismatches:
        head = f"{request.call.name}: the result does not match out_specs:"
        error = ShardTypeError("\n".join([head, *mismatch_paragraphs(mismatches)]))
        error.findings = tuple(mismatch.text for mismatch in mismatches)
        ops: tuple[Op, ...] = (
            ("sum",) if any(each.is_sum for each in mismatches) else ("sum", "mean")
        )
        propose(error, [_reduced(result, wrong, op) for op in ops])
        _propose(made, error, result, [*wrong])
        raise error
    return exits


def _exit(
    request: Request,
    made: "Interpretation",
    where: Where,
    found: tuple[Cast, ...],
    spec: P,
    value: Tensor,
) -> Exit:
    """Returns the conversions, or those that all paths share if they are right as well."""
    _, axis = where
    interpreter = made.interpreter
    axis_type = interpreter.by_axis(interpreter.types(base_of(value)))[axis]
    promise = promised(spec, axis).kind
    # What does not type as I is known by the retry as R.
    is_free = made.uncommitted.assumed == K or not interpreter.flows(base_of(value))
    readings = _READINGS.get((axis_type.kind, promise), "") if is_free else ""
    others = frozenset(_EXITS[reading, promise] for reading in readings)
    shared = request.reading.resolved.exits.get(where, found)
    origin = interpreter.storage_type(value).origin()
    return Exit(shared if shared in others else found, others, origin)


def _reduced(result: Result, axes: Mapping[int, Sequence[str]], op: Op) -> Repair:
    """Returns the repair that sums, or averages, every result over its axes."""
    names = [
        f"{result.match.paths[position]} over {', '.join(map(repr, names))}"
        for position, names in axes.items()
    ]
    options = (("dst", I), ("op", op))
    exits = {
        position: tuple(Insert("all_reduce", axis, options) for axis in over)
        for position, over in axes.items()
    }
    how = "dst=I" if op == "sum" else "dst=I and op='mean'"
    return Repair(f"all_reduce {_some(names)} with {how} before the return", exits=exits)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return " and ".join(names[:_SHOWN]) + more


def _propose(
    made: "Interpretation", error: ShardTypeError, result: Result, wrong: Sequence[int]
) -> None:
    """Proposes other reductions, or what gives results the layouts that their specs promise."""
    interpreter, exits, last = made.interpreter, dict[int, Sequence[Insert]](), list[Repair]()
    proposals.blame_inputs(interpreter, error, [result.leaves[at] for at in wrong])
    for position in wrong:
        value, spec = result.leaves[position], result.match.spec(position)
        state, own = proposals.state(interpreter, value)
        wrongs = {axis: have for axis, have in state.items() if have != spec.types.get(axis, I)}
        propose(error, proposals.moved_over_others(interpreter, value, wrongs), first=True)
        propose(error, proposals.along_its_dims(interpreter, value, state, spec))
        exits[position] = to_spec(state, own, spec)
        if own is not None and own.sharded_dims != spec.sharded_dims and not own.partial:
            other = P(*own.entries[: 1 + max([-1, *(dim for dim, _ in own.sharded_dims)])])
            text = f"{other!r} for {result.match.paths[position]} in out_specs"
            says = [Repair(text, out_specs={position: other})]
            propose(error, says if _names_others(spec, own) else ())
            last += says
    propose(error, proposals.reductions(interpreter, [result.leaves[at] for at in wrong]))
    if all(exits.values()):
        names = [nested(chain, result.match.paths[at]) for at, chain in exits.items()]
        propose(error, [Repair(f"return {_some(names)}", exits=exits)])
    propose(error, last)


def _names_others(spec: P, own: P) -> bool:
    """Returns whether a spec shards over axes none of which shard the result, but others do."""
    return bool(own.mentioned and spec.mentioned) and not {*own.mentioned} & {*spec.mentioned}


def report_values(observer: Observer, result: Result) -> None:
    """Shows an observer the results that are no tensors."""
    for path, leaf in zip(result.match.paths, result.leaves, strict=True):
        if not isinstance(leaf, Tensor):
            observer.on_python_result(path, leaf)


def repaired_result(call: Call, backend: AbstractBackend, repair: Repair, result: Result) -> Result:
    """Applies to results what the repair that is tried says; returns them with its specs."""
    for position, chain in repair.exits.items():
        with enter_scope(Scope(backend, call.bound)):
            result.leaves[position] = applied(chain, result.leaves[position])
    if not repair.out_specs:
        return result
    specs = [repair.out_specs.get(at, spec) for at, spec in enumerate(result.match.specs)]
    return replace(result, match=replace(result.match, specs=tuple(specs)))
