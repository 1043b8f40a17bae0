"""Searches for the repair that is printed with an error: changes of the program, tried in turn."""

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Final

from shardmap_torch.boundary.call import Call
from shardmap_torch.boundary.matching import Match
from shardmap_torch.checker.ir.repairs import FIRST, NONE, Repair, rejection_of, with_tried
from shardmap_torch.checker.verify.request import Strictness
from shardmap_torch.errors import TRIED, ShardTypeError
from shardmap_torch.spec import Entry, P, mismatches

if TYPE_CHECKING:  # what gives verdicts searches for repairs
    from shardmap_torch.checker.verify.verdict import Verdict

Attempt = Callable[[Call, Repair, Strictness], "Verdict"]
"""Checks a call with a repair."""

Confirm = Callable[[Call, Repair, "Verdict | ShardTypeError"], bool | None]
"""Returns whether a call with a repair has the results and gradients of one device, by numbers.

It has been accepted with this verdict, or layouts do not prove it, for this reason. None if random
numbers cannot tell.
"""


def proven_alone(call: Call, repair: Repair, found: "Verdict | ShardTypeError") -> bool | None:
    """Confirms what layouts prove, and nothing else."""
    return False if isinstance(found, ShardTypeError) else None


_TRIES: Final = 8
"""Maximal number of repairs that are tried: each costs as much as the check itself."""

_SPECS: Final = 8
"""Maximal number of other specs that are tried after these."""

_SHAPES: Final = 24
"""That of other specs where shapes do not fit, which most attempts find out early."""


NOT_ENOUGH: Final = "Tried, and not enough by itself, as more differs from one device: "
"""The start of a line about advice that was tried, and makes no right program."""

_PLACES: Final = 3
"""Maximal number of places that a repair changes alike, and of such repairs that are tried."""

_NUMBERS: Final = 3
"""Maximal number of these that are tried by random numbers, where layouts prove nothing."""


def _is_of_plan(call: Call, error: Exception) -> bool:
    """Returns whether an error is for a module's plan to mend, not for collectives in the module.

    The function has the axes of which such errors are; the error gets the number of tries.
    """
    axes = getattr(call.function, "planned", ())
    named = {each for each in call.mesh.axis_names if repr(each) in f"{error}"}
    if not axes or (named and named.isdisjoint(axes)):
        return False
    vars(error)["tries"] = _TRIES
    return True


def find_repair(
    call: Call, error: ShardTypeError, strictness: Strictness, attempt: Attempt, confirm: Confirm
) -> ShardTypeError:
    """Returns the error with the first proposed repair with which a call is accepted, if one is.

    Under global strictness too: well-typed is not enough, as a sum of updated weights is that, and
    another program on one device. It is the error of the other strictness if that has the repair.
    """
    if _is_of_plan(call, error):
        return error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shapes that nobody has written
        return _Search(call, error, strictness, attempt, confirm).result() if _TRIES else error


