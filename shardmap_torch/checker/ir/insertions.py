"""Collectives that give a tensor another type or layout and keep what it means on one device.

They are candidates: each is tried before it is printed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from shardmap_torch.checker.ir.repairs import Insert, Repair, Spot
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.table import TABLE
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, Partial, R, V

Met = tuple[str, int | None]
"""The letter of a type along an axis, and of an S the dim."""

State = Mapping[str, Met]
"""The type of a tensor, or the dim that is sharded, along each axis of several ranks."""

_NOTHING: Final[Met] = ("K", None)


def state_of(types: Mapping[str, AxisType], spec: P | None, sizes: Mapping[str, int]) -> State:
    """Returns what a tensor is along each axis, from its types and its layout, if it is known."""
    return {axis: _met(have.kind, axis, spec) for axis, have in types.items() if sizes[axis] > 1}


def _met(kind: str, axis: str, spec: P | None) -> Met:
    if kind == "P" or (spec is not None and axis in spec.partial):
        return "P", None
    for dim, axes in spec.sharded_dims if spec is not None else ():
        if axis in axes:
            return "S", dim
    return ("V", None) if kind == "S" else (kind, None)


def _options(**given: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(given.items())


_CALLS: Final[Mapping[str, Sequence[tuple[str, Any]]]] = {
    "P": [("all_reduce", _options(dst=R)), ("all_reduce", _options(dst=I))],
    "V": [
        ("all_reduce", _options(dst=I)),
        ("all_reduce", _options(dst=I, op="mean")),
        ("all_reduce", _options(dst=R, op="max")),
    ],
    "I": [("convert", _options(src=I, dst=R)), ("convert", _options(src=I, dst=Partial))],
    "K": [("convert", _options(src=I, dst=R)), ("convert", _options(src=R, dst=Partial))],
    "R": [("convert", _options(src=R, dst=I)), ("convert", _options(src=R, dst=Partial))],
}
"""Calls that take a tensor of one type to another, the likeliest first."""

LIKELY: Final = "PSVIKR"
"""The likelier a type is to be refused, the earlier."""

_SOURCE: Final = {"I": I, "R": R, "K": R}


def inserts(state: State, spec: P | None, peers: Sequence[State]) -> Iterator[tuple[str, Insert]]:
    """Yields what could be applied to an operand, with the letter of the type that it changes.

    Args:
        state: of the operand.
        spec: its layout, if it is known.
        peers: the states of the call's other operands.
    """
    for axis, have in state.items():
        kind, dim = have
        suiting = dict.fromkeys(peer.get(axis, _NOTHING) for peer in peers)
        for need in suiting:
            yield from ((kind, each) for each in _to(axis, have, need))
        if kind == "S" and dim is not None:
            yield from ((kind, each) for each in gathers(axis, dim, spec))
        yield from ((kind, Insert(name, axis, options)) for name, options in _CALLS.get(kind, ()))


def gathers(axis: str, dim: int, spec: P | None) -> Iterator[Insert]:
    """Yields gathers of a dim, of all axes that shard it at once."""
    axes = () if spec is None else dict(spec.sharded_dims).get(dim, ())
    if axes and axis != axes[-1]:
        return
    for dst in (R, I):
        yield Insert("all_gather", axes if len(axes) > 1 else axis, _options(dim=dim, dst=dst))


def _to(axis: str, have: Met, need: Met) -> Iterator[Insert]:
    """Yields the call after which a tensor is sharded, or a pending sum, as another is."""
    (kind, dim), (wanted, to) = have, need
    source = _SOURCE.get(kind)
    if wanted == "S" and source is not None:
        yield Insert("convert", axis, _options(src=source, dst=V, dim=to))
    if wanted == "S" and kind == "P":
        yield Insert("reduce_scatter", axis, _options(dim=to))
    if wanted == "S" and kind == "S" and dim != to:
        yield Insert("all_to_all", axis, _options(split_dim=to, concat_dim=dim))
    if wanted == "P" and source is not None:
        yield Insert("convert", axis, _options(src=source, dst=Partial))
    if wanted == "P" and kind == "S":
        yield Insert("convert", axis, _options(src=V, dst=Partial, dim=dim))


def to_spec(state: State, own: P | None, spec: P) -> Sequence[Insert]:
    """Returns what a result needs so that it is as its spec promises, over all axes."""
    found: list[Insert] = []
    for axis, have in state.items():
        (kind, dim), need = have, _met("I", axis, spec)
        if need[0] == "I" and kind in "PV":
            found.append(Insert("all_reduce", axis, _options(dst=I)))
        elif need[0] == "I" and kind == "S":
            found += list(gathers(axis, dim or 0, own))[1:]  # to I
        elif need != have:
            found += _to(axis, have, need)
    return found


def exchanges(spot: Spot, collective: Collective, state: State) -> Iterator[Repair]:
    """Yields what to call in place of a collective that does not take an operand of this state."""
    unequal = tuple(axis for axis in collective.axes if state.get(axis, _NOTHING)[0] not in _SOURCE)
    without = Repair(f"leave out {spot}", collectives={spot: None})
    if not unequal:
        yield without
    elif unequal != collective.axes and collective.name in _WRITTEN:
        yield _instead(spot, replace(collective, axes=unequal))
    met = {state.get(axis, _NOTHING) for axis in collective.axes}
    if len(met) == 1:
        for dst in dict.fromkeys([collective.dst, R, I]):
            for other in _taking(*min(met), dst, collective):
                if other != collective:
                    yield _instead(spot, other)
    if unequal:
        yield without


def _instead(spot: Spot, other: Collective) -> Repair:
    return Repair(f"{_written(other)} in place of {spot}", collectives={spot: other})


def _taking(kind: str, dim: int | None, dst: AxisType, old: Collective) -> Iterator[Collective]:
    """Yields the collectives that take such an operand to this type."""
    axes, is_equal = old.axes, dst in (I, R)
    if kind in "PV" and is_equal:
        yield Collective("all_reduce", Partial, dst, axes)
    if kind == "P" and dst == V:
        yield Collective("reduce_scatter", Partial, V, axes, dim=old.dim)
    if kind == "S" and is_equal:
        yield Collective("all_gather", V, dst, axes, dim=dim or 0)
    if kind == "S" and dst == Partial:
        yield Collective("convert", V, Partial, axes, dim=dim or 0)
    for src in (I, R):
        if kind in ("K", src.kind) and ("convert", src, dst) in TABLE:
            yield Collective("convert", src, dst, axes, dim=old.dim)


_WRITTEN: Final = ("all_reduce", "all_gather", "reduce_scatter", "convert")


def _written(collective: Collective) -> str:
    """Writes the call of one of these collectives."""
    axes = collective.axes[0] if len(collective.axes) == 1 else collective.axes
    src = f", src={collective.src}" * (collective.name == "convert")
    dst = f", dst={collective.dst}" * (collective.name != "reduce_scatter")
    dim = f", dim={collective.dim}" * (V in (collective.src, collective.dst))
    return f"{collective.name}(x, {axes!r}{dim}{src}{dst})"
