"""A verdict on symbols at the sizes of one call: the same program, with numbers in it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

import torch

from shardmap_torch.boundary.call import Result
from shardmap_torch.checker.guards.replay import Step, copied
from shardmap_torch.checker.ir.program import Equation, KernelCollective, ProgramPath, Use
from shardmap_torch.checker.sizes.symbols_as_numbers import MARKED, NUMBERS, expression, is_symbol
from shardmap_torch.checker.verify.verdict import Verdict

NAMES: Mapping[str, Any] = {"math": math, "torch": torch}
"""The names in expressions, but for their symbols."""


class Values:
    """The values of expressions, given those of the symbols."""

    def __init__(self, codes: dict[str, CodeType], symbols: Mapping[str, int]) -> None:
        """`codes` remembers expressions from one set of values to the next."""
        self._codes, self._names = codes, {**NAMES, **symbols}
        self._known: dict[str, Any] = {}

    def of(self, value: Any) -> Any:
        """The number that a symbolic one is; any other value as it is."""
        if is_symbol(value):
            return self._at(expression(value))
        kind = NUMBERS.get(type(value))
        return value if kind is None else kind(value)  # a symbol that has one value

    def shape(self, shape: Sequence[Any]) -> tuple[int, ...]:
        """The sizes of a shape."""
        return tuple([size if type(size) is int else self.of(size) for size in shape])

    def text(self, text: str) -> str:
        """A text with numbers in the places of marked expressions."""
        return MARKED.sub(lambda found: repr(self._at(found[1])), text) if "⟦" in text else text

    def _at(self, text: str) -> Any:
        known = self._known.get(text)
        if known is None:
            code = self._codes.get(text)
            if code is None:
                code = self._codes[text] = compile(text, "<size>", "eval")
            known = self._known[text] = eval(code, {}, self._names)  # of torch's own printer
        return known


def verdict_at(general: Verdict, values: Values) -> Verdict:
    """The verdict at the values of one call."""
    leaves = [values.of(leaf) for leaf in general.result.leaves]
    outputs = {
        position: (values.shape(shape), dtype, types)
        for position, (shape, dtype, types) in general.outputs.items()
    }
    # Not dataclasses.replace, which takes as long as all the rest.
    found = object.__new__(Verdict)
    found.__dict__.update(
        vars(general),
        match=general.match,  # the same for all sizes
        outputs=outputs,
        # A run does not ask for the program.
        make_paths=lambda: tuple(_path(path, values) for path in general.program_paths),
        result=Result(leaves, general.result.match, general.result.structure),
        start=copied(general.start, lambda step: _step(step, values)),
    )
    found.__dict__.pop("program_paths", None)
    return found


def _step(step: Step, values: Values) -> Step:
    shape = None if step.shape is None else torch.Size(values.shape(step.shape))
    # Not dataclasses.replace, which looks up every field of every step.
    return Step(
        *(step.what, shape, step.dtype, step.depth, step.types, step.note, step.site),
        last=step.last,
        crossing=step.crossing,
    )


def _path(path: ProgramPath, values: Values) -> ProgramPath:
    made: dict[int, Equation] = {}
    for equation in path.equations:
        made[id(equation)] = _equation(equation, values)
    for equation in made.values():
        if equation.forward is not None:
            equation.forward = made.get(id(equation.forward), equation.forward)
    return replace(path, equations=tuple(made.values()))


def _equation(equation: Equation, values: Values) -> Equation:
    return replace(
        equation,
        name=values.text(equation.name),
        operands=tuple(_use(use, values) for use in equation.operands),
        results=tuple(_use(use, values) for use in equation.results),
        sent=values.of(equation.sent),
        literals=values.text(equation.literals),
        compared=tuple(_compared(each, values) for each in equation.compared),
    )


def _use(use: Use, values: Values) -> Use:
    return replace(use, shape=values.shape(use.shape))


def _compared(collective: KernelCollective, values: Values) -> KernelCollective:
    return replace(
        collective,
        collective=values.text(collective.collective),
        operand=values.text(collective.operand),
        sent=values.of(collective.sent),
    )
