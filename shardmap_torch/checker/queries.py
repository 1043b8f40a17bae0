"""Queries of layers and optimizers while a body is checked; in a run they cost nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any, Final

from torch import Tensor

from shardmap_torch.checker.assertions import types_in_check
from shardmap_torch.checker.interpreter.interpreter import Setting, current_interpreter
from shardmap_torch.checker.ir.observer import UNOBSERVED
from shardmap_torch.checker.ir.program import Equation
from shardmap_torch.checker.ir.repairs import Insert, Repair, propose
from shardmap_torch.checker.region import local_region, note_region
from shardmap_torch.collectives.protocol import Note
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.tree import flatten
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, R, Z


def types_now(x: Tensor) -> Mapping[str, AxisType] | None:
    """Returns the types of `x` along each axis in a check; None in a run, and on one device.

    Unlike `typeof`, it is no step of the program.
    """
    interpreter = current_interpreter()
    if interpreter is None or not interpreter.observer.judges:
        return None
    return types_in_check(interpreter, x)


def loss_by_repair(loss: Tensor) -> Tensor:
    """Returns what the repair that is tried makes of a loss; the loss where none is."""
    interpreter = current_interpreter()
    losses = {} if interpreter is None else interpreter.repair.losses
    mean = losses.get(call_site()) if losses else None
    return loss if mean is None else mean.apply(loss)


def means_over(x: Tensor, axes: Sequence[str]) -> str | tuple[str, ...] | None:
    """Returns those of `axes` over which a pending sum would add up means of each rank's part.

    None where it adds up parts, in a run, and under local strictness, which cannot tell.
    """
    interpreter = current_interpreter()
    scale = 1 if interpreter is None else interpreter.observer.scale_of(interpreter.fakify(x))
    if interpreter is None or scale <= 1:
        return None
    sizes = interpreter.mesh.shape
    one = [axis for axis in axes if sizes[axis] == scale]
    several = tuple(axes) if prod(sizes[axis] for axis in axes) == scale else None
    return one[0] if one else several


def propose_mean(error: ShardTypeError, gradient: Tensor, axis: str | tuple[str, ...]) -> None:
    """Proposes to average the loss of a gradient."""
    interpreter = current_interpreter()
    assert interpreter is not None  # it has found the means
    made = interpreter.storage_type(interpreter.fakify(gradient)).made
    if made is not None and made.site is not None:
        mean = Insert("all_reduce", axis, (("dst", I), ("op", "mean")))
        text = f"{mean.of('loss')} for the loss that is differentiated at {made.site.place}"
        propose(error, [Repair(text, losses={made.site: mean})])


def in_place_of_batched() -> AbstractContextManager[object]:
    """Returns a context for operators in a check that batched bodies do without."""
    interpreter = current_interpreter()
    if interpreter is None:
        return nullcontext()
    # What they have in place of an operator of their own is no reason to run ranks.
    return Setting(interpreter.traits, rank_only=interpreter.traits.rank_only)


def call_region(
    function: Callable[..., Any],
    types: Callable[[Sequence[P], Sequence[int]], tuple[Any, Any]],
    *args: Tensor,
) -> Any:
    """Calls a `local_region` whose types follow from the layouts of its arguments.

    Args:
        function: takes tensors.
        types: computes `in_types` and `out_types` from the arguments' layouts and numbers of dims.
        args: the tensors.
    """
    interpreter = current_interpreter()
    if interpreter is None:
        return function(*args)
    observer = interpreter.observer
    # Not under global strictness, or computed again in a backward: layouts are unknown.
    if observer is UNOBSERVED or observer.is_ignored:
        out = function(*args)
        note_region(interpreter, function.__name__, args, flatten(out)[0])
        return out
    layouts = [observer.spec_of(interpreter.fakify(x)) or P() for x in args]
    in_types, out_types = types(layouts, [x.ndim for x in args])
    return local_region(function, in_types, out_types, trusted=True)(*args)


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
