"""What a check finds out about gradients in a body that a batched run needs to know."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from shardmap_torch.checker.interpreter.modes import current_interpreter
from shardmap_torch.checker.ir.program import Equation
from shardmap_torch.collectives.protocol import Note
from shardmap_torch.core.functorch import base_of
from shardmap_torch.types import I, R


@contextmanager
def adjoint_of_ranks(note: Note | None) -> Iterator[Callable[[Sequence[Tensor]], None]]:
    """Gives what notes the types of gradients and of the value that is differentiated.

    It notes them where the gradients that are computed in this context, by the transposes of the
    collectives, are also the derivative of the program of all ranks; elsewhere, and outside of a
    check, it notes nothing.
    """
    interpreter = current_interpreter()
    start = 0 if interpreter is None else len(interpreter.equations)

    def write(values: Sequence[Tensor]) -> None:
        if interpreter is None or note is None or note.value:
            return
        made = interpreter.equations[start:]
        if interpreter.applies_functions or not all(map(_is_derivative, made)):
            note.value, note.types = True, ()
            return
        rows = [interpreter.storage_type(interpreter.fakify(base_of(x))).types for x in values]
        found = tuple(axis_type for row in rows for axis_type in row)
        if note.types not in ((), found):  # on another path, which looks the same to a run
            note.value, found = True, ()
        note.types = found

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
