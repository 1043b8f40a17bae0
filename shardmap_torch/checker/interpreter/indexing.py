"""Indexing with a tensor of one integer, as in `x[axis_index("tp")]`.

Torch takes the number out of the tensor and makes a view. The number is not known, and need not be:
`index_select` gives the same value, and its rule says of which type it is.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

if TYPE_CHECKING:  # for annotations; the interpreter's modes call this module
    from shardmap_torch.checker.interpreter.interpreter import Interpreter

Called = tuple[Callable[..., Any], Sequence[Any]]
"""A function and its arguments."""

_WHOLE: Final = slice(None)


def is_by_number(func: Any, args: Sequence[Any]) -> bool:
    """Returns whether a call indexes with a tensor of one integer."""
    if func is not Tensor.__getitem__ and func is not Tensor.__setitem__:
        return False
    return any(map(_is_number, _parts(args[1])))


def with_select(interpreter: "Interpreter", func: Any, args: Sequence[Any]) -> Called:
    """A call that does the same and takes no number out of a tensor."""
    interpreter.batches = False  # torch.func.vmap cannot take it either
    if func is Tensor.__setitem__:
        return partial(_write, interpreter), args
    x, index = args
    selected, rest = x, list(_parts(index))
    for position, part in enumerate(rest):
        if _is_number(part):
            dim = _dim(x, rest, position)
            selected = selected.index_select(dim, part.reshape(1))
            rest[position] = 0
    why = "shares its memory with another value through an index that is a tensor"
    for tensor in (x, selected):  # one is a view of the other at run time, and here it is not
        storage_type = interpreter.storage_type(tensor)
        storage_type.read_only = storage_type.read_only or why
    return func, (selected, tuple(rest))


def _write(interpreter: "Interpreter", x: Tensor, index: Any, value: Any) -> None:
    """`x[index] = value`."""
    parts = list(_parts(index))
    tensors = [place for place, part in enumerate(parts) if isinstance(part, Tensor)]
    if len(tensors) > 1:
        interpreter.numbers.branches.refuse(
            "a write at a position that several tensors give is not known to the checker.",
            "use index_put.",
        )
    place = tensors[0]
    number, parts[place] = parts[place], _WHOLE
    rows = x[tuple(parts)]
    after = any(part is Ellipsis for part in parts[:place])
    dim = rows.ndim - _made(parts[place:]) if after else _made(parts[:place])
    row = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    row = row.expand(rows.select(dim, 0).shape).unsqueeze(dim)
    rows.index_copy_(dim, number.reshape(1), row)


def _made(parts: Sequence[Any]) -> int:
    """Counts the result's dims that these parts give; none is a tensor or an ellipsis."""
    return len([part for part in parts if part is None or isinstance(part, slice)])


def _dim(x: Tensor, parts: Sequence[Any], position: int) -> int:
    """The dim that a part of an index is about."""
    if any(part is Ellipsis for part in parts[:position]):
        return x.ndim - sum(map(_consumed, parts[position:]))
    return sum(map(_consumed, parts[:position]))


def _consumed(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.ndim
    return 1


def _parts(index: Any) -> Sequence[Any]:
    return index if isinstance(index, tuple) else (index,)


def _is_number(part: Any) -> bool:
    """Returns whether torch takes the index for a number; uint8 is a mask."""
    return (
        isinstance(part, Tensor)
        and part.ndim == 0
        and part.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
    )
