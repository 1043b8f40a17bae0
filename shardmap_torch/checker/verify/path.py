"""Verifies one path through a body: its forward and derived backward against its specs."""

import dis
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from traceback import walk_tb
from typing import Any, Final

from shardmap_torch.boundary.call import Result
from shardmap_torch.checker.interpreter import modes, operations
from shardmap_torch.checker.ir.paths import (
    AgainError,
    Branches,
    SymbolicNumber,
    format_branches,
)
from shardmap_torch.checker.ir.program import PathOutcome, ProgramPath
from shardmap_torch.checker.rewrites import distributed
from shardmap_torch.checker.verify.backward import PullBack
from shardmap_torch.checker.verify.interpretation import Interpretation
from shardmap_torch.checker.verify.one_device import OneDevice, interpret_on_one_device
from shardmap_torch.checker.verify.outputs import Exits, convert_results
from shardmap_torch.checker.verify.request import Request, global_shape, input_sharing, local_shape
from shardmap_torch.core.source_location import error_site
from shardmap_torch.core.torch_private.engine import DisableTorchFunction
from shardmap_torch.errors import ShardMapError, ShardTypeError
from shardmap_torch.types import K


def require_end_of_path(request: Request, branches: Branches, error: Exception) -> None:
    """Returns if every rank raises this error at the end of a path; else the check fails with it.

    Raises:
        ShardTypeError: it may be due to the check, whose values have no data.
        Exception: the error, of a body that has but one path.
    """
    name, numbers = request.call.name, SymbolicNumber.__name__
    called = distributed.named_in(name, error)
    if called is not None:
        raise called from error
    branches.require()
    if "saved tensor hooks" in str(error):
        raise ShardTypeError(_HOOKED.format(name, error_site(error))) from error
    is_of_number = numbers in str(error)
    if isinstance(error, ShardMapError) or not (branches.taken or is_of_number):
        _note_cause(request, error)
        raise error
    if not is_raised_by_body(error) or is_of_number:
        raise ShardTypeError(f"{name}: {type(error).__name__}: {error}") from error


_CHECKER: Final = (modes.__file__, operations.__file__)
"""Files that call torch on values without data: what fails below is no `raise` of the body's."""
_STANDARD: Final = sysconfig.get_path("stdlib")


def is_raised_by_body(error: BaseException) -> bool:
    """Returns whether a `raise` or an `assert` raised it, and not an operation on stand-ins.

    Such an exception ends a path, and every rank raises it. An operation on fakes may fail because
    they have no data; what it would do with data is not known.
    """
    frames = list(walk_tb(error.__traceback__))
    codes = [frame.f_code for frame, _ in frames if frame.f_code not in modes.HANDS_ON]
    if not codes or any(code.co_filename in _CHECKER for code in codes):
        return False
    last = _last(error)
    code = last.tb_frame.f_code
    if dis.opname[code.co_code[last.tb_lasti]] != "RAISE_VARARGS" or _is_standard(code.co_filename):
        return False
    return error.__context__ is None or is_raised_by_body(error.__context__)


def _is_standard(file: str) -> bool:
    """Returns whether it is Python's own library, which may reject a symbolic number."""
    return file.startswith(_STANDARD) and "site-packages" not in file


def _last(error: BaseException) -> Any:
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb


_OF_CODE: Final = (TypeError, AttributeError, NameError)
"""Exceptions that do not come from shapes."""

_HOOKED: Final = (
    "{}: a gradient that is taken in the body goes through no saved tensor hooks, which torch's "
    "own checkpoint sets.\n  at {}\nFix: shardmap_torch.checkpoint(f, *args) in place of "
    "torch.utils.checkpoint.checkpoint."
)
"""In place of torch's error about hooks under its transforms."""

_SHOWN: Final = 3
"""Maximal number of inputs whose shapes are added to an error of the body."""


def _note_cause(request: Request, error: Exception) -> None:
    """Adds to an error of the body that shapes are those of shards, often its cause."""
    call = request.call
    sharded = [at for at in call.crossing if call.match.spec(at).mentioned]
    if not sharded or isinstance(error, (ShardMapError, *_OF_CODE)):
        return
    shown = []
    with DisableTorchFunction():  # which would refuse arguments of a transform outside
        for at in sharded[:_SHOWN]:
            shape, spec = request.sizes.of(call.leaves, at), call.match.spec(at)
            sizes = f"{list(local_shape(shape, spec, call.mesh))}, a shard of {list(shape)}"
            shown.append(f"{call.match.paths[at]} is {sizes} by {spec!r}")
    error.add_note(f"In the body of {call.name} tensors are shards: {'; '.join(shown)}.")


def verify_path(request: Request, branches: Branches) -> PathOutcome:
    """Verifies one path by one interpretation after another, until all is known that it needs.

    Raises:
        ShardTypeError: it is not well-typed, or differs from the program on one device.
    """
    one = None
    try:
        while True:
            try:
                one = one or interpret_on_one_device(request, branches)
                return _verify(request, branches, one)
            except AgainError:
                # 1. The body takes a rank's part of a tuple: what torch returns is marked.
                branches.marks_parts, one = True, None
            except ShardTypeError as error:
                # 2. The ranks have come to where the program on one device has failed. What differs
                # before that is the cause of what fails after it; else types alone are checked.
                if one is None or not one.is_left_by(error):
                    raise
                one = replace(one, is_compared=False)
            branches.start()
    except ShardTypeError as error:
        error.args = ("\n".join([str(error), *format_branches(branches.taken)]),)
        raise
    finally:
        branches.end()


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
