"""Handles Python values read from tensors: `.item()`, `bool(x)`, `if x:`, `torch.equal`.

They must be equal on all ranks. The result is a symbolic number, or a branch of which both paths
are interpreted. A bool may differ where nothing but an error hangs on it, as in `assert`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.interpreter.result_types import result_types
from shardmap_torch.checker.ir.paths import SymbolicNumber
from shardmap_torch.checker.ir.program import Equation, use_of
from shardmap_torch.checker.rules.infer import tensors_of
from shardmap_torch.core.functorch import is_batched
from shardmap_torch.core.source_location import answer_that_raises, user_call
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.errors import ShardTypeError, show_shape
from shardmap_torch.types import Partial

if TYPE_CHECKING:  # for annotations; the interpreter calls this module
    from shardmap_torch.checker.interpreter.interpreter import Interpreter

ITEM: Final = torch.ops.aten._local_scalar_dense.default
_TAKEN: Final = (ITEM, torch.ops.aten.equal.default, torch.ops.aten.allclose.default)


def take(interpreter: "Interpreter", op: OpOverload, arguments: Mapping[str, Any]) -> Any:
    """Returns the value of one of `_TAKEN`: a symbolic number, or torch's value for literals.

    Raises:
        ShardTypeError: the ranks would get different values.
    """
    tensors = [x for value in arguments.values() for x in tensors_of(value)]
    raising, refusal = None, None
    try:
        result_types(interpreter, op, arguments, [])
    except ShardTypeError as error:
        types = {each for x in tensors for each in interpreter.storage_type(x).types}
        raising, refusal = answer_that_raises(), error
        if raising is None or Partial in types or _kind(op, tensors) is not bool:
            raise
    interpreter.copies.reject_stale(interpreter, tensors)
    if all(getattr(x, "constant", None) is not None for x in tensors):
        with interpreter.paused():
            return op(**arguments)
    interpreter.needs_ranks()
    uses = [use_of("", x, interpreter.storage_type(x)) for x in tensors]
    source = (op, *(_identity(use.storage_type, x) for use, x in zip(uses, tensors, strict=True)))
    number, is_new = interpreter.numbers.take(source, _kind(op, tensors))
    if is_new:
        name = "item" if op is ITEM else op._schema.name.split("::")[1]
        site, backward = interpreter.site()
        interpreter.add(Equation(f"{number.text} = {name}", tuple(uses), (), site, backward))
        interpreter.observer.on_python_value(name, tensors, raising)
    if raising is not None and refusal is not None:
        interpreter.numbers.branches.must_raise(number.text, raising, refusal)
    return number


def _identity(storage_type: Any, tensor: Tensor) -> Any:
    """Returns a key that is equal for tensors of the same numbers: `made` changes with writes."""
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return id(storage_type), id(storage_type.made), *place, tensor.is_neg(), tensor.is_conj()


def _kind(op: OpOverload, tensors: Sequence[Tensor]) -> type:
    if op is not ITEM or tensors[0].dtype == torch.bool:
        return bool
    return float if tensors[0].is_floating_point() else int


def take_for_torch(interpreter: "Interpreter", op: OpOverload, arguments: Mapping[str, Any]) -> Any:
    """Returns a value for torch's own code, which may take a bool (a branch) but no number.

    None if the operation returns a tensor.
    """
    if op not in _TAKEN:
        result_types(interpreter, op, arguments, [])
        return None
    value = take(interpreter, op, arguments)
    if type(value) is not SymbolicNumber:
        return value
    if value.number_type is not bool:
        escape(interpreter, "a torch function asks for")
    return bool(value)


def escape(interpreter: "Interpreter", what: str, advice: str = "take it with .item()") -> Any:
    """Refuses a use that needs the value as a plain Python number."""
    interpreter.numbers.branches.refuse(
        f"{what} a plain Python number from a tensor, whose value the checker does not know.",
        f"{advice}: what that gives is tracked through arithmetic, comparisons and branches. "
        "Sizes, positions and steps must not depend on the data.",
    )


# ------------------------------------------------------------------- as torch functions see it


def _item(interpreter: "Interpreter", func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0] if args else kwargs["input"]
    if tensor.numel() != 1 or is_batched(tensor):
        return func(*args, **kwargs)  # torch says what is wrong
    return _number(interpreter, interpreter.base(tensor))


def _number(interpreter: "Interpreter", tensor: Tensor) -> Any:
    """Makes the result of `.item()`; a bool branches at once, since `x is True` has no hook."""
    value = _taken(interpreter, tensor)
    return bool(value) if tensor.dtype == torch.bool else value


def _taken(interpreter: "Interpreter", tensor: Tensor) -> Any:
    if tensor.is_complex():
        escape(interpreter, "complex() takes")
    return take(interpreter, ITEM, {"self": interpreter.base(tensor)})


def _bool(interpreter: "Interpreter", func: Any, args: Any, kwargs: Any) -> Any:
    return bool(_item(interpreter, func, args, kwargs))


_TAKES: Final = ((float, "", ".long()"), (int, ".double()", ""), (bool, ".double()", ".long()"))
_FLOAT: Final[Mapping[type, str]] = {
    own: f"write x{cast}.item() in place of float(x), and x.f().item() in place of math.f(x)"
    for own, cast, _ in _TAKES
}
_INT: Final[Mapping[type, str]] = {
    own: f"write x{cast}.item() in place of int(x)" for own, _, cast in _TAKES
}
"""Repairs, by the Python type of the tensor's numbers."""


