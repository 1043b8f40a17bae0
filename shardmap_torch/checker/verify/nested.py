"""Nested shard_map: how values cross the boundary of a function called in another's body.

Over the axes that the inner function binds, all values outside of it are unsharded. As at the
outer boundary, an axis that the spec of an input leaves open is K inside, and the backward decides
whether the gradient is summed; results are converted to the types that their specs promise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.outcomes import Cast, Crossing, Where
from shardmap_torch.checker.ir.program import Equation, use_of
from shardmap_torch.checker.rules.lattice import accepts
from shardmap_torch.checker.verify.outputs import Uncommitted, casts_to
from shardmap_torch.collectives.operations import Bind, Collective, Linear, Mover, Operation, Saved
from shardmap_torch.collectives.protocol import Casts, Edge
from shardmap_torch.core.functorch import can_receive_gradient
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.types import I, K, R, Z

_SUMMED: tuple[Cast, ...] = (("convert", I, R),)


class NestedBoundaries:
    """The boundaries of inner functions on one path through a body."""

    def __init__(self, interpreter: Interpreter, uncommitted: Uncommitted) -> None:
        """Keeps `uncommitted`, the type assumed of a result that is K."""
        self._interpreter, self._uncommitted = interpreter, uncommitted
        self._found: list[tuple[Crossing, Where, tuple[Cast, ...], str]] = []

    def enter(self, edge: Edge, crossing: Crossing) -> Casts:
        """Returns the conversions of inputs whose specs leave an axis open."""
        found: dict[int, tuple[Operation, ...]] = {}
        for position in edge.positions:
            open_axes = set(edge.axes) - edge.spec(position).named
            if open_axes and can_receive_gradient(edge.values[position]):
                report = partial(self._note, crossing, position)
                axes = tuple(axis for axis in edge.axes if axis in open_axes)
                what = f"input {edge.paths[position]} of {edge.name}"
                found[position] = (Open(self._interpreter, axes, what, report),)
        return found

    def leave(self, edge: Edge, crossing: Crossing) -> Casts:
        """Returns the conversions of the results to what their specs promise.

        Raises:
            ShardTypeError: names all that do not match, and where they come from.
        """
        problems: list[str] = []
        found: dict[Where, tuple[Cast, ...]] = {}
        for position in edge.positions:
            spec, path = edge.spec(position), edge.paths[position]
            value = self._interpreter.fakify(edge.values[position])
            types = self._interpreter.by_axis(self._uncommitted.types_of(value))
            for axis in edge.axes:
                if axis in spec.replicate:
                    continue  # the spec's own conversion requires an R
                casts = casts_to(self._interpreter, path, spec, axis, types[axis], value)
                if isinstance(casts, str):
                    problems.append(casts)
                    continue
                self._note(crossing, position, axis, casts, f"{path} of {edge.name}")
                found[position, axis] = casts
        if problems:
            head = f"{edge.name}: the result does not match out_specs:"
            wrong = ShardTypeError("\n".join([head, *problems]))
            self._interpreter.numbers.branches.fail(wrong)
        return Crossing(found).collectives

    def _note(
        self, crossing: Crossing, position: int, axis: str, casts: tuple[Cast, ...], what: str
    ) -> None:
        self._found.append((crossing, (position, axis), casts, what))

    def resolve(self) -> None:
        """Adds the conversions of this path to those of the others.

        Raises:
            ShardTypeError: a run would not know which of two conversions to make.
        """
        for crossing, where, casts, what in self._found:
            if crossing.casts.setdefault(where, casts) != casts:
                raise ShardTypeError(
                    f"{self._interpreter.name}: {what} crosses over {where[1]!r} differently on "
                    "different paths: its gradient is complete on one path and a sum over the "
                    "ranks on another, or the types of results differ, and a run cannot tell which "
                    "path it takes.\n"
                    f"Fix: name {where[1]!r} in replicate= or invariant= of its spec, or convert "
                    "a result to I before it leaves."
                )


Report = Callable[[str, tuple[Cast, ...], str], None]


@dataclass(frozen=True, eq=False)
class Open(Linear):
    """Lets a value into an inner body: K over the axes that its spec leaves open.

    Attributes:
        interpreter: the interpreter of the outer body.
        open_axes: the axes that the spec leaves open.
        what: the name of the value in errors.
        report: called with each axis and the conversion that its gradient needs.
    """

    interpreter: Interpreter
    open_axes: tuple[str, ...]
    what: str
    report: Report

    @property
    def axes(self) -> tuple[str, ...]:
        """No axes: it connects no ranks."""
        return ()

    def run(self, mover: Mover, x: Tensor) -> Tensor:
        """Returns a read-only value with the same data, like all inputs."""
        interpreter = self.interpreter
        storage_type = interpreter.storage_type(x)
        types = tuple(
            K if axis in self.open_axes and axis_type == I else axis_type
            for axis, axis_type in interpreter.by_axis(storage_type.types).items()
        )
        site, backward = interpreter.site()
        operand = use_of("x", interpreter.fakify(x), storage_type)
        equation = Equation(self.what, (operand,), (), site, backward)
        with interpreter.paused():
            y = torch.empty_like(interpreter.fakify(x))
        made = interpreter.make(y, types, equation, [x])
        for each in (made, storage_type):
            each.freeze(f"is the {self.what}")
        interpreter.add(equation)
        interpreter.observer.on_collective(
            "same", Collective("convert", I, R, self.open_axes), x, y
        )
        return y

    def pull_back(self, bind: Bind, grad: Tensor, saved: Saved) -> Tensor:
        """Sums the cotangent over the axes where it is a pending sum or varies."""
        interpreter = self.interpreter
        storage_type = interpreter.storage_type(grad)
        summed: list[str] = []
        for at, (axis, have) in enumerate(interpreter.by_axis(storage_type.types).items()):
            if axis not in self.open_axes or have == Z:
                continue
            if not accepts(K, have):
                wrong = messages.cotangent(interpreter, at, K, storage_type, self.what)
                interpreter.numbers.branches.fail(wrong)
            varies = have.varies
            self.report(axis, _SUMMED if varies else (), self.what)
            summed += [axis] * varies
        if not summed:
            return grad
        return bind(Collective("convert", I, R, tuple(summed)).transpose, grad)

    def push_forward(self, bind: Bind, tangent: Tensor, saved: Saved) -> Tensor:
        return bind(self, tangent)
