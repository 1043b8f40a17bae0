"""Derives a verdict that holds for all sizes that satisfy its guards.

Sizes that have differed are symbols of torch's, one for those that were always equal; a sharded dim
is a multiple of the number of its ranks. The body is interpreted with them, and each question about
a symbol is answered by the size at hand and noted: all notes together are the guard. A verdict is
used only if, at sizes that were checked as they are, it is the same program to the letter.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, lcm
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from shardmap_torch.boundary.call import Call, Result
from shardmap_torch.checker.api import program_of
from shardmap_torch.checker.guards.monitor import CheckedStep, copied
from shardmap_torch.checker.ir.program import Equation, ProgramPath, Use
from shardmap_torch.checker.ir.sizes import SYMBOLS, Sizes, as_numbers
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.core.torch_private.engine import Source

if TYPE_CHECKING:  # the history derives such verdicts
    from shardmap_torch.checker.sizes.history import Slot


class NotGeneralError(Exception):
    """A verdict holds for the sizes at hand only; says why."""


class Formula:
    """A number that depends on symbols; called with their values."""

    def __init__(self, at: Callable[[Sequence[int]], Any]) -> None:
        self.at = at


Change = Callable[[Any], Any]
"""Makes a formula of a symbolic number, or a number of a formula; leaves all others."""


def _spread(function: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
    return lambda values: function(*values)


_FUNCTIONS: Final[Mapping[str, Callable[[Sequence[Any]], Any]]] = {
    **{"Add": sum, "Mul": math.prod, "Max": max, "Min": min, "And": all, "Or": any},
    **dict.fromkeys(("FloorDiv", "CleanDiv"), _spread(operator.floordiv)),
    **dict.fromkeys(("Mod", "PythonMod"), _spread(operator.mod)),
    **dict.fromkeys(("IntTrueDiv", "FloatTrueDiv"), _spread(operator.truediv)),
    **dict.fromkeys(("Pow", "PowByNatural", "FloatPow"), _spread(operator.pow)),
    **{"ToFloat": _spread(float), "Abs": _spread(abs), "Not": _spread(operator.not_)},
    **{"TruncToInt": _spread(math.trunc), "RoundToInt": _spread(round)},
    **{"FloorToInt": _spread(math.floor), "CeilToInt": _spread(math.ceil)},
    "OpaqueUnaryFn_sqrt": _spread(math.sqrt),
    **{"Equality": _spread(operator.eq), "Unequality": _spread(operator.ne)},
    **{"StrictLessThan": _spread(operator.lt), "LessThan": _spread(operator.le)},
    **{"StrictGreaterThan": _spread(operator.gt), "GreaterThan": _spread(operator.ge)},
}
"""Functions that torch's expressions stand for, by the names of their classes."""


class Formulas:
    """The formulas of one verdict, by expression."""

    def __init__(self, symbols: Sequence[Any]) -> None:
        """`symbols` are those of torch's expressions, in the order of their values."""
        self._known: dict[Any, Callable[[Sequence[int]], Any]] = {
            symbol: operator.itemgetter(at) for at, symbol in enumerate(symbols)
        }

    def of(self, value: Any) -> Any:
        """The formula of a symbolic number; any other value as it is."""
        return Formula(self.at(value.node.expr)) if isinstance(value, SYMBOLS) else value

    def at(self, expression: Any) -> Callable[[Sequence[int]], Any]:
        """Returns an expression as a function of the symbols' values.

        Raises:
            NotGeneralError: it is of a kind that is not known.
        """
        if expression not in self._known:
            self._known[expression] = self._made(expression)
        return self._known[expression]

    def _made(self, expression: Any) -> Callable[[Sequence[int]], Any]:
        name, parts = type(expression).__name__, [*map(self.at, expression.args)]
        if parts and name in _FUNCTIONS:
            function = _FUNCTIONS[name]
            return lambda values: function([part(values) for part in parts])
        if name.startswith("Boolean"):
            return lambda values: bool(expression)
        if parts or not expression.is_number:
            raise NotGeneralError(f"torch asks for {name}")
        number = int(expression) if expression.is_Integer else float(expression)
        return lambda values: number


def at_values(values: Sequence[int]) -> Change:
    """Returns what makes numbers of formulas."""
    return lambda value: value.at(values) if type(value) is Formula else value


