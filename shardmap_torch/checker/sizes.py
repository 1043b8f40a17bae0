"""Verdicts of one function at sizes that differ, and one for all that satisfy its guards.

Sizes that have differed are symbols of torch's, one for those that were always equal; a sharded dim
is a multiple of the number of its ranks. The body is interpreted with them, and each question about
a symbol is answered by the size at hand and noted: all notes together are the guard. A verdict is
used only if, at sizes that were checked as they are, it is the same program to the letter.
"""

import math
import operator
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf, lcm
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from shardmap_torch.boundary.call import Call, Result
from shardmap_torch.checker.api import program_of
from shardmap_torch.checker.guards.monitor import CheckedStep, copied
from shardmap_torch.checker.guards.state import CapturedState
from shardmap_torch.checker.ir.program import Equation, ProgramPath, Use
from shardmap_torch.checker.ir.sizes import SYMBOLS, Sizes, as_numbers
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.core.caching import drop_oldest
from shardmap_torch.core.torch_private.engine import Source

if TYPE_CHECKING:  # it takes a second to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


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


# ------------------------------------------------------------------------------ of one function


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
    match, leaves = call.match, call.leaves
    if len(match.crossing) + len(match.static) != len(leaves):
        return None
    static = zip(match.static, key[1], strict=True) if match.static else ()
    values = [value for at, value in static if type(leaves[at]) is not int]
    return (match.resized_from or match, *values, *key[2:])


def values_of(call: Call, captured: CapturedState) -> Mapping[Hashable, tuple[str, Any]]:
    """Returns names and values of sizes, by slots, and of static and captured data, by places."""
    sizes = zip(slots_of(call), numbers_of(call), strict=True)
    found: dict[Hashable, tuple[str, Any]] = {s: (s.name, n) for s, n in sizes if s.dim is not None}
    for position in call.match.static:
        path = call.match.paths[position]
        found[path] = path, call.leaves[position]
    for number, state in enumerate(captured.states(call)):
        found |= {(number, place): pair for place, pair in state.values().items()}
    return found


def _after(call: Call, verdict: Verdict, carried: int) -> tuple[int, ...]:
    """Returns the numbers of the next call, in which what has the size of the new cache grows too.

    Such as a mask, whose entries are no numbers that one computes with.
    """
    first, results = len(call.leaves) - carried, verdict.result.leaves
    before, slots = numbers_of(call), slots_of(call)
    after, steps = [*before], {}
    for at, slot in enumerate(slots):
        place = slot.position - first + len(results) - carried
        if slot.position >= first and slot.num_ranks == 1:
            known = verdict.outputs.get(place)
            after[at] = results[place] if slot.dim is None or known is None else known[0][slot.dim]
            if slot.dim is not None and after[at] != before[at]:
                steps[after[at]] = after[at] - before[at]
    for at, slot in enumerate(slots):
        leaf = call.leaves[slot.position]
        if slot.position < first and slot.dim is not None and not leaf.is_floating_point():
            after[at] += steps.get(before[at], 0)
    return tuple(after)


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

    def derive(
        self,
        call: Call,
        groups: "Sequence[Group]",
        check: "Check",
        witnesses: "Mapping[Numbers, Verdict]",
        exactly: Callable[[], Verdict],
    ) -> Verdict | None:
        """Derives a verdict for all sizes and keeps it; returns that on the call, if any."""
        numbers = numbers_of(call)
        try:
            general, verdict = derive(call, self.slots, groups, numbers, check, witnesses, exactly)
        except Exception as error:  # a body may raise anything where it meets no number
            self.failures.append(f"{type(error).__name__}: {error}".splitlines()[0])
            return None
        del self.generals[: len(self.generals) - _GENERALS + 1]
        self.generals.append(general)
        return verdict


