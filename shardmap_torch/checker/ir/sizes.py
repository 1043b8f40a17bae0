"""Sizes of arguments that are symbols while a body is interpreted: a verdict holds for many.

Python and torch compute with them, and `env` notes every question about them that has been answered
by the size at hand: these are the guards of the verdict.
"""

from collections.abc import Mapping, Sequence
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


def hashable_size(size: int | torch.SymInt) -> object:
    """A size that can be hashed: of a symbol its expression, which is equal where it is the same.

    Sizes that are equal for some values of the symbols only are not equal then.
    """
    return size.node.expr if type(size) is torch.SymInt else size
