"""Verifies one path through a body: its forward and derived backward against its specs.

What compares it with the program on one device is imported where global strictness asks for it: it
is a fourth of the checker.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Call, Result, run_body
from shardmap_torch.checker.calls.fake_results import empty
from shardmap_torch.checker.communication.collectives import AbstractBackend
from shardmap_torch.checker.guards.monitor import CheckedStep
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.interpreter.modes import interpreting
from shardmap_torch.checker.interpreter.spots import Spots
from shardmap_torch.checker.ir.observer import Observer
from shardmap_torch.checker.ir.outcomes import PathOutcome, Resolved
from shardmap_torch.checker.ir.own_functions import own_nodes
from shardmap_torch.checker.ir.paths import Branches, format_branches
from shardmap_torch.checker.ir.program import ProgramPath
from shardmap_torch.checker.ir.repairs import NONE, Repair, mark_step
from shardmap_torch.checker.ir.sizes import EXACT, Sizes
from shardmap_torch.checker.ir.symbolic import SymbolicNumber
from shardmap_torch.checker.rewrites import distributed
from shardmap_torch.checker.rules.infer import is_real
from shardmap_torch.checker.verify.backward import PullBack, record_backward
from shardmap_torch.checker.verify.boundary_types import enters_as, global_shape, local_shape
from shardmap_torch.checker.verify.merge import is_raised_by_body
from shardmap_torch.checker.verify.nested import NestedBoundaries
from shardmap_torch.checker.verify.outputs import Exits, Uncommitted, repair_results, report_values
from shardmap_torch.checker.verify.record import CheckMonitor
from shardmap_torch.checker.verify.reference import OneDevice
from shardmap_torch.checker.verify.shared_memory import input_sharing
from shardmap_torch.collectives.protocol import Readings
from shardmap_torch.core.functorch import can_receive_gradient
from shardmap_torch.core.source_location import Site
from shardmap_torch.core.torch_private.engine import DisableTorchFunction
from shardmap_torch.errors import ShardMapError, ShardTypeError, SpecError
from shardmap_torch.types import AxisType, K, R

if TYPE_CHECKING:
    from shardmap_torch.checker.spmd.regions import Records

Strictness: TypeAlias = Literal["local", "global"] | frozenset[str]
"""A set has the axes over which it is "global"; over the others it is "local"."""


@dataclass(frozen=True)
class Request:
    """A call whose paths are all verified with the same choices.

    Attributes:
        call: the call, with some open axes of its inputs resolved.
        repair: the change of the program that is tried.
        strictness: whether the forward is also compared with the program on one device.
        resolved: the conversions of results that all paths share.
        readings: the types that JAX's casts take for values that have several.
        start: the first step of the notes for runs, which all paths share.
        sizes: those of arguments that are symbols.
    """

    call: Call
    repair: Repair
    strictness: Strictness
    resolved: Resolved = field(default_factory=Resolved)
    start: CheckedStep = field(default_factory=CheckedStep)
    readings: Readings = field(default_factory=Readings)
    sizes: Sizes = EXACT


def verify_path(request: Request, branches: Branches) -> PathOutcome:
    """Verifies one path, at first with gradients on one device that are assumed."""
    is_local = request.strictness == "local"
    one = None if is_local else _on_one_device(request, branches.again(), True)
    records = None if is_local else _records(request, branches)
    try:
        try:
            return _verify_either(request, branches, one, records)
        except Exception:  # the user's code may raise anything
            if one is None or not one.steps.has_assumed:
                raise
        branches.start()
        one = _on_one_device(request, branches.again(), False)
        return _verify_either(request, branches, one, records)
    except ShardTypeError as error:
        error.args = ("\n".join([str(error), *format_branches(branches.taken)]),)
        raise
    finally:
        branches.end()


def _verify_either(
    request: Request, branches: Branches, one: OneDevice | None, records: "Records | None"
) -> PathOutcome:
    """Verifies a path, a second time with another type of K results if the first fails."""
    try:
        return _verify(request, branches, K, one, records)
    except _RetryError as retry:
        try:
            # A result that is K is seeded as P where I does not type.
            branches.start()
            return _verify(request, branches, R, one, records)
        except ShardTypeError:
            raise retry.error from None


def _verify(
    request: Request,
    branches: Branches,
    uncommitted: AxisType,
    one: OneDevice | None,
    records: "Records | None",
) -> PathOutcome:
    """Verifies once, after what regions need has been recorded."""
    if records is None:
        return _Verification(request, branches, uncommitted, one).run()
    from shardmap_torch.checker.spmd.regions import RecordNeededError

    while True:
        try:
            return _Verification(request, branches, uncommitted, one, records).run()
        except RecordNeededError as needed:
            records.add(needed.axes)
            branches.start()


def _on_one_device(request: Request, branches: Branches, assumes: bool) -> OneDevice:
    """Interprets the same path where every axis that is compared has one rank.

    What is tried as a repair, and sizes that are symbols, leave no gradient to be assumed.
    """
    from shardmap_torch.checker.spmd.assumed import assume
    from shardmap_torch.checker.spmd.recorder import Recorder

    assumes &= (request.repair, request.strictness, request.sizes) == (NONE, "global", EXACT)
    steps = Recorder(assume) if assumes else Recorder()
    verification, failure = _record(request, branches, steps, _uncompared(request))
    return OneDevice(steps, branches.taken, verification.numbers, failure, verification.spots)


def _uncompared(request: Request) -> frozenset[str]:
    """Returns the axes over which strictness is local.

    Raises:
        SpecError: strictness names an axis that the mesh lacks.
    """
    if isinstance(request.strictness, str):
        return frozenset()
    mesh = request.call.mesh
    unknown = sorted(request.strictness - set(mesh.shape))
    if unknown:
        raise SpecError(f"{request.call.name}: check= names no axis {unknown[0]!r} in the {mesh}.")
    return frozenset(mesh.axis_names) - set(mesh.finest(sorted(request.strictness)))


def _records(request: Request, branches: Branches) -> "Records":
    """Returns the regions of the path, recorded on demand where only some axes have ranks."""
    from shardmap_torch.checker.spmd.regions import Records, RegionRecorder

    def record(axes: frozenset[str]) -> tuple[RegionRecorder, Exception | None]:
        regions = RegionRecorder()
        _, failure = _record(request, branches.again(), regions, axes)
        return regions, failure

    return Records(record)


def _relation(
    interpreter: Interpreter, one: OneDevice, records: "Records", axes: frozenset[str]
) -> Observer:
    """Returns what compares a path with the program on one device; over `axes` nothing is."""
    from shardmap_torch.checker.spmd.regions import AxesRelation, ProgramRelation

    if axes:
        return AxesRelation(interpreter, one.steps, axes)
    return ProgramRelation(interpreter, one.steps, records)


def _record(
    request: Request, branches: Branches, observer: Observer, axes: frozenset[str]
) -> tuple["_Verification", Exception | None]:
    """Shows an observer the forward where all axes but these have one rank."""
    full = request.call.mesh
    sizes = tuple(full.shape[axis] if axis in axes else 1 for axis in full.axis_names)
    mesh = full.resized(sizes)
    call = replace(request.call, mesh=mesh)
    alone = Request(call, request.repair, "local", readings=request.readings, sizes=request.sizes)
    verification = _Verification(alone, branches, K, None)
    try:
        verification.record(observer)
    except Exception as error:  # the user's code may raise anything
        return verification, error
    return verification, None


class _RetryError(Exception):
    """Raised when the gradients do not type and some result is K, which may be typed otherwise."""

    def __init__(self, error: ShardTypeError) -> None:
        self.error = error


class _Like(NamedTuple):
    """The metadata kept of an argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool


