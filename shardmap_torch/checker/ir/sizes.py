"""Sizes of arguments that are symbols while a body is interpreted: a verdict holds for many.

Python and torch compute with them, and `env` notes every question about them that has been answered
by the size at hand: these are the guards of the verdict. torch's own code knows its SymInt, and
asks it what it has to ask. Other code expects an int, and would silently do something else where it
meets none: so what it gets is a `Size`, for which `isinstance(n, int)` holds, and of which a text
or a hash is that of its value, which makes a guard.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:  # for annotations; it takes a second to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


@dataclass(frozen=True)
class Sizes:
    """Sizes under which a body is interpreted.

    Attributes:
        env: notes the guards; None where all sizes are numbers.
        shapes: global shapes with symbols, by the position of the argument.
    """

    env: "ShapeEnv | None" = None
    shapes: Mapping[int, tuple[Any, ...]] = field(default_factory=dict)

    def of(self, leaves: Sequence[Any], position: int) -> tuple[int, ...]:
        """The global shape of an argument."""
        return self.shapes.get(position) or tuple(leaves[position].shape)


EXACT: Final = Sizes()
"""All sizes are numbers."""

SYMBOLS: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of numbers that may depend on symbols."""


def hashable_size(size: int | torch.SymInt) -> object:
    """A size that can be hashed: of a symbol its expression, which is equal where it is the same.

    Sizes that are equal for some values of the symbols only are not equal then.
    """
    return size.node.expr if isinstance(size, torch.SymInt) else size


def as_numbers(value: Any) -> Any:
    """Returns what torch gives to code of the user's, with numbers that pass for Python's."""
    kind = type(value)
    if kind is torch.Size:
        return torch.Size(map(as_numbers, value))
    if kind is torch.SymInt:
        return Size(value.node)
    if kind is torch.SymFloat:
        return Ratio(value.node)
    return bool(value) if kind is torch.SymBool else value


_OPERATIONS: Final = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rand", "ror"),
    *("neg", "pos", "abs", "round", "trunc", "floor", "ceil", "eq", "ne", "lt", "le", "gt", "ge"),
)

_OF_TORCH: Final = ("sym_float", "sym_int", "sym_max", "sym_min", "sym_not", "sym_sqrt")
"""Operations by which torch's own code converts: they give it its own symbols."""


def _operation(name: str, base: Any) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        # torch takes what `isinstance` calls an int for a constant.
        plain = [_PLAIN[type(x)](x.node) if type(x) in _PLAIN else x for x in (self, *others)]
        result = getattr(base, name)(*plain)
        return result if name.startswith("__sym_") else as_numbers(result)

    return method


def _passing_for(number: type, base: Any) -> Any:
    """Makes a class of symbols that pass for numbers of a Python type."""
    names = [f"__{name}__" for name in (*_OPERATIONS, *_OF_TORCH)]
    return type(
        base.__name__,
        (base,),
        {
            **{name: _operation(name, base) for name in names if hasattr(base, name)},
            "__class__": property(lambda self: number),  # what isinstance asks, as unittest.mock's
            "__hash__": lambda self: hash(number(self)),
            "__repr__": lambda self: repr(number(self)),
            "__format__": lambda self, spec: format(number(self), spec),
        },
    )


Size: Final = _passing_for(int, torch.SymInt)
Ratio: Final = _passing_for(float, torch.SymFloat)
_PLAIN: Final[Mapping[Any, Any]] = {Size: torch.SymInt, Ratio: torch.SymFloat}
