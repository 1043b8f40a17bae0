"""Verifies one path through a body: its forward and derived backward against its specs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from shardmap_torch.boundary.call import Result
from shardmap_torch.checker.ir.outcomes import PathOutcome
from shardmap_torch.checker.ir.paths import Branches, format_branches
from shardmap_torch.checker.ir.program import ProgramPath
from shardmap_torch.checker.verify.backward import PullBack
from shardmap_torch.checker.verify.body_errors import require_end_of_path
from shardmap_torch.checker.verify.boundary_types import global_shape, input_sharing
from shardmap_torch.checker.verify.interpretation import Interpretation
from shardmap_torch.checker.verify.one_device import OneDevice, interpret_on_one_device
from shardmap_torch.checker.verify.outputs import Exits, convert_results
from shardmap_torch.checker.verify.request import Request
from shardmap_torch.core.torch_private.engine import DisableTorchFunction
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.types import K


def verify_path(request: Request, branches: Branches) -> PathOutcome:
    """Verifies one path.

    Raises:
        ShardTypeError: it is not well-typed, or differs from the program on one device.
    """
    try:
        one = interpret_on_one_device(request, branches)
        if one is None:
            return _verify(request, branches, None)
        return _with_regions(request, branches, one)
    except ShardTypeError as error:
        error.args = ("\n".join([str(error), *format_branches(branches.taken)]),)
        raise
    finally:
        branches.end()


def _with_regions(request: Request, branches: Branches, one: OneDevice) -> PathOutcome:
    """Verifies a path again with every region that turns out to be needed."""
    from shardmap_torch.checker.spmd.regions import RecordNeededError

    while True:
        try:
            return _verify(request, branches, one)
        except RecordNeededError as needed:
            one.records.add(needed.axes)
            branches.start()


def _verify(request: Request, branches: Branches, one: OneDevice | None) -> PathOutcome:
    """Verifies a path in six steps."""
    call, made = request.call, Interpretation(request, branches)
    interpreter = made.interpreter
    if one is not None:
        one.compare(interpreter)

    # 1. Inputs enter as their specs say.
    with made.entered() as inputs:
        # 2. The body runs: each operation is typed, and compared with that on one device.
        try:
            result = made.run_body(inputs)
        except Exception as error:  # the user's code may raise anything
            require_end_of_path(request, branches, error)
            equations = tuple(interpreter.equations)
            way = ProgramPath(tuple(branches.taken), equations, f"raises {type(error).__name__}")
            return PathOutcome(way, None, error)

        # 3. Results leave as their specs promise. No body makes these casts, so that they are not
        # compared with one device; the user's own backwards are, later.
        observer = interpreter.observer
        with DisableTorchFunction():  # the boundary asks and casts, not the body
            exits = convert_results(request, made, result)
        interpreter.observer = observer

        # 4. The derived backward runs, and decides the axes that specs leave open.
        back = PullBack(call, interpreter, made.backend, inputs)
        with _noting_results(request, made):
            back.run(result)
            branches.require()
            interpreter.observer.on_end()
        made.inner.resolve()

    # 5. Both programs have taken the same branches and numbers.
    if one is not None:
        one.require(call.name, branches.taken, interpreter.numbers.sites)

    # 6. What runs and the other paths need of it is kept.
    outcome = _outcome(request, made, branches, result, exits, back)
    interpreter.end()
    return outcome


@contextmanager
def _noting_results(request: Request, made: Interpretation) -> Iterator[None]:
    """Notes if gradients do not fit where results were read as K; see `Reading`."""
    try:
        yield
    except ShardTypeError:
        request.met.results = made.uncommitted.met and made.uncommitted.assumed == K
        raise


def _outcome(
    request: Request,
    made: Interpretation,
    branches: Branches,
    result: Result,
    exits: Exits,
    back: PullBack,
) -> PathOutcome:
    interpreter = made.interpreter
    outputs, sharing = {}, {}
    leaves = list(result.leaves)
    for position in result.match.crossing:
        value, spec = result.leaves[position], result.match.spec(position)
        storage_type = interpreter.storage_type(value)
        shape = global_shape(tuple(value.shape), spec, request.call.mesh)
        outputs[position] = (shape, value.dtype, storage_type.types)
        source = input_sharing(storage_type)
        if source is not None:
            sharing[position] = source
        leaves[position] = None  # its graph would stay alive
    program = ProgramPath(
        tuple(branches.taken), tuple(interpreter.equations), gradients=tuple(back.gradients)
    )
    return PathOutcome(
        program,
        replace(result, leaves=leaves),
        outputs=outputs,
        exits=exits,
        needs=back.needs,
        traits=interpreter.traits,
        sharing=sharing,
    )
