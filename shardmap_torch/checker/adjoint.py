"""Types of gradients in a body, noted by a check for batched runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from torch import Tensor

from shardmap_torch.checker.interpreter.modes import current_interpreter
from shardmap_torch.checker.ir.program import Equation
from shardmap_torch.collectives.protocol import Note
from shardmap_torch.core.functorch import base_of
from shardmap_torch.types import AxisType, I, R, Z

_NEVER: Final[tuple[AxisType, ...]] = (Z,)
"""Noted where they are not, or differ from path to path; fewer than those of one value."""


@contextmanager
def adjoint_of_ranks(note: Note | None) -> Iterator[Callable[[Sequence[Tensor]], None]]:
    """Gives what notes the types of leaves, their gradients and the value that is differentiated.

    It notes them where the gradients that are computed in this context, by the transposes of the
    collectives, are also the derivative of the program of all ranks.
    """
    interpreter = current_interpreter()
    start = 0 if interpreter is None else len(interpreter.equations)

    def write(values: Sequence[Tensor]) -> None:
        if interpreter is None or note is None:
            return
        found = _NEVER
        if not interpreter.traits.applies_functions and all(
            map(_is_derivative, interpreter.equations[start:])
        ):
            fakes = [interpreter.fakify(base_of(x)) for x in values]
            found = tuple(each for x in fakes for each in interpreter.storage_type(x).types)
        # Paths that look the same to a run share the note.
        note.types = found if note.types in ((), found) else _NEVER

    yield write


def _is_derivative(equation: Equation) -> bool:
    """Returns whether the transpose of a collective, if it is one, is its derivative.

    One from R to I keeps the gradient of a single rank, and others may round it.
    """
    collective = equation.collective
    if collective is None:
        return True
    is_rounded = (collective.comm_dtype, collective.grad_comm_dtype) != (None, None)
    return not is_rounded and (collective.src, collective.dst) != (R, I)
