"""Reads and checks the arguments that layers share: types, weights, shapes."""

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from shardmap_torch.errors import LayerError
from shardmap_torch.mesh import MAX_RANKS
from shardmap_torch.ops import axis_size, convert
from shardmap_torch.ops.arguments import Axis, finest, shown
from shardmap_torch.types import AxisType, I, R, TypeLike, V, as_type

X = TypeVar("X")


def axes_of(axis: Axis) -> tuple[str, ...]:
    """Reads one axis or several as a tuple."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def read_layout(name: str, word: str, value: TypeLike, allowed: Sequence[str]) -> AxisType:
    """Reads a type over the axis of a layer; `allowed` are the first letters of valid ones.

    Raises:
        LayerError: it is none of them.
    """
    layout = as_type(value)
    if layout.kind not in allowed:
        known = ", ".join({"S": "S(dim)", "P": "Partial"}.get(letter, letter) for letter in allowed)
        raise LayerError(f"{name}: {word}={layout} is none of {known}.")
    return layout


def to_replicate(x: X, axis: Axis) -> X:
    """Converts a value from I to R."""
    return convert(x, axis, src=I, dst=R)


def replicate_weight(
    weight: Tensor, axis: Axis, weight_type: TypeLike, name: str, word: str = "weight_type"
) -> Tensor:
    """Converts a weight that is equal on all ranks to R, for ranks that use it differently.

    With `weight_type=R` the caller has done so already, as for all weights of a model at once.
    """
    layout = read_layout(name, word, weight_type, "IR")
    return weight if layout == R else to_replicate(weight, axis)


def shard_of(weight: Tensor, axis: Axis, weight_type: TypeLike, name: str) -> Tensor:
    """Takes this rank's shard of a vector that is equal on all ranks."""
    layout = read_layout(name, "weight_type", weight_type, "IR")
    return convert(weight, axis, src=layout, dst=V, dim=0)


def check_inner(name: str, x: Tensor, size: int, weight: Tensor, what: str) -> None:
    """Requires that the features of `x` are those that a weight contracts.

    Raises:
        LayerError: they are another number.
    """
    if x.shape[-1:] != (size,):
        raise LayerError(
            f"{name}: x {list(x.shape)} has no last dimension of size {size}, which {what} "
            f"{list(weight.shape)} contracts. Shapes are those of one rank."
        )


def num_rows(name: str, weight: Tensor, what: str) -> int:
    """Returns the size of a weight's first dim.

    Raises:
        LayerError: it has none.
    """
    if not weight.ndim:
        raise LayerError(f"{name}: {what} is a scalar, which contracts no features.")
    return weight.shape[0]


def check_shards(name: str, what: str, size: int, axis: Axis) -> int:
    """Divides a size over the ranks of an axis.

    Raises:
        LayerError: it does not divide.
    """
    count = axis_size(axis)
    if size % count:
        axes = shown(finest(axes_of(axis)))
        divisors = [n for n in range(1, min(size, MAX_RANKS) + 1) if size % n == 0]
        raise LayerError(
            f"{name}: {size} {what} do not divide over the {count} ranks of {axes} "
            f"({size} = {size // count}*{count} + {size % count}). Use a number of ranks that "
            f"divides {size}: one of {divisors}."
        )
    return size // count
