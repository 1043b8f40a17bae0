"""The verdicts of one function at sizes that differ from call to call."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.boundary.matching import input_signature
from shardmap_torch.checker.ir.sizes import Sizes
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.core.caching import drop_oldest

if TYPE_CHECKING:  # for annotations; it takes a second to import
    from shardmap_torch.checker.sizes.general import General, Numbers


@dataclass(frozen=True)
class Slot:
    """The place of one size or number among the arguments of a call.

    Attributes:
        position: of the argument.
        dim: of the tensor; None where the argument is a Python number.
        num_ranks: over how many ranks the dim is sharded.
        name: what messages call it.
    """

    position: int
    dim: int | None
    num_ranks: int
    name: str


def slots_of(call: Call) -> list[Slot]:
    """The sizes of all tensors, and the integers among static arguments."""
    found = []
    for position in call.crossing:
        path, sharded = call.match.paths[position], dict(call.match.spec(position).sharded_dims)
        for dim in range(call.leaves[position].ndim):
            num_ranks = call.mesh.num_ranks(sharded.get(dim, ()))
            found.append(Slot(position, dim, num_ranks, f"dim {dim} of {path}"))
    for position in _integers(call):
        found.append(Slot(position, None, 1, call.match.paths[position]))
    return found


def numbers_of(call: Call) -> tuple[int, ...]:
    """Reads the slots."""
    leaves = call.leaves
    sizes = [size for position in call.crossing for size in leaves[position].shape]
    return (*sizes, *[leaves[position] for position in _integers(call)])


def layout_of(key: Sequence[Any], call: Call) -> Hashable:
    """All of a signature but what stands in the slots; None where a tensor does not cross."""
    (_, values, *rest), leaves, static = key, call.leaves, call.match.static
    if len(call.crossing) + len(static) != len(leaves):
        return None
    known, kinds = dict(zip(static, values, strict=True)), list[Any]()
    for position, leaf in enumerate(leaves):
        kind = input_signature(leaf)
        if isinstance(leaf, Tensor):
            shape, *others = kind
            if not isinstance(shape, torch.Size):  # a nested tensor has none, and is refused
                return None
            kinds.append((len(shape), *others))
        else:
            kinds.append(kind if type(leaf) is int else (kind, known[position]))
    return (call.structure, call.mesh, call.mapped, call.match.specs, *kinds, *rest)


def outline_of(key: Sequence[Any], call: Call) -> Hashable:
    """Returns what `layout_of` depends on, in a fifth of the time; None where that is not known."""
    match, leaves = call.match, call.leaves
    if match.resized_from is None:
        return None
    static = zip(match.static, key[1], strict=True) if match.static else ()
    values = [value for at, value in static if type(leaves[at]) is not int]
    return (match.resized_from, *values, *key[2:])


def _integers(call: Call) -> list[int]:
    # A bool is no number that could be another one.
    return [position for position in call.match.static if type(call.leaves[position]) is int]


_BEFORE: Final = 2
"""Number of sizes that are checked as they are before a verdict for all is looked for."""

_FAILURES: Final = 2
"""Number of attempts that may fail for calls that are alike, each of which costs a check."""

_WITNESSES: Final = 2
"""Number of verdicts at sizes as they are with which one for all sizes is compared."""

_LAYOUTS: Final = 64
_EXACT: Final = 8
_GENERALS: Final = 16


@dataclass
class _Family:
    """Calls that differ in sizes and numbers only.

    Attributes:
        slots: where these stand.
        exact: verdicts on numbers as they are, in the order of the checks.
        generals: verdicts on symbols.
        failures: why no verdict was derived, for each attempt.
    """

    slots: Sequence[Slot]
    exact: "dict[Numbers, Verdict]" = field(default_factory=dict)
    generals: "list[General]" = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Recheck:
    """Differences of a check from the one before.

    Attributes:
        slots: the sizes or numbers that were others than in the check before, all equal.
        number: what stands in them now.
        before: what stood in them before.
        why: why no verdict for all sizes holds.
    """

    slots: tuple[Slot, ...]
    number: int
    before: int
    why: str


class History:
    """The checks of one function, by what their calls have in common."""

    def __init__(self) -> None:
        self._families: dict[Hashable, _Family] = {}
        self._outlines: dict[Hashable, _Family] = {}

    def find(self, key: Sequence[Any], call: Call) -> Verdict | None:
        """Returns the verdict on a call whose sizes one derived before covers."""
        family = self._family(key, call)
        if family is None or not family.generals:
            return None
        numbers = numbers_of(call)
        for general in family.generals:
            verdict = general.find(numbers)
            if verdict is not None:
                return verdict
        return None

    def derive(
        self,
        key: Sequence[Any],
        call: Call,
        check: Callable[[Call, Sizes], Verdict],
        exactly: Callable[[], Verdict],
    ) -> Verdict | None:
        """Derives a verdict for all sizes from those that differ, or returns None.

        `check` interprets a body with symbols, `exactly` with the sizes of the call.
        """
        family = self._family(key, call, new=True)
        if family is None or len(family.exact) < _BEFORE or len(family.failures) >= _FAILURES:
            return None
        from shardmap_torch.checker.sizes.general import derive, groups_of, is_large

        numbers = numbers_of(call)
        groups = groups_of(family.slots, [*family.exact, numbers])
        if not is_large(groups, numbers):
            return None

        witnesses = dict([*family.exact.items()][-_WITNESSES:])
        try:
            general, verdict = derive(
                call, family.slots, groups, numbers, check, witnesses, exactly
            )
        except Exception as error:  # a body may raise anything where it meets no number
            family.failures.append(f"{type(error).__name__}: {error}".splitlines()[0])
            return None
        del family.generals[: len(family.generals) - _GENERALS + 1]
        family.generals.append(general)
        return verdict

    def add(self, key: Sequence[Any], call: Call, verdict: Verdict) -> Recheck | None:
        """Notes a verdict on sizes as they are; returns how the check differs from the latest."""
        family = self._family(key, call, new=True)
        if family is None:
            return None
        numbers = numbers_of(call)
        *_, latest = None, *family.exact
        family.exact[numbers] = verdict
        if len(family.exact) > _EXACT:
            drop_oldest(family.exact)
        if latest is None:
            return None
        return _recheck(family, latest, numbers)

    def structural(self, key: Sequence[Any], call: Call) -> frozenset[str]:
        """Names of number arguments that decide what the program does, as an index or a count."""
        family = self._family(key, call)
        if family is None or not family.failures:
            return frozenset()
        return frozenset(slot.name for slot in family.slots if slot.dim is None)

    def forget(self, key: Sequence[Any], call: Call) -> None:
        """Forgets the verdicts on calls like this one, since a run of one has departed from it."""
        self._families.pop(layout_of(key, call), None)
        self._outlines.clear()

    def _family(self, key: Sequence[Any], call: Call, new: bool = False) -> _Family | None:
        if not self._families and not new:
            return None
        outline = outline_of(key, call)
        try:
            known = self._outlines.get(outline)
            if known is not None:
                return known
            layout = layout_of(key, call)
            family = self._families.get(layout)
        except TypeError:  # a static argument without a hash
            return None
        if family is None and new and layout is not None:
            if len(self._families) >= _LAYOUTS:
                drop_oldest(self._families)
                self._outlines.clear()
            family = self._families[layout] = _Family(slots_of(call))
        if family is not None and outline is not None:
            if len(self._outlines) >= _LAYOUTS:
                self._outlines.clear()
            self._outlines[outline] = family
        return family


def _recheck(family: _Family, before: "Numbers", now: "Numbers") -> Recheck | None:
    """The difference, if it is one size or number, wherever it stands."""
    changed = [at for at, pair in enumerate(zip(before, now, strict=True)) if pair[0] != pair[1]]
    if len({(before[at], now[at]) for at in changed}) != 1:
        return None
    slots = tuple(family.slots[at] for at in changed)
    why = family.failures[-1] if family.failures else ""
    return Recheck(slots, now[changed[0]], before[changed[0]], why)
