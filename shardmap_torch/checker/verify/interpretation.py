"""One interpretation of one path: inputs enter as their specs say, and the body runs on them.

The ranks' program is interpreted so, and the program on one device that it is compared with.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Result, run_body
from shardmap_torch.checker.guards.holders import look
from shardmap_torch.checker.guards.monitor import TYPE, CheckedStep, StepMonitor
from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.collectives import AbstractBackend
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.interpreter.modes import interpreting
from shardmap_torch.checker.ir.fake_results import empty
from shardmap_torch.checker.ir.paths import Branches
from shardmap_torch.checker.ir.program import Cast, Crossing, Equation, Where, use_of
from shardmap_torch.checker.ir.repairs import rejection_of
from shardmap_torch.checker.rewrites.rank_numbers import reject_returned
from shardmap_torch.checker.rules.infer import is_real
from shardmap_torch.checker.rules.lattice import accepts
from shardmap_torch.checker.verify.outputs import Uncommitted, casts_to
from shardmap_torch.checker.verify.request import Request, enters_as, local_shape
from shardmap_torch.collectives.operations import (
    Bind,
    Collective,
    Linear,
    Mover,
    Operation,
    Saved,
    is_rounded_by,
)
from shardmap_torch.collectives.protocol import Casts, Edge
from shardmap_torch.collectives.scope import Scope, backward_in
from shardmap_torch.core.ambient import printing_first
from shardmap_torch.core.functorch import can_receive_gradient
from shardmap_torch.core.torch_private.engine import DisableTorchFunction
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.ops.transfers import require_received
from shardmap_torch.types import AxisType, I, K, R, Z

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


class CheckMonitor(StepMonitor):
    """Monitor that records the steps of a body while it is interpreted."""

    def __init__(
        self, interpreter: Interpreter, start: CheckedStep, inner: NestedBoundaries
    ) -> None:
        """Adds to `start`, which may have the steps of other paths already."""
        super().__init__(start)
        self._interpreter, self._inner = interpreter, inner

    def on_operation(self, what: object, x: Tensor | None) -> None:
        """Adds a step, unless another path has it."""
        look()
        if x is not None and is_rounded_by(what, x):
            self._interpreter.needs_ranks()
        with DisableTorchFunction():  # the monitor asks for shapes, not the body
            self._at = self._at.then(what, x)

    def types_of(self, axes: tuple[str, ...], x: Tensor) -> tuple[AxisType, ...]:
        """Finds the types of `x`, and notes them for the runs, where values have none.

        Raises:
            ShardTypeError: they differ on another path that looks the same to a run.
        """
        interpreter = self._interpreter
        known = interpreter.by_axis(interpreter.storage_type(x).types)
        found, note = tuple(known[axis] for axis in axes), self.note((TYPE, axes), x)
        interpreter.note_types(note, found, "the value is", "pass the type as src=.")
        return found

    def enter(self, what: object, edge: Edge) -> Casts:
        """Notes the start of an inner function, whose backward decides its open axes."""
        self.on_operation(what, None)
        return self._inner.enter(edge, self._at.crossing)

    def leave(self, what: object, edge: Edge) -> Casts:
        """Notes the end of an inner function, and the conversions of its results."""
        self.on_operation(what, None)
        return self._inner.leave(edge, self._at.crossing)

    def rerun(self, later: dict[Hashable, CheckedStep], kind: Hashable) -> "CheckMonitor":
        """Records code that runs again; runs of different kinds have separate records."""
        start = later.setdefault(kind, CheckedStep())
        return CheckMonitor(self._interpreter, start, self._inner)

    def end(self, leaves: Sequence[object] = ()) -> None:
        look()
        self._at.last = True


class _Like(NamedTuple):
    """The metadata kept of an argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool


class Interpretation:
    """One interpretation of one path through a body.

    Attributes:
        interpreter: types its operations.
        backend: types its collectives.
        uncommitted: the type of its results that are K.
        inner: the boundaries of functions that are mapped in it.
    """

    def __init__(self, request: Request, branches: Branches) -> None:
        """Starts one; its operations are seen from `entered` on."""
        call, env = request.call, request.sizes.env
        self._request, self._branches = request, branches
        self.interpreter = Interpreter(call.name, call.mesh, branches, request.repair, env)
        self.interpreter.body = call.function  # for messages
        self.uncommitted = Uncommitted(self.interpreter, request.reading.results)
        self.inner = NestedBoundaries(self.interpreter, self.uncommitted)
        self.backend = AbstractBackend(self.interpreter, request.repair, request.casts)

    @contextmanager
    def entered(self) -> Iterator[Mapping[int, Tensor]]:
        """Yields the inputs as the body gets them, by position."""
        interpreter = self.interpreter
        likes = self._likes()  # outside of the modes: arguments may be those of a transform
        grad = any(like.grad for like in likes.values()) or torch.is_grad_enabled()
        scope = Scope(self.backend, self._request.call.bound)
        with torch.set_grad_enabled(grad), interpreting(interpreter), backward_in(scope):
            with DisableTorchFunction():
                entered = {
                    position: self._enter(position, like) for position, like in likes.items()
                }
            try:
                yield entered
            except ShardTypeError as error:
                rejection_of(error).takes_gradients |= interpreter.traits.takes_gradients
                raise

    def _likes(self) -> Mapping[int, _Like]:
        call, likes = self._request.call, {}
        for at in call.crossing:
            leaf, shape = call.leaves[at], self._request.sizes.of(call.leaves, at)
            grad = can_receive_gradient(leaf) and is_real(leaf.dtype)
            likes[at] = _Like(shape, leaf.dtype, leaf.device, grad)
        return likes

    def _enter(self, position: int, like: _Like) -> Tensor:
        """Makes a fake shard of an input, read-only, with a type along each axis."""
        call, interpreter = self._request.call, self.interpreter
        spec, path = call.match.spec(position), call.match.paths[position]
        shape = local_shape(like.shape, spec, call.mesh)
        with interpreter.paused():
            fake = empty(interpreter.fake, shape, like.dtype, like.device)
        types = tuple(enters_as(spec, axis, call.mapped) for axis in interpreter.axes)
        storage_type = interpreter.bring(
            fake, types, f"input {path} ({spec!r})", f"is the input {path}"
        )
        storage_type.leaf = position
        interpreter.observer.on_argument(fake, spec)
        with interpreter.paused():
            return fake.requires_grad_(like.grad)

    def run_body(self, inputs: Mapping[int, Tensor]) -> Result:
        """Runs the body, and records what runs of it have to do too."""
        monitor = CheckMonitor(self.interpreter, self._request.start, self.inner)
        call = replace(self._request.call, follow=lambda: monitor)
        with printing_first():
            result = run_body(call, self.backend, list(inputs.values()))
        require_received(self.backend)
        reject_returned(result.leaves)
        self._branches.require()
        return result
