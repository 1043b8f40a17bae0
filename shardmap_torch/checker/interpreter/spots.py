"""Spots: the calls of a body that is tried with a repair, where repairs may be put.

Nothing here runs in the check of a program, only once it has been refused.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from shardmap_torch.checker.ir.insertions import (
    LIKELY,
    State,
    chain_of,
    distinct,
    exchange,
    gathered,
    inserts,
    numbered,
    scalings,
    state_of,
    with_inserted,
)
from shardmap_torch.checker.ir.observer import UNOBSERVED
from shardmap_torch.checker.ir.program import Equation
from shardmap_torch.checker.ir.repairs import (
    NUMBER,
    Insert,
    Op,
    Place,
    Repair,
    Scaling,
    Spot,
    applied,
    insertion,
    is_divided,
    note_reached,
    propose,
    proposed,
    reduction,
)
from shardmap_torch.checker.rewrites.table import METADATA
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.autograd_state import NONE as NO_BACKWARD
from shardmap_torch.core.autograd_state import running_backward
from shardmap_torch.core.functorch import base_of, is_batched
from shardmap_torch.core.source_location import Site, calling
from shardmap_torch.core.tree import flatten
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.spec import P

if TYPE_CHECKING:  # for annotations; the interpreter calls this module
    from shardmap_torch.checker.interpreter.interpreter import Interpreter


Call = tuple[Spot, Sequence[Tensor]]


_OTHER: Final[Mapping[str, Op]] = {"sum": "mean", "mean": "sum"}


class Spots:
    """Counts the calls of a body, applies the repair that is tried, and proposes more of it.

    Attributes:
        total: how many calls there were, of collectives too: how far the check has come.
        runs: how often each has run.
        numbers: the Python numbers that each run of a call gets.
        issued: the number of collectives at each line.
        calls: the positions in the code of each line from which it calls each function.
        there: the same on one device, if that is known.
        now: the call that goes on, or was the last.
    """

    def __init__(self, interpreter: "Interpreter", repair: Repair) -> None:
        self._interpreter, self._inserted = interpreter, repair.inserted
        self._ops = repair.ops
        self.total, self.runs = 0, Counter[Spot]()
        self.numbers: dict[Spot, list[float]] = {}
        self.issued = Counter[Site | None]()
        self.calls: dict[tuple[Site, str], dict[int, None]] = {}
        self.there = self
        self._factors: dict[str, Repair] = {}
        self._scaled: dict[str, Repair] = {}
        self.is_inserting, self._own = False, set[int]()
        self.now: Call | None = None
        self._collective: tuple[Place, Collective, Tensor] | None = None
        self._gathers: list[tuple[int, Place, Collective, Tensor]] = []
        self._starts: list[tuple[int, Call]] = []

    def enter(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Counts a call of a function of torch; returns its arguments, repaired."""
        if func in METADATA or running_backward() != NO_BACKWARD or self.is_inserting:
            return args, kwargs
        self.now, found = None, calling(sys._getframe(2))
        if found is None:
            return args, kwargs
        name = getattr(func, "__name__", "").strip("_") or "a function"
        base = self._call(Spot(*found, name))
        spot = replace(base, run=self.runs[base])
        self.runs[base] += 1
        self.total += 1
        if self._inserted:
            with self.inserting():
                args, kwargs = with_inserted(spot, self._inserted, args, kwargs)
        self.now = spot, distinct([*args, *kwargs.values()])
        self._note_numbers(spot, args, kwargs)
        self._starts.append((len(self._interpreter.equations), self.now))
        return args, kwargs

    def forget_tensors(self) -> None:
        """Drops all tensors, at the end."""
        self.now = self._collective = None
        self._gathers.clear()
        self._starts.clear()

    def leave(self, now: Call | None, out: Any) -> Any:
        """Returns the result of a call, repaired."""
        if now is None or not isinstance(out, Tensor):
            return out
        spot = replace(now[0], index=-1)
        if self._inserted:
            with self.inserting():
                out = applied(chain_of(spot, self._inserted), out)
        scale = self._scale(out)
        if scale != 1 and all(self._scale(x) == 1 for x in now[1]):
            self._rescale(self._scaled, spot, 1 / scale)
        return out

    def _call(self, spot: Spot) -> Spot:
        """Returns the spot of a call, which says which it is if its line has several."""
        self.calls.setdefault((spot.site, spot.name), {})[spot.at] = None
        known = [*self.there.calls.get((spot.site, spot.name), {spot.at: None})]
        if len(known) < 2 or spot.at not in known:
            return spot
        return replace(spot, which=f" (call {known.index(spot.at) + 1} of {len(known)} there)")

    # ----------------------------------------------------------------------------- factors

    @property
    def factors(self) -> Sequence[Repair]:
        """The repairs of numbers, and of values that are multiples of those on one device."""
        return [*self._factors.values(), *self._scaled.values()]

    def enter_reduction(self, op: str, axes: Sequence[str], x: object) -> str:
        """Returns the op of a reduction that a body calls, under the repair that is tried."""
        called = None if self.is_inserting else reduction()
        if called is None:
            return op
        self.runs[called] += 1
        spot = self._call(called)
        op = self._ops.get(spot, op)
        other = _OTHER.get(op)
        if other is not None and self._interpreter.mesh.num_ranks(axes) > 1:
            is_scaled = any(self._scale(y) != 1 for y in flatten(x)[0] if isinstance(y, Tensor))
            if is_scaled == (op == "sum"):
                text = f"op={other!r} in {spot.called}"
                self._factors[text] = Repair(text, ops={spot: other})
        return op

    def _scale(self, x: Tensor) -> Fraction:
        observer = self._interpreter.observer
        if observer is UNOBSERVED:
            return observer.scale_of(x)
        return observer.scale_of(base_of(self._interpreter.fakify(x)))

    def _note_numbers(self, spot: Spot, args: Any, kwargs: Any) -> None:
        """Notes the numbers that a call gets, and proposes those that one device has."""
        leaves, _, indices = numbered(args, kwargs)
        found = [x for x, at in zip(leaves, indices, strict=True) if (at or 0) <= NUMBER]
        self.numbers[spot] = found
        there = self.there.numbers.get(spot, found)
        for at, (x, y) in enumerate(zip(found, there, strict=False)):
            if x != y and x != 0:
                which = replace(spot, index=NUMBER - at, number=repr(x))
                self._rescale(self._factors, which, y / x)

    def _rescale(self, into: dict[str, Repair], spot: Spot, ratio: Fraction | float) -> None:
        for each in scalings(float(ratio), self._interpreter.mesh.shape):
            repair = insertion(replace(spot, run=None), [each])
            into[repair.text] = repair

    @contextmanager
    def inserting(self) -> Iterator[None]:
        """Marks calls in this context as those of the repair."""
        self.is_inserting, before = True, len(self._interpreter.equations)
        try:
            yield
        finally:
            self.is_inserting = False
            self._own.update(map(id, self._interpreter.equations[before:]))

    def enter_collective(self, place: Place, collective: Collective, x: Tensor) -> None:
        """Counts a collective that the body calls."""
        self.total += 1
        self.now = None
        self.issued[place[0]] += 1
        self._collective = place, collective, x
        if collective.name == "all_gather":
            self._gathers.append((len(self._interpreter.equations), place, collective, x))

    def step(self, is_backward: bool) -> float:
        """Returns how far the check has come, a backward after all calls until then.

        Where types are wrong on one device too, nothing is compared with it, which comes later.
        """
        equations, observer = self._interpreter.equations, self._interpreter.observer
        compared = (observer is not UNOBSERVED) * 1e6
        known = sum(self._own.isdisjoint((id(each), id(each.forward))) for each in equations)
        return compared + self.total + is_backward * (0.5 + known / 1e6)

    def locate(self, error: ShardTypeError, equation: Equation | None = None) -> None:
        """Attaches to an error how far the check came, and what could be put where it fails.

        `equation` is the step of a backward from which the error comes.
        """
        is_backward = equation is not None or running_backward() != NO_BACKWARD
        if not note_reached(error, self.step(is_backward)):
            return
        if equation is None and is_backward:
            equation = self._interpreter.forward_of_current_node()
        now = self.now if equation is None else self._call_of(equation)
        more: list[Repair] = []
        if now is not None:
            more = list(self._insertions(*now))
        elif self._collective is not None and equation is None:
            place, collective, x = self._collective
            is_repeated = self.there.issued[place[0]] > 1
            more = list(exchange(collective, place, self.state(x)[0], is_repeated))
            if is_divided():  # as what is put in its place must not be
                called = reduction()
                runs = 2 if called is None else self.there.runs[called]
                kept = [each for each in more if runs < 2 or (called and each.left_out)]
                more = [replace(each, ops={called: "sum"}) for each in kept if called is not None]
            made = self._interpreter.storage_type(x).made
            maker = None if made is None else self._call_of(made)
            if maker is not None:
                spot = replace(maker[0], index=-1)
                state, own = self.state(x)
                for kind, each in inserts(state, x.ndim, (), own):
                    more += self._runs(spot, each) if kind in "PSV" else ()
        propose(error, [*proposed(error), *self.factors, *more])

    def _call_of(self, equation: Equation) -> Call | None:
        """Returns the call that an equation, or its forward, is part of."""
        forward = equation.forward if equation.backward else equation
        equations = self._interpreter.equations
        at = next((at for at, each in enumerate(equations) if each is forward), -1)
        found = [call for start, call in self._starts if start <= at]
        return found[-1] if found else None

    def state(self, x: Tensor) -> tuple[State, P | None]:
        """Returns what is known of a tensor: along each axis, and its layout."""
        interpreter = self._interpreter
        base = base_of(interpreter.fakify(x))
        types, spec = interpreter.storage_type(base).types, interpreter.observer.spec_of(base)
        return state_of(interpreter.by_axis(types), spec, interpreter.mesh.shape), spec

    def regathers(self, x: Tensor) -> Iterator[Repair]:
        """Yields gathers of the dim that is sharded, in place of one of another that made `x`."""
        made = self._interpreter.storage_type(base_of(x)).made
        for start, place, collective, operand in self._gathers:
            if made is not None and self._interpreter.equations[start : start + 1] == [made]:
                for each in exchange(collective, place, self.state(operand)[0]):
                    other = each.collectives.get(place)
                    if other is not None and other.name == "all_gather":
                        yield each

    def _insertions(self, spot: Spot, tensors: Sequence[Tensor]) -> Iterator[Repair]:
        yield from self._shared(spot)
        known = [self.state(x) for x in tensors]
        found: list[tuple[int, Spot, Insert]] = []
        for index, (x, (state, spec)) in enumerate(zip(tensors, known, strict=True)):
            if is_batched(x):
                continue
            yield from self.regathers(x)
            others = zip(tensors, known, strict=True)
            peers = [(other, y.ndim) for y, (other, _) in others if y is not x]
            for kind, each in inserts(state, x.ndim, peers, spec):
                found.append((LIKELY.index(kind), replace(spot, index=index), each))
        for _, where, each in sorted(found, key=itemgetter(0)):
            yield from self._runs(where, each)
        for index, (state, _) in enumerate(known):
            yield from gathered(replace(spot, index=index, run=None), state)

    def _shared(self, spot: Spot) -> Iterator[Repair]:
        """Yields each rank's part of the sizes that a call gets."""
        for at, x in enumerate(self.numbers[spot]):
            for axis, size in self._interpreter.mesh.shape.items():
                if isinstance(x, int) and size > 1 and x > 1 and x % size == 0:
                    which = replace(spot, index=NUMBER - at, number=repr(x), run=None)
                    yield insertion(which, [Scaling(axis, "//")])

    def _runs(self, spot: Spot, insert: Insert) -> Iterator[Repair]:
        """Yields the repair in all runs of a line, and in this one if there are several."""
        yield insertion(replace(spot, run=None), [insert])
        if self.there.runs.get(replace(spot, index=0, run=None), 0) > 1:
            yield insertion(spot, [insert])
