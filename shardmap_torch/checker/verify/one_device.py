"""The one-device program, with which global strictness compares a body.

What compares them is imported where it is asked for: it is a large part of the checker.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from torch import Tensor

from shardmap_torch.boundary.call import Result
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.observer import Observer
from shardmap_torch.checker.ir.own_functions import own_nodes
from shardmap_torch.checker.ir.paths import Branch, Branches
from shardmap_torch.checker.ir.repairs import NONE
from shardmap_torch.checker.ir.sizes import EXACT
from shardmap_torch.checker.verify.backward import record_backward
from shardmap_torch.checker.verify.interpretation import Interpretation
from shardmap_torch.checker.verify.outputs import repaired_result, report_values
from shardmap_torch.checker.verify.request import Request
from shardmap_torch.core.source_location import Site, error_site
from shardmap_torch.core.torch_private.engine import DisableTorchFunction
from shardmap_torch.errors import ShardTypeError, SpecError

if TYPE_CHECKING:
    from shardmap_torch.checker.spmd.recorder import Recorder


@dataclass(frozen=True)
class OneDevice:
    """The program on one device: every axis has one rank, and no collective does anything.

    Attributes:
        steps: the steps of the program.
        axes: those over which nothing is compared, and which keep their ranks.
        branches: the branches that it has taken.
        numbers: those that it has made of values taken from tensors, with their lines.
        failure: the exception that it raised, or None if it has returned.
        is_compared: whether the ranks' program is compared with its steps.
    """

    steps: "Recorder"
    axes: frozenset[str]
    branches: Sequence[Branch]
    numbers: Mapping[str, Site | None]
    failure: Exception | None
    is_compared: bool = True

    def compare(self, interpreter: Interpreter) -> None:
        """Has an interpretation compared with it, step by step."""
        if self.is_compared:
            interpreter.observer = self._relation(interpreter)

    def is_left_by(self, error: ShardTypeError) -> bool:
        """Returns whether the ranks have come to where this program has failed."""
        from shardmap_torch.checker.spmd.align import PartedError

        parted = error.__context__
        return self.failure is not None and isinstance(parted, PartedError) and parted.there is None

    def _relation(self, interpreter: Interpreter) -> Observer:
        from shardmap_torch.checker.spmd.axes import AxesRelation
        from shardmap_torch.checker.spmd.equivalence import Relation

        if self.axes:
            return AxesRelation(interpreter, self.steps, self.axes)
        return Relation(interpreter, self.steps)

    def require(
        self, name: str, branches: Sequence[Branch], numbers: Mapping[str, Site | None]
    ) -> None:
        """Raises an error that occurred on one device only, or where the programs differ."""
        if isinstance(self.failure, ShardTypeError):
            raise self.failure
        if self.failure is not None:
            raise ShardTypeError(
                f"{name}: check='global': on one device the body fails: "
                f"{type(self.failure).__name__}: {self.failure}\n"
                f"  at {error_site(self.failure)}\n"
                "Fix: write sizes that are right on one device too: -1, x.shape[...], or a size "
                "divided by axis_size(axis)."
            ) from self.failure
        for mine, other in zip_longest(branches, self.branches, fillvalue="no branch"):
            if mine != other:
                raise ShardTypeError(
                    f"{name}: check='global': on one device the body takes other branches.\n"
                    f"  on a rank: {mine}\n  on one device: {other}\n{_SIZES}"
                )
        pairs = zip_longest(numbers.items(), self.numbers.items(), fillvalue=("none", None))
        for (here, site), (there, _) in pairs:
            if here != there:
                raise ShardTypeError(
                    f"{name}: check='global': a number made of values taken from tensors is {here} "
                    f"on a rank and {there} on one device.\n  at {site}\n{_SIZES}"
                )


_SIZES: Final = "Fix: multiply sizes by axis_size(axis)."


def interpret_on_one_device(request: Request, branches: Branches) -> OneDevice | None:
    """Interprets the same path where every axis that is compared has one rank; None if none is.

    What is tried as a repair, and sizes that are symbols, leave no gradient to be assumed.
    """
    if request.strictness == "local":
        return None
    from shardmap_torch.checker.spmd.assumed import assume
    from shardmap_torch.checker.spmd.recorder import Recorder

    is_usual = (request.repair, request.strictness, request.sizes) == (NONE, "global", EXACT)
    steps = Recorder(assume) if is_usual and request.reading.assumes else Recorder()
    axes, own = _uncompared_axes(request), branches.again()
    interpreter, failure = _record(request, own, steps, axes)
    request.met.assumed |= steps.has_assumed
    numbers = interpreter.numbers.sites
    return OneDevice(steps, axes, own.taken, numbers, failure)


def _uncompared_axes(request: Request) -> frozenset[str]:
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


def _record(
    request: Request, branches: Branches, observer: Observer, axes: frozenset[str]
) -> tuple[Interpreter, Exception | None]:
    """Shows an observer the forward where all axes but these have one rank."""
    full = request.call.mesh
    sizes = tuple(full.shape[axis] if axis in axes else 1 for axis in full.axis_names)
    call = replace(request.call, mesh=full.resized(sizes))
    alone = Request(call, request.repair, "local", request.sizes, casts=request.casts)
    made = Interpretation(alone, branches)
    try:
        _record_forward(alone, made, observer)
    except Exception as error:  # the user's code may raise anything
        return made.interpreter, error
    return made.interpreter, None


def _record_forward(request: Request, made: Interpretation, steps: Observer) -> None:
    """Interprets the forward, and shows its steps, also those of the user's own backwards.

    The backward that autograd derives is interpreted only where there is such code in it.
    """
    interpreter = made.interpreter
    interpreter.observer = steps
    steps.on_start(interpreter.flows_through)
    with made.entered() as inputs:
        result = made.run_body(inputs)
        with DisableTorchFunction():  # the boundary asks and casts, not the body
            outputs = _record_results(request, made, result)
            calls_own = interpreter.hooked or any(True for _ in own_nodes(outputs))
        if calls_own:
            with suppress(ShardTypeError):  # types are judged where there are ranks
                record_backward(interpreter, outputs, inputs.values())
    interpreter.end()


def _record_results(request: Request, made: Interpretation, result: Result) -> list[Tensor]:
    """Shows an observer what the body returns; returns its tensors."""
    steps = made.interpreter.observer
    result = repaired_result(request.call, made.backend, request.repair, result)
    for position in result.match.crossing:
        value = made.interpreter.fakify(result.leaves[position])
        steps.on_result(result.match.paths[position], value, result.match.spec(position))
    report_values(steps, result)
    return [result.leaves[position] for position in result.match.crossing]
