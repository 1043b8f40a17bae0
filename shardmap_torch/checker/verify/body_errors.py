"""Errors that a body raises while it is checked: the end of a path, or of the check."""

import dis
import sysconfig
from traceback import walk_tb
from typing import Any, Final

from shardmap_torch.checker.interpreter import modes, operations
from shardmap_torch.checker.ir.paths import Branches
from shardmap_torch.checker.ir.symbolic import SymbolicNumber
from shardmap_torch.checker.rewrites import distributed
from shardmap_torch.checker.verify.boundary_types import local_shape
from shardmap_torch.checker.verify.request import Request
from shardmap_torch.core.torch_private.engine import DisableTorchFunction
from shardmap_torch.errors import ShardMapError, ShardTypeError


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

_HOOKS: Final = (
    "A gradient that is taken in a body goes through no saved tensor hooks, which torch's own "
    "checkpoint sets.\nFix: shardmap_torch.checkpoint(f, *args) in place of "
    "torch.utils.checkpoint.checkpoint."
)
"""Added to torch's error about hooks under its transforms."""

_SHOWN: Final = 3
"""Maximal number of inputs whose shapes are added to an error of the body."""


def _note_cause(request: Request, error: Exception) -> None:
    """Adds to an error of the body that shapes are those of shards, often its cause."""
    call = request.call
    if "saved tensor hooks" in str(error):
        error.add_note(_HOOKS)
        return
    sharded = [at for at in call.crossing if call.match.spec(at).mentioned]
    if not sharded or isinstance(error, (ShardMapError, *_OF_CODE)):
        return
    shown = []
    with DisableTorchFunction():  # which would refuse arguments of a transform outside
        for at in sharded[:_SHOWN]:
            shape, spec = request.sizes.of(call.leaves, at), call.match.spec(at)
            sizes = f"{list(local_shape(shape, spec, call.mesh))} there, of {list(shape)}"
            shown.append(f"{call.match.paths[at]} is {sizes} by {spec!r}")
    error.add_note(f"In the body of {call.name} tensors are shards: {'; '.join(shown)}.")
