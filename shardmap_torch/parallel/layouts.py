"""DTensor placements inside a body: what they are as types, and how a value goes between them."""

from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor
from torch.distributed.tensor import Partial as PartialPlacement
from torch.distributed.tensor import Placement, Replicate, Shard

from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.errors import ShardTypeError, SpecError, show
from shardmap_torch.ops import convert, redistribute, reinterpret
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, K, Partial, R, S, V, Z

_ACCEPTED: Final[Mapping[str, frozenset[AxisType]]] = {
    "Replicate": frozenset({I, R, K, Z}),
    "Shard": frozenset({V, Z}),
    "Partial": frozenset({V, Partial, Z}),  # local strictness cannot tell an addend from V
}
"""The types of a value along the axis that lies as a placement says."""

_REPAIRS: Final[Mapping[AxisType, str]] = {
    I: "Replicate()",
    R: "Replicate()",
    K: "Replicate()",
    V: "Shard(dim)",
    Partial: "Partial()",
}


def check_placement(placement: object, name: str) -> None:
    """Requires a placement that a type can say.

    Raises:
        SpecError: it is none of Shard, Replicate and Partial("sum").
    """
    if type(placement) in (Shard, Replicate):
        return
    if type(placement) is PartialPlacement and placement.reduce_op == "sum":
        return
    raise SpecError(f"{name} takes Shard(dim), Replicate() or Partial(), not {show(placement)}.")


def normalized(placement: Placement, ndim: int, name: str) -> Placement:
    """The placement with its dim counted from the front.

    Raises:
        SpecError: the tensor has no such dim.
    """
    if not isinstance(placement, Shard):
        return placement
    if not -ndim <= placement.dim < ndim:
        raise SpecError(f"{name}: {placement!r}, but the tensor has {ndim} dims.")
    return Shard(placement.dim % ndim)


def spec_of(placement: Placement, axis: str) -> P:
    """The partition spec that says the same; of a Shard whose dim is counted from the front."""
    if isinstance(placement, Shard):
        return P(*[None] * placement.dim, axis)
    return P(partial=(axis,) if isinstance(placement, PartialPlacement) else ())


def type_along(axis: str, x: Tensor) -> AxisType:
    """The type of `x` along `axis`, as the checker found it; V, I, R, K, Z or Partial."""
    scope = current_scope()
    found = None if scope is None else scope.types_of((axis,), x)
    assert found is not None  # a parallelized module is always checked
    return V if found[0].dim is not None else found[0]


def is_replicated(axis: str, x: Tensor) -> bool:
    """Returns whether all ranks of `axis` have the same value."""
    return type_along(axis, x) in (I, R, K)


def relayout(
    x: Tensor, axis: str, src: Placement, dst: Placement, replicate: AxisType, name: str
) -> Tensor:
    """Takes a value from one placement to another, by the one typed collective that does.

    Args:
        x: the local value.
        axis: the mesh axis.
        src: how it lies, by the plan; held against its type.
        dst: how it shall lie.
        replicate: what a replicated result becomes: R for what the ranks will use differently, I
            for what all of them go on with in the same manner.
        name: what errors call the value.

    Raises:
        ShardTypeError: the value does not lie as `src` says.
        SpecError: it has no such dim.
    """
    src, dst = (normalized(placement, x.ndim, name) for placement in (src, dst))
    found = type_along(axis, x)
    kind = _kind(src)
    if found not in _ACCEPTED[kind]:
        raise ShardTypeError(
            f"{name}: the plan says {src!r}, but over {axis!r} the value is "
            f"{'equal on all ranks' if found in (I, R, K) else f'of type {found}'}.\n"
            f"Fix: say {_REPAIRS[found]} there, or change the layout of what computes it."
        )
    if found == Z:  # zeros lie in any manner but for their shape
        found = _ZERO[kind]
    return _MOVES[kind, _kind(dst)](x, axis, found, src, dst, replicate)


def _kind(placement: Placement) -> str:
    return type(placement).__name__


_ZERO: Final = {"Replicate": K, "Shard": V, "Partial": Partial}

_Move = Callable[[Tensor, str, AxisType, Placement, Placement, AxisType], Tensor]


def _keep(
    x: Tensor, axis: str, found: AxisType, src: Placement, dst: Placement, replicate: AxisType
) -> Tensor:
    return reinterpret(x, axis, src=V, dst=Partial) if found == V else x


def _retype(
    x: Tensor, axis: str, found: AxisType, src: Placement, dst: Placement, replicate: AxisType
) -> Tensor:
    """A value that stays replicated becomes R where the ranks will use it differently."""
    flows = x.is_floating_point() or x.is_complex()
    return convert(x, axis, src=I, dst=R) if flows and replicate == R and found != R else x


def _split(
    x: Tensor, axis: str, found: AxisType, src: Placement, dst: Placement, replicate: AxisType
) -> Tensor:
    """From replicated to a shard, or to one addend of a sum."""
    target = S(dst.dim) if isinstance(dst, Shard) else Partial
    return redistribute(x, axis, src=R if found == R else I, dst=target)


def _collect(
    x: Tensor, axis: str, found: AxisType, src: Placement, dst: Placement, replicate: AxisType
) -> Tensor:
    """From a shard or an addend to any other placement."""
    source = S(src.dim) if isinstance(src, Shard) else Partial
    targets = {"Replicate": replicate, "Partial": Partial}
    target = S(dst.dim) if isinstance(dst, Shard) else targets[_kind(dst)]
    return redistribute(x, axis, src=source, dst=target)


_MOVES: Final[Mapping[tuple[str, str], _Move]] = {
    ("Replicate", "Replicate"): _retype,
    ("Replicate", "Shard"): _split,
    ("Replicate", "Partial"): _split,
    ("Shard", "Replicate"): _collect,
    ("Shard", "Shard"): _collect,
    ("Shard", "Partial"): _collect,
    ("Partial", "Replicate"): _collect,
    ("Partial", "Shard"): _collect,
    ("Partial", "Partial"): _keep,
}
"""Functions that move a value from one placement to another."""