def _plain(what: str, advice: Mapping[type, str] | None = None) -> Callable[..., Any]:
    """Makes a handler that refuses exact Python numbers, which cannot be tracked."""

    def take_plain(interpreter: "Interpreter", func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if tensor.numel() != 1 or is_batched(tensor):
            return func(*args, **kwargs)  # torch says what is wrong
        value = _taken(interpreter, tensor)
        if type(value) is SymbolicNumber:
            escape(interpreter, what, *([] if advice is None else [advice[value.number_type]]))
        return func(*args, **kwargs)

    return take_plain


def _list(interpreter: "Interpreter", func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if is_batched(tensor):
        return func(*args, **kwargs)  # torch says what is wrong
    return _listed(interpreter, interpreter.base(tensor))


def _listed(interpreter: "Interpreter", tensor: Tensor) -> Any:
    if tensor.ndim == 0:
        return _number(interpreter, tensor)
    return [_listed(interpreter, row) for row in tensor.unbind(0)]


def _leaving(interpreter: "Interpreter", func: Any, args: Any, kwargs: Any) -> Any:
    interpreter.numbers.branches.refuse(
        f"{func.__name__} takes the numbers of a tensor out of torch, where nothing tracks them.",
        "compute with torch; pass what is known before the call as a static argument.",
    )


def _pickled(interpreter: "Interpreter", func: Any, args: Any, kwargs: Any) -> Any:
    """Leaves what `torch.distributed` sends as objects to the refusal of that call."""
    found = user_call()
    if found is not None and "torch/distributed/" in found[1].f_code.co_filename:
        return func(*args, **kwargs)
    return _leaving(interpreter, func, args, kwargs)


def _format(interpreter: "Interpreter", func: Any, args: Any, kwargs: Any) -> str:
    """Formats dtype and shape, as there is no number; a run takes it, as `.item()` does."""
    interpreter.needs_ranks()
    tensor = args[0]
    return f"<{show_shape(tensor.dtype, tensor.shape)}, checked; debug_print shows numbers>"


FUNCTIONS: Final[Mapping[Any, Any]] = {
    Tensor.item: _item,
    Tensor.__bool__: _bool,
    torch.is_nonzero: _bool,
    Tensor.is_nonzero: _bool,
    Tensor.tolist: _list,
    **dict.fromkeys((Tensor.numpy, Tensor.__array__, Tensor.__dlpack__), _leaving),
    Tensor.__reduce_ex__: _pickled,
    Tensor.__float__: _plain("float() or math takes", _FLOAT),
    Tensor.__int__: _plain("int() takes", _INT),
    Tensor.__index__: _plain("a size, a position or a number of steps takes"),
    Tensor.__complex__: _plain("complex() takes"),
    **dict.fromkeys((Tensor.__format__, Tensor.__repr__), _format),
}
"""Handlers of the functions that take Python values from tensors."""