def note_spec(
    call: Call, error: Exception, strictness: Strictness, attempt: Attempt, confirm: Confirm
) -> None:
    """Adds to an error of the body's own, as about shapes, the change with which there is none.

    Other dims of the collectives that operands come from are tried first, then specs, of inputs
    that are sharded otherwise than others of their sizes before the rest.
    """
    if _is_of_plan(call, error):
        return

    def differs(position: int) -> tuple[bool, bool]:
        own, x = call.match.spec(position), call.leaves[position]
        others = [at for at in call.crossing if call.match.spec(at) != own]
        shapes = [call.leaves[at].shape for at in others]
        return x.shape in shapes, x.shape[:1] in [shape[:1] for shape in shapes]

    search = _Search(call, ShardTypeError(""), strictness, attempt, confirm)
    inputs = sorted(call.crossing, key=differs, reverse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        likely: Sequence[Repair] = vars(error).pop("proposals", ())
        repairs = chain(likely, other_specs(call, inputs))
        for repair in islice(repairs, _SHAPES if _TRIES else 0):
            if search.is_equal(repair, search.checked(repair)) is not False:
                error.add_note(f"{TRIED}{repair.text}")
                return


@dataclass
class _Search:
    """Bounds of a search: how many repairs numbers may still decide about, and about which not."""

    call: Call
    error: ShardTypeError
    strictness: Strictness
    attempt: Attempt
    confirm: Confirm
    numbers: int = 0
    undecided: list[str] = field(default_factory=list)

    def result(self) -> ShardTypeError:
        """Returns the error to show."""
        is_local, again = self.strictness == "local", list[Repair]()
        known, both = list[str](), list[str]()
        self.numbers = _NUMBERS if is_local or rejection_of(self.error).refuted else 0
        for error, repairs, count in self._proposals():
            for waiting, tried, tries in (([*repairs], known, count), (again, both, _PLACES)):
                last = len(tried) + tries
                while waiting and len(tried) < last:
                    repair = waiting.pop(0)
                    if repair.text in tried:
                        continue
                    tried.append(repair.text)
                    found = self.checked(repair)
                    is_equal = self.is_equal(repair, found)
                    if is_equal is not False:
                        with_tried(error, repair, is_equal is True)
                        return error
                    if isinstance(found, ShardTypeError):
                        waiting[:0], more = _continued(repair, found)
                        again += more
        self._note_failed(known)
        return self.error

    def _note_failed(self, known: Collection[str]) -> None:
        """Says which advice of the error was tried in vain, where numbers need not decide.

        Where a dim is taken apart a gather is one of two ways, and is left out then.
        """
        # Here: importing the package of shardings takes a tenth of a second.
        from shardmap_torch.checker.spmd.sharded import GATHERED

        known = [each for each in known if " for each y " not in each]
        gathers = [each for each in known if each.startswith("all_gather(")]
        in_vain = bool(gathers) and set(gathers).isdisjoint(self.undecided)
        text = f"{self.error}".replace(GATHERED, "" if in_vain else GATHERED)
        failed = gathers if "Fix: gather" in text.replace(GATHERED, "") else []
        for each in known:
            code = each.partition(" in place of ")[0]  # not the 0 of an index
            whole = text.replace(f"{code}, or dst=", "")  # of which that type is one of two
            failed += [each] * ("(" in code and code in whole and each not in failed)
        for each in [x for x in failed if "dst=R" in x and x.replace("dst=R", "dst=I") in failed]:
            failed.remove(each.replace("dst=R", "dst=I"))
            failed[failed.index(each)] = each.replace("dst=R", "dst=R or dst=I")
        if failed and not self.undecided:
            text += f"\n{NOT_ENOUGH}{'; '.join(failed)}"
        self.error.args = (text,)

    def _proposals(self) -> Iterator[tuple[ShardTypeError, Sequence[Repair], int]]:
        """Yields errors, what they propose, and how many of that are tried.

        Only global strictness knows how values are sharded, as whoever gathers them has to; and
        where its layouts end, what is wrong may be an error about types that is behind them.
        """
        own = rejection_of(self.error)
        yield self.error, own.proposals, _TRIES
        strictness: Strictness = "global" if self.strictness == "local" else "local"
        other = self._attempted(NONE, strictness)
        inputs = own.inputs
        if isinstance(other, ShardTypeError):
            self.numbers = self.numbers or _NUMBERS
            found, inputs = rejection_of(other).proposals, inputs + rejection_of(other).inputs
            # A rank's index is 0 on one device only, which a local error does not speak of.
            repairs = [each for each in found if FIRST not in each.operands.values()]
            yield self.error if strictness == "global" else other, repairs, _TRIES
        yield self.error, [*other_specs(self.call, dict.fromkeys(inputs))], _SPECS

    def is_equal(self, repair: Repair, found: "Verdict | ShardTypeError") -> bool | None:
        if isinstance(found, ShardTypeError):
            # What layouts do not prove, and types allow.
            if isinstance(self._attempted(repair, "local"), ShardTypeError):
                return False
            if not self.numbers:
                self.undecided.append(repair.text)
                return False
            self.numbers -= 1
        return self.confirm(self.call, repair, found)

    def checked(self, repair: Repair) -> "Verdict | ShardTypeError":
        """Returns the verdict with a repair, or the error that remains."""
        found = self._attempted(repair, self.strictness)
        if not isinstance(found, ShardTypeError) and self.strictness != "global":
            found = self._attempted(repair, "global")
        return found

    def _attempted(self, repair: Repair, strictness: Strictness) -> "Verdict | ShardTypeError":
        call = self.call
        if not set(repair.replicate.values()) <= set(call.mapped):
            return ShardTypeError(f"{call.name}: specs cannot name axes that inner functions bind.")
        try:
            return self.attempt(with_specs(call, repair), repair, strictness)
        except ShardTypeError as error:
            return error
        except Exception as problem:  # the body's own, on shapes that the repair has changed, say
            return ShardTypeError(f"{call.name}: {problem}")


def _continued(repair: Repair, failed: ShardTypeError) -> tuple[list[Repair], list[Repair]]:
    """Returns a repair with other ops, and with the same change of another line, as it failed.

    A sum of counts that divide, say, is right with op="sum" in place of the mean of the quotients.
    """
    inserted, places = {*repair.operands.values()}, {*repair.collectives, *repair.operands}
    may_repeat, ops, same = repair.keeps_op or repair.operands, list[Repair](), list[Repair]()
    for each in rejection_of(failed).proposals:
        at = {*each.collectives, *each.operands}
        is_alike = each.keeps_op == repair.keeps_op and {*each.operands.values()} == inserted
        both = replace(
            repair,
            text=f"{repair.text}, and {each.text}",
            ops={**repair.ops, **each.ops},
            collectives={**repair.collectives, **each.collectives},
            operands={**repair.operands, **each.operands},
        )
        ops += [both] * bool(each.ops and not repair.ops)
        same += [both] * bool(may_repeat and is_alike and at and places.isdisjoint(at))
    return ops, same[: len(places) < _PLACES]


# ------------------------------------------------------------------------------ specs of inputs


def with_specs(call: Call, repair: Repair) -> Call:
    """Returns the call with the specs of inputs that a repair says."""
    specs, match = list(call.match.specs), call.match
    for position, spec in repair.in_specs.items():
        specs[position] = spec
    for position, axis in repair.replicate.items():
        specs[position] = replicated(specs[position], axis)
    return replace(call, match=Match(match.paths, tuple(specs), match.crossing))


def replicated(spec: P | None, axis: str) -> P:
    """Returns the spec with an axis named in `replicate=`."""
    assert spec is not None  # what has a gradient crosses
    replicate, invariant = spec.replicate | {axis}, spec.invariant - {axis}
    return P(*spec.entries, replicate=replicate, invariant=invariant, partial=spec.partial)


def other_specs(call: Call, inputs: Collection[int]) -> Iterator[Repair]:
    """Yields a spec for each of these inputs in turn, what inputs of its sizes have first.

    After each of them, one for all inputs of its spec and shape, as keys and values.
    """
    alike: dict[object, list[int]] = {}
    for at in call.crossing:
        alike.setdefault((call.match.spec(at), call.leaves[at].shape), []).append(at)
    several = [group for group in alike.values() if 1 < len(group) and {*group} & {*inputs}]
    groups = [*([at] for at in inputs), *several]
    each = [_of(call, group) for group in groups]
    return filter(None, chain.from_iterable(zip_longest(*each)))


def _of(call: Call, group: Sequence[int]) -> Iterator[Repair]:
    own, x = call.match.spec(group[0]), call.leaves[group[0]]
    if own.partial:
        return
    plain = [(None,) * dim + (axis,) for dim in range(x.ndim) for axis in call.mapped]
    for entries in dict.fromkeys([*_entries_of_others(call, group), *plain, ()]):
        named = {axis for _, axes in P(*entries).sharded_dims for axis in axes}
        spec = P(*entries, replicate=own.replicate - named, invariant=own.invariant - named)
        fits = not mismatches(spec, tuple(x.shape), call.mesh.shape)
        if fits and spec.sharded_dims != own.sharded_dims:
            names = " and ".join(call.match.paths[at] for at in group)
            yield Repair(f"{spec!r} for {names} in in_specs", in_specs=dict.fromkeys(group, spec))


def _entries_of_others(call: Call, group: Sequence[int]) -> list[tuple[Entry, ...]]:
    """Returns how other inputs are sharded, those first whose sizes are like these."""
    x = call.leaves[group[0]]

    def unlike(other: int) -> tuple[bool, bool, bool]:
        y = call.leaves[other]
        return x.shape != y.shape, x.shape[:1] != y.shape[:1], x.ndim != y.ndim

    others = [other for other in call.crossing if other not in group]
    return [call.match.spec(other).entries for other in sorted(others, key=unlike)]