_OF_CODE: Final = (TypeError, AttributeError, NameError)
"""Exceptions that do not come from shapes."""

_HOOKS: Final = (
    "A gradient that is taken in a body goes through no saved tensor hooks, which torch's own "
    "checkpoint sets.\nFix: shardmap_torch.checkpoint(f, *args) in place of "
    "torch.utils.checkpoint.checkpoint."
)
"""Added to torch's error about hooks under its transforms."""

_SHOWN: Final = 3
"""Maximal number of inputs whose shapes are added to an error of the body."""


class _Verification:
    """One verification of one path.

    `uncommitted` is the type assumed of a result that is K, and `one` the program on one device,
    if the forward is to be compared with it.
    """

    def __init__(
        self,
        request: Request,
        branches: Branches,
        uncommitted: AxisType,
        one: OneDevice | None,
        records: "Records | None" = None,
    ) -> None:
        call = request.call
        self._request, self._call = request, call
        self._branches, self._one = branches, one
        env = request.sizes.env
        self._interpreter = Interpreter(call.name, call.mesh, branches, request.repair, env)
        self._interpreter.body = call.function  # for messages
        self._uncommitted = Uncommitted(self._interpreter, uncommitted)
        self._inner = NestedBoundaries(self._interpreter, self._uncommitted)
        spots = self.spots
        if one is not None and spots is not None and one.spots is not None:
            spots.there = one.spots
        if one is not None and records is not None and one.failure is None:
            self._interpreter.observer = _relation(
                self._interpreter, one, records, _uncompared(request)
            )
        self._backend = AbstractBackend(self._interpreter, request.repair, request.readings)

    @property
    def numbers(self) -> Mapping[str, Site | None]:
        """The numbers made of values taken from tensors, and their lines."""
        return self._interpreter.numbers.sites

    @property
    def spots(self) -> Spots | None:
        """The calls of the body, if a repair is tried."""
        return self._interpreter.spots

    def run(self) -> PathOutcome:
        """Interprets forward and backward."""
        request, interpreter, backend = self._request, self._interpreter, self._backend
        outgoing = Exits(
            request.call, interpreter, backend, request.resolved, request.repair, self._uncommitted
        )
        with self._entered() as locals_:
            try:
                result = self._run_body(locals_)
            except Exception as error:
                return self._raised(error)
            observer = interpreter.observer
            with DisableTorchFunction():  # the boundary asks and casts, not the body
                outgoing.leave(result)
            interpreter.observer = observer  # the user's own backwards are compared
            back = PullBack(request.call, interpreter, backend, locals_)
            try:
                back.run(result)
                self._branches.require()
                interpreter.observer.on_end()
            except ShardTypeError as error:
                if self._uncommitted.met and self._uncommitted.assumed == K:
                    raise _RetryError(error) from None
                raise
            self._inner.resolve()
        if self._one is not None:
            self._one.require(self._call.name, self._branches.taken, self.numbers)
        outcome = self._outcome(result, outgoing, back)
        interpreter.end()
        return outcome

    def record(self, steps: Observer) -> None:
        """Interprets the forward, and records its steps, also those of the user's own backwards.

        The backward that autograd derives is interpreted only where there is such code in it.
        """
        self._interpreter.observer = steps
        steps.on_start(self._interpreter.flows_through)
        with self._entered() as locals_:
            result = self._run_body(locals_)
            with DisableTorchFunction():  # as in `run`
                outputs = self._record_results(steps, result)
                calls_own = self._interpreter.hooked or any(True for _ in own_nodes(outputs))
            if calls_own:
                with suppress(ShardTypeError):  # types are judged where there are ranks
                    record_backward(self._interpreter, outputs, locals_.values())
        self._interpreter.end()

    def _record_results(self, steps: Observer, result: Result) -> list[Tensor]:
        """Shows an observer what the body returns; returns its tensors."""
        repair_results(self._call, self._backend, self._request.repair, result)
        for position in result.match.crossing:
            value = self._interpreter.fakify(result.leaves[position])
            steps.on_result(result.match.paths[position], value, result.match.spec(position))
        report_values(steps, result)
        return [result.leaves[position] for position in result.match.crossing]

    def _run_body(self, locals_: Mapping[int, Tensor]) -> Result:
        recording = CheckMonitor(self._interpreter, self._request.start, self._inner)
        call = replace(self._call, follow=lambda: recording)
        result = run_body(call, self._backend, list(locals_.values()))
        self._branches.require()
        return result

    @contextmanager
    def _entered(self) -> Iterator[Mapping[int, Tensor]]:
        """Yields the inputs as the body gets them, by position."""
        call, interpreter = self._call, self._interpreter
        # Outside of the modes: arguments may be those of a transform.
        likes: dict[int, _Like] = {}
        for at in call.crossing:
            leaf, shape = call.leaves[at], self._request.sizes.of(call.leaves, at)
            grad = can_receive_gradient(leaf) and is_real(leaf.dtype)
            likes[at] = _Like(shape, leaf.dtype, leaf.device, grad)
        grad = any(like.grad for like in likes.values()) or torch.is_grad_enabled()
        with torch.set_grad_enabled(grad), interpreting(interpreter):
            with DisableTorchFunction():
                entered = {
                    position: self._enter(position, like) for position, like in likes.items()
                }
            try:
                yield entered
            except ShardTypeError as error:
                if interpreter.traits.takes_gradients:
                    mark_step(error)
                raise

    def _raised(self, error: Exception) -> PathOutcome:
        """Returns the outcome of a path that raises; errors not of the body fail the check."""
        branches, name = self._branches, SymbolicNumber.__name__
        called = distributed.named_in(self._call.name, error)
        if called is not None:
            raise called from error
        branches.require()
        in_words = str(error)
        if isinstance(error, ShardMapError) or not (branches.taken or name in in_words):
            self._note_cause(error)
            raise error
        if not is_raised_by_body(error) or name in in_words:
            raise ShardTypeError(f"{self._call.name}: {type(error).__name__}: {error}") from error
        way = ProgramPath(
            tuple(branches.taken),
            tuple(self._interpreter.equations),
            f"raises {type(error).__name__}",
        )
        return PathOutcome(way, None, error)

    def _note_cause(self, error: Exception) -> None:
        """Adds to an error of the body that shapes are those of shards, often its cause."""
        call = self._call
        if "saved tensor hooks" in str(error):
            error.add_note(_HOOKS)
            return
        sharded = [at for at in call.crossing if call.match.spec(at).mentioned]
        if not sharded or isinstance(error, (ShardMapError, *_OF_CODE)):
            return
        shown = []
        with DisableTorchFunction():  # which would refuse arguments of a transform outside
            for at in sharded[:_SHOWN]:
                shape, spec = self._request.sizes.of(call.leaves, at), call.match.spec(at)
                sizes = f"{list(local_shape(shape, spec, call.mesh))} there, of {list(shape)}"
                shown.append(f"{call.match.paths[at]} is {sizes} by {spec!r}")
        error.add_note(f"In the body of {call.name} tensors are shards: {'; '.join(shown)}.")

    def _enter(self, position: int, like: "_Like") -> Tensor:
        call, interpreter = self._call, self._interpreter
        spec = call.match.spec(position)
        shape = local_shape(like.shape, spec, call.mesh)
        with interpreter.paused():
            fake = empty(interpreter.fake, shape, like.dtype, like.device)
        types = tuple(enters_as(spec, axis, call.mapped) for axis in interpreter.axes)
        path = call.match.paths[position]
        storage_type = interpreter.bring(
            fake, types, f"input {path} ({spec!r})", f"is the input {path}"
        )
        storage_type.leaf = position
        interpreter.observer.on_argument(fake, spec)
        with interpreter.paused():
            return fake.requires_grad_(like.grad)

    def _outcome(self, result: Result, outgoing: Exits, back: PullBack) -> PathOutcome:
        interpreter = self._interpreter
        outputs, sharing = {}, {}
        leaves = list(result.leaves)
        for position in result.match.crossing:
            value = result.leaves[position]
            types = interpreter.storage_type(value).types
            shape = global_shape(tuple(value.shape), result.match.spec(position), self._call.mesh)
            outputs[position] = (shape, value.dtype, types)
            source = input_sharing(interpreter.storage_type(value))
            if source is not None:
                sharing[position] = source
            leaves[position] = None  # its graph would stay alive
        return PathOutcome(
            ProgramPath(
                tuple(self._branches.taken),
                tuple(interpreter.equations),
                gradients=tuple(back.gradients),
            ),
            replace(result, leaves=leaves),
            None,
            outputs,
            outgoing.exits,
            back.needs,
            interpreter.traits,
            sharing,
        )
