"""Spots: the calls of a body that is tried with a repair, where repairs may be put.

Nothing here runs in the check of a program, only once it has been refused.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from shardmap_torch import ops
from shardmap_torch.checker.ir.insertions import LIKELY, State, exchange, inserts, state_of
from shardmap_torch.checker.ir.observer import UNOBSERVED
from shardmap_torch.checker.ir.program import Equation
from shardmap_torch.checker.ir.repairs import (
    Insert,
    Place,
    Repair,
    Spot,
    applied,
    insertion,
    note_reached,
    propose,
    proposed,
)
from shardmap_torch.checker.rewrites.table import METADATA
from shardmap_torch.checker.rules.infer import tensors_of
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.autograd_state import NONE as NO_BACKWARD
from shardmap_torch.core.autograd_state import running_backward
from shardmap_torch.core.functorch import base_of, is_batched
from shardmap_torch.core.source_location import calling
from shardmap_torch.core.tree import flatten, unflatten
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.spec import P

if TYPE_CHECKING:  # for annotations; the interpreter calls this module
    from shardmap_torch.checker.interpreter.interpreter import Interpreter


Call = tuple[Spot, Sequence[Tensor]]


def distinct(values: Any) -> list[Tensor]:
    """Returns the tensors that a call gets, each of them once."""
    return list({id(x): x for value in values for x in tensors_of(value)}.values())


def with_inserted(
    spot: Spot, inserted: Mapping[Spot, Sequence[Insert]], args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Returns the arguments of a call, with a repair applied to those tensors that it names."""
    changed: dict[int, Tensor] = {}
    for index, x in enumerate(distinct([*args, *kwargs.values()])):
        chain = chain_of(replace(spot, index=index), inserted)
        if chain:
            changed[id(x)] = applied(chain, x)
    if not changed:
        return args, kwargs
    leaves, structure = flatten((tuple(args), kwargs))
    given: tuple[Any, Any] = unflatten(structure, [changed.get(id(x), x) for x in leaves])
    return given


def chain_of(spot: Spot, inserted: Mapping[Spot, Sequence[Insert]]) -> Sequence[Insert]:
    """Returns what is inserted at a spot, in this run or in all."""
    return inserted.get(spot, inserted.get(replace(spot, run=None), ()))


_DIVIDING: Final = (ops.all_reduce.__code__, ops.reduce_scatter.__code__)


def is_divided() -> bool:
    """Returns whether the collective that is issued now is one with op="mean".

    What is put in its place would be divided as well, and another program than what is printed.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _DIVIDING:
            return bool(frame.f_locals["op"] == "mean")
        frame = frame.f_back
    return False


class Spots:
    """Counts the calls of a body, applies the repair that is tried, and proposes more of it.

    Attributes:
        total: how many calls there were, of collectives too: how far the check has come.
        runs: how often each has run.
        all_runs: how often each runs on one device, if that is known.
        now: the call that goes on, or was the last.
    """

    def __init__(self, interpreter: "Interpreter", repair: Repair) -> None:
        self._interpreter, self._inserted = interpreter, repair.inserted
        self.total, self.runs = 0, Counter[Spot]()
        self.all_runs: Mapping[Spot, int] = self.runs
        self.is_inserting = False
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
        base = Spot(*found, name)
        spot = replace(base, run=self.runs[base])
        self.runs[base] += 1
        self.total += 1
        if self._inserted:
            with self.inserting():
                args, kwargs = with_inserted(spot, self._inserted, args, kwargs)
        self.now = spot, distinct([*args, *kwargs.values()])
        self._starts.append((len(self._interpreter.equations), self.now))
        return args, kwargs

    def leave(self, now: Call | None, out: Any) -> Any:
        """Returns the result of a call, repaired."""
        if now is None or not self._inserted or not isinstance(out, Tensor):
            return out
        with self.inserting():
            return applied(chain_of(replace(now[0], index=-1), self._inserted), out)

    @contextmanager
    def inserting(self) -> Iterator[None]:
        """Marks calls in this context as those of the repair."""
        self.is_inserting = True
        try:
            yield
        finally:
            self.is_inserting = False

    def enter_collective(self, place: Place, collective: Collective, x: Tensor) -> None:
        """Counts a collective that the body calls."""
        self.total += 1
        self.now = None
        self._collective = None if is_divided() else (place, collective, x)
        if collective.name == "all_gather":
            self._gathers.append((len(self._interpreter.equations), place, collective, x))

    def step(self, is_backward: bool) -> float:
        """Returns how far the check has come, a backward after all calls until then.

        Where types are wrong on one device too, nothing is compared with it, which comes later.
        """
        equations, observer = self._interpreter.equations, self._interpreter.observer
        compared = (observer is not UNOBSERVED) * 1e6
        return compared + self.total + is_backward * (0.5 + len(equations) / 1e6)

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
            more = list(exchange(collective, place, self.state(x)[0]))
            made = self._interpreter.storage_type(x).made
            maker = None if made is None else self._call_of(made)
            if maker is not None:
                spot = replace(maker[0], index=-1)
                state, own = self.state(x)
                for kind, each in inserts(state, x.ndim, (), own):
                    more += self._runs(spot, each) if kind in "PSV" else ()
        propose(error, [*proposed(error), *more])

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
                    other = each.collectives[place]
                    if other is not None and other.name == "all_gather":
                        yield each

    def _insertions(self, spot: Spot, tensors: Sequence[Tensor]) -> Iterator[Repair]:
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

    def _runs(self, spot: Spot, insert: Insert) -> Iterator[Repair]:
        """Yields the repair in all runs of a line, and in this one if there are several."""
        yield insertion(replace(spot, run=None), [insert])
        if self.all_runs.get(replace(spot, index=0, run=None), 0) > 1:
            yield insertion(spot, [insert])
