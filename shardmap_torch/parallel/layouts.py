"""DTensor placements inside a body: their types, and redistribution between them."""

from collections.abc import Mapping
from typing import Final

from torch import Tensor
from torch.distributed.tensor import Partial as PartialPlacement
from torch.distributed.tensor import Placement, Replicate, Shard

from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.errors import ShardTypeError, SpecError, show
from shardmap_torch.ops import convert, redistribute, reinterpret
from shardmap_torch.ops.arguments import finest
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, K, Partial, R, S, V, Z

_ACCEPTED: Final[Mapping[str, frozenset[AxisType]]] = {
    "Replicate": frozenset({I, R, K, Z}),
    "Shard": frozenset({V, Z}),
    "Partial": frozenset({V, Partial, Z}),  # local strictness cannot tell an addend from V
}
"""The types that a value of each placement may have along the axis."""

_REPAIRS: Final[Mapping[AxisType, str]] = {
    I: "Replicate()",
    R: "Replicate()",
    K: "Replicate()",
    V: "Shard(dim)",
    Partial: "Partial()",
}


def check_placement(placement: object, name: str) -> None:
    """Requires a placement that corresponds to a type.

    Raises:
        SpecError: it is none of Shard, Replicate and Partial("sum").
    """
    if type(placement) in (Shard, Replicate):
        return
    if type(placement) is PartialPlacement and placement.reduce_op == "sum":
        return
    raise SpecError(f"{name} takes Shard(dim), Replicate() or Partial(), not {show(placement)}.")


def normalized(placement: Placement, ndim: int, name: str) -> Placement:
    """Returns the placement with its dim counted from the front.

    Raises:
        SpecError: the tensor has no such dim.
    """
    if not isinstance(placement, Shard):
        return placement
    if not -ndim <= placement.dim < ndim:
        raise SpecError(f"{name}: {placement!r}, but the tensor has {ndim} dims.")
    return Shard(placement.dim % ndim)


def spec_of(placement: Placement, axis: str) -> P:
    """Converts a placement, with its dim counted from the front, to a partition spec."""
    if isinstance(placement, Shard):
        return P(*[None] * placement.dim, axis)
    return P(partial=(axis,) if isinstance(placement, PartialPlacement) else ())


def type_along(axis: str, x: Tensor) -> AxisType:
    """Returns the type of `x` along `axis` that the checker found: V, I, R, K, Z or Partial.

    An axis of a view may stand for several, along one of which a value may differ: then it does so
    along the axis. Uncommitted values and zeros take the other axis' type.
    """
    scope = current_scope()
    types = None if scope is None else scope.types_of(finest((axis,)), x)
    assert types is not None  # a parallelized module is always checked
    kinds = {V if type_.dim is not None else type_ for type_ in types}
    return next(type_ for type_ in (V, Partial, R, I, K, Z) if type_ in kinds)


def is_replicated(axis: str, x: Tensor) -> bool:
    """Returns whether all ranks of `axis` have the same value."""
    return type_along(axis, x) in (I, R, K)


def relayout(
    x: Tensor, axis: str, src: Placement, dst: Placement, replicate: AxisType, name: str
) -> Tensor:
    """Redistributes a value from one placement to another, by one typed collective.

    Args:
        x: the local value.
        axis: the mesh axis.
        src: its placement by the plan; checked against its type.
        dst: the placement of the result.
        replicate: type of a replicated result: R if the ranks use it differently, I if all repeat
            one computation.
        name: name of the value in errors.

    Raises:
        ShardTypeError: the type of the value is not that of `src`.
        SpecError: it has no such dim.
    """
    src, dst = (normalized(placement, x.ndim, name) for placement in (src, dst))
    type_ = type_along(axis, x)
    if type_ not in _ACCEPTED[type(src).__name__]:
        raise ShardTypeError(
            f"{name}: the plan says {src!r}, but over {axis!r} the value is "
            f"{'equal on all ranks' if type_ in (I, R, K) else f'of type {type_}'}.\n"
            f"Fix: say {_REPAIRS[type_]} there, or change the layout of what computes it."
        )
    if isinstance(src, PartialPlacement) and isinstance(dst, PartialPlacement):
        return reinterpret(x, axis, src=V, dst=Partial) if type_ == V else x
    if isinstance(src, Replicate) and isinstance(dst, Replicate):
        # Integers have no gradient, so that nothing depends on their type.
        needs_cast = is_smooth(x) and replicate == R and type_ != R
        return convert(x, axis, src=I, dst=R) if needs_cast else x
    source = _type_of(src, R if type_ == R else I)
    return redistribute(x, axis, src=source, dst=_type_of(dst, replicate))


def _type_of(placement: Placement, replicated: AxisType) -> AxisType:
    if isinstance(placement, Shard):
        return S(placement.dim)
    return Partial if isinstance(placement, PartialPlacement) else replicated
