"""A verdict on symbols at the sizes of one call: the same program, with numbers in it.

The numbers that depend on symbols are formulas: functions of their values, made once for a verdict
of the expressions that torch has noted. Nothing is evaluated as text.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from shardmap_torch.boundary.call import Result
from shardmap_torch.checker.guards.monitor import CheckedStep, copied
from shardmap_torch.checker.ir.program import Equation, ProgramPath, Use
from shardmap_torch.checker.ir.sizes import SYMBOLS
from shardmap_torch.checker.verify.verdict import Verdict


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