class History:
    """The checks of one function, by what their calls have in common."""

    def __init__(self) -> None:
        self._families: dict[Hashable, _Family] = {}

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
        if family is None or len(family.failures) >= _FAILURES:
            return None
        numbers = numbers_of(call)
        exact = {each: v for each, v in family.exact.items() if _alike(family.slots, each, numbers)}
        groups = groups_of(family.slots, [*exact, numbers])
        if len(exact) < _BEFORE or not is_large(groups, numbers):
            return None
        witnesses = dict([*exact.items()][-_WITNESSES:])
        return family.derive(call, groups, check, witnesses, exactly)

    def foresee(
        self, key: Sequence[Any], call: Call, verdict: Verdict, carried: int, check: "Check"
    ) -> None:
        """Derives a verdict for all calls to come whose last arguments are the last results before.

        As a cache of keys and values grows by each token. `carried` tells how many they are.
        """
        family = self._family(key, call)
        if family is None or family.generals or family.failures:
            return
        numbers = numbers_of(call)
        groups = groups_of(family.slots, [numbers, _after(call, verdict, carried)])
        if is_large(groups, numbers):
            family.derive(call, groups, check, {numbers: verdict}, lambda: verdict)

    def add(self, key: Sequence[Any], call: Call, verdict: Verdict) -> None:
        """Notes a verdict on sizes as they are."""
        family = self._family(key, call, new=True)
        if family is not None:
            family.exact[numbers_of(call)] = verdict
            if len(family.exact) > _EXACT:
                drop_oldest(family.exact)

    def why(self, key: Sequence[Any], call: Call) -> str:
        """Says why no verdict holds for all sizes and numbers; empty if one may."""
        family = self._family(key, call)
        return family.failures[-1] if family is not None and family.failures else ""

    def forget(self, key: Sequence[Any], call: Call) -> None:
        """Forgets the verdicts on calls like this one, since a run of one has departed from it."""
        self._families.pop(layout_of(key, call), None)

    def _family(self, key: Sequence[Any], call: Call, new: bool = False) -> _Family | None:
        if not self._families and not new:
            return None
        layout = layout_of(key, call)
        try:
            family = self._families.get(layout)
        except TypeError:  # a static argument without a hash
            return None
        if family is None and new and layout is not None:
            if len(self._families) >= _LAYOUTS:
                drop_oldest(self._families)
            family = self._families[layout] = _Family(slots_of(call))
        return family


# ------------------------------------------------------------------------------- for all sizes


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


def groups_of(slots: Sequence[Slot], seen: Sequence[Numbers]) -> tuple[Group, ...]:
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


def _alike(slots: Sequence[Slot], seen: Numbers, now: Numbers) -> bool:
    """Returns whether a call had the sizes of 0 and 1 of this one; a prompt has not a token's."""
    found = zip(slots, seen, now, strict=True)
    return all(a == b or slot.dim is None or b // slot.num_ranks > 1 for slot, a, b in found)


def is_large(groups: Sequence[Group], numbers: Numbers) -> bool:
    """Returns whether symbols can stand for the numbers: sizes of 0 and 1 are other programs."""
    return bool(groups) and all(
        numbers[group.slots[0]] // group.multiple >= group.least for group in groups
    )


def derive(
    call: Call,
    slots: Sequence[Slot],
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
    env = _env_class()(duck_shape=False)
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


@cache
def _env_class() -> "type[ShapeEnv]":
    from torch.fx.experimental import symbolic_shapes

    shapes: Any = symbolic_shapes

    class Env(symbolic_shapes.ShapeEnv):
        """An environment that notes no stacks, to read which torch imports its compiler."""

        def _get_stack_summary(self, *args: Any, **kwargs: Any) -> tuple[Any, str]:
            return shapes.SLoc("", None), ""

    return Env


def _symbol(env: "ShapeEnv", number: int, group: Group, numbers: Numbers) -> Any:
    from torch.fx.experimental.symbolic_shapes import DimDynamic

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
    slots: Sequence[Slot],
    groups: Sequence[Group],
    symbols: Sequence[Any],
    env: "ShapeEnv",
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
    # torch writes the end of a slice that has none as a number, unless it meets a symbol.
    texts = [str(program_of(v)).replace(f", end={sys.maxsize}", "") for v in (found, exact)]
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