def changed(verdict: Verdict, change: Change) -> Verdict:
    """Returns the verdict with other numbers; its program is made when it is asked for."""

    def shape(old: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([size if type(size) is int else change(size) for size in old])

    def step(old: CheckedStep) -> CheckedStep:
        new = object.__new__(CheckedStep)  # not dataclasses.replace, which looks up every field
        new.__dict__.update(vars(old))
        if old.shape is not None:
            new.shape = shape(old.shape)
        return new

    result = verdict.result
    outputs = {at: (shape(old), *rest) for at, (old, *rest) in verdict.outputs.items()}
    found = object.__new__(Verdict)
    found.__dict__.update(
        vars(verdict),
        match=verdict.match,  # the same for all sizes
        outputs=outputs,
        make_paths=lambda: tuple(_path(path, shape, change) for path in verdict.program_paths),
        result=Result([*map(change, result.leaves)], result.match, result.structure),
        start=copied(verdict.start, step),
    )
    found.__dict__.pop("program_paths", None)
    return found


def _path(path: ProgramPath, shape: Change, change: Change) -> ProgramPath:
    made = {id(equation): _equation(equation, shape, change) for equation in path.equations}
    for equation in made.values():
        if equation.forward is not None:
            equation.forward = made.get(id(equation.forward), equation.forward)
    return replace(path, equations=tuple(made.values()))


def _equation(equation: Equation, shape: Change, change: Change) -> Equation:
    def used(uses: Sequence[Use]) -> tuple[Use, ...]:
        return tuple([replace(use, shape=shape(use.shape)) for use in uses])

    def literal(value: Any) -> Any:
        nested = isinstance(value, list | tuple)
        return type(value)(map(literal, value)) if nested else change(value)

    return replace(
        equation,
        operands=used(equation.operands),
        results=used(equation.results),
        sent=change(equation.sent),
        literals=tuple([(name, literal(value)) for name, value in equation.literals]),
    )


Numbers: TypeAlias = tuple[int, ...]
"""The numbers in the slots of a call."""

Check: TypeAlias = Callable[[Call, Sizes], Verdict]


@dataclass(frozen=True)
class Group:
    """Slots that have always been equal.

    Attributes:
        slots: positions among the slots.
        multiple: the number in them is a multiple of this one: each dim is sharded evenly.
        least: the smallest number of multiples that the symbol stands for.
    """

    slots: tuple[int, ...]
    multiple: int
    least: float


@dataclass(frozen=True)
class General:
    """A verdict on symbols.

    Attributes:
        verdict: has formulas where it depends on them.
        groups: what the symbols stand for.
        fixed: the slots that are no symbols, and what stands in them.
        guards: whether each question has the answer that was noted, by the symbols' values.
    """

    verdict: Verdict
    groups: tuple[Group, ...]
    fixed: Mapping[int, int]
    guards: Sequence[Callable[[Sequence[int]], Any]]

    def find(self, numbers: Numbers) -> Verdict | None:
        """Returns the verdict for these sizes, if it holds for them."""
        values = self._values(numbers)
        if values is None:
            return None
        try:
            holds = all([guard(values) for guard in self.guards])
        except ArithmeticError:  # a step of 0, by which nothing was divided when it was derived
            return None
        return changed(self.verdict, at_values(values)) if holds else None

    def _values(self, numbers: Numbers) -> list[int] | None:
        if [numbers[slot] for slot in self.fixed] != [*self.fixed.values()]:
            return None
        values = []
        for group in self.groups:
            first, *others = [numbers[slot] for slot in group.slots]
            value, rest = divmod(first, group.multiple)
            if rest or value < group.least or others.count(first) < len(others):
                return None
            values.append(value)
        return values


def groups_of(slots: "Sequence[Slot]", seen: Sequence[Numbers]) -> tuple[Group, ...]:
    """Groups the slots that have differed from call to call by those that were always equal."""
    columns: dict[Numbers, list[int]] = {}
    for at, column in enumerate(zip(*seen, strict=True)):
        if len(set(column)) > 1:
            columns.setdefault(column, []).append(at)
    groups = []
    for members in columns.values():
        multiple = lcm(*[slots[at].num_ranks for at in members])
        is_size = any(slots[at].dim is not None for at in members)
        # torch takes sizes of 0 and 1 for other programs: they broadcast, or have no entries.
        groups.append(Group(tuple(members), multiple, 2 if is_size else -inf))
    return tuple(groups)


def is_large(groups: Sequence[Group], numbers: Numbers) -> bool:
    """Returns whether symbols can stand for the numbers: sizes of 0 and 1 are other programs."""
    return bool(groups) and all(
        numbers[group.slots[0]] // group.multiple >= group.least for group in groups
    )


def derive(
    call: Call,
    slots: "Sequence[Slot]",
    groups: Sequence[Group],
    numbers: Numbers,
    check: Check,
    witnesses: Mapping[Numbers, Verdict],
    exactly: Callable[[], Verdict],
) -> tuple[General, Verdict]:
    """Derives a verdict on all sizes like those of a call; returns it, and that on the call.

    Args:
        call: the call, whose numbers are the last of those seen.
        slots: of the call.
        groups: the slots that get symbols.
        numbers: those of the call.
        check: interprets the body.
        witnesses: verdicts on numbers as they are.
        exactly: makes the one on the call, for want of a witness.

    Raises:
        NotGeneralError: the verdict holds for these numbers only.
    """
    env = ShapeEnv(duck_shape=False)
    symbols = [_symbol(env, number, group, numbers) for number, group in enumerate(groups)]
    formulas = Formulas([symbol.node.expr for symbol in symbols])
    verdict = changed(check(*_with_symbols(call, slots, groups, symbols, env)), formulas.of)
    verdict.program_paths  # noqa: B018 - made now, while torch's expressions are there
    fixed = set(range(len(slots))) - {slot for group in groups for slot in group.slots}
    guards = [formulas.at(expr) for expr in dict.fromkeys(guard.expr for guard in env.guards)]
    general = General(
        verdict, tuple(groups), {slot: numbers[slot] for slot in sorted(fixed)}, guards
    )
    if all(not symbol.node.expr.free_symbols for symbol in symbols):
        raise NotGeneralError("the body uses it as a plain number, such as an index or a key")
    if env.deferred_runtime_asserts:
        raise NotGeneralError("torch has put a question off to the run")
    own = general.find(numbers)
    if own is None:
        raise NotGeneralError("its guards do not hold where they were noted")
    pairs = [(general.find(other), exact) for other, exact in witnesses.items()]
    compared = [(found, exact) for found, exact in pairs if found is not None]
    for found, exact in compared or [(own, exactly())]:
        _require_same(found, exact)
    return general, own


@dataclass(frozen=True)
class _Named(Source):
    """The name under which torch keeps a symbol."""

    text: str

    @property
    def _name_template(self) -> str:
        return self.text


def _symbol(env: ShapeEnv, number: int, group: Group, numbers: Numbers) -> Any:
    hint = numbers[group.slots[0]] // group.multiple
    is_size = group.least > 0
    made = env.create_symbol(
        hint,
        _Named(f"size {number}"),
        dynamic_dim=DimDynamic.DYNAMIC,
        positive=True if is_size else None,
        do_not_specialize_zero_one=not is_size,
    )
    symbol = env.create_symintnode(made, hint=hint)
    if not isinstance(symbol, torch.SymInt):
        raise NotGeneralError("torch makes no symbol of it")
    return symbol


def _with_symbols(
    call: Call,
    slots: "Sequence[Slot]",
    groups: Sequence[Group],
    symbols: Sequence[Any],
    env: ShapeEnv,
) -> tuple[Call, Sizes]:
    """Returns the call with symbols for sizes and numbers."""
    leaves, shapes = list(call.leaves), {}
    for position in call.crossing:
        shapes[position] = list(call.leaves[position].shape)
    for group, symbol in zip(groups, symbols, strict=True):
        for slot in map(slots.__getitem__, group.slots):
            value = symbol if group.multiple == 1 else symbol * group.multiple
            if slot.dim is None:
                leaves[slot.position] = as_numbers(value)
            else:
                shapes[slot.position][slot.dim] = value
    found = {position: tuple(shape) for position, shape in shapes.items()}
    return replace(call, leaves=leaves), Sizes(env, found)


def _require_same(found: Verdict, exact: Verdict) -> None:
    """Requires that a verdict is, at sizes that were checked as they are, the one found there."""
    texts = [str(program_of(verdict)) for verdict in (found, exact)]
    facts = [
        (
            *(v.specs, v.crossing, v.exits, v.outputs),
            *(v.batches, v.traits.draws, v.traits.takes_gradients, v.refusal and str(v.refusal)),
            [(type(leaf), leaf) for leaf in v.result.leaves],
        )
        for v in (found, exact)
    ]
    if texts[0] != texts[1] or facts[0] != facts[1]:
        raise NotGeneralError("at some size it is another program")
    if _monitored(found) != _monitored(exact):
        raise NotGeneralError("at some size it asks something else of its mesh")


def _monitored(verdict: Verdict) -> list[tuple[Any, ...]]:
    """Lists all with which runs are compared."""
    return [
        (s.what, s.shape, s.dtype, s.note, s.last, s.crossing.casts, len(s.next), {*s.later})
        for s in verdict.start.walk()
    ]
