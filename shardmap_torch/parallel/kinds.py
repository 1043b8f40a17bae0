"""Kinds of modules with one weight that styles shard by its columns or its rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Kind:
    """The way a module multiplies by its weight.

    Attributes:
        outputs: the dim of the weight that the output has.
        inputs: the dim of the weight that is summed over.
        function: what a forward calls on its input and the weight; None if we call it ourselves.
    """

    outputs: int
    inputs: int
    function: Callable[..., Tensor] | None = None


LINEAR: Final = Kind(0, 1, functional.linear)
EMBEDDING: Final = Kind(1, 0, functional.embedding)
CONV1D: Final = Kind(1, 0)
"""The `Conv1D` of transformers: a Linear with a transposed weight."""


def kind_of(module: nn.Module) -> Kind | None:
    """Returns the kind of a module; of a `Conv1D` by the name of its class."""
    if isinstance(module, nn.Linear):
        return LINEAR
    if isinstance(module, nn.Embedding):
        return EMBEDDING
    return CONV1D if any(each.__name__ == "Conv1D" for each in type(module).__mro__) else None
