"""Global norm of a tree of sharded tensors, and clipping by it."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Final, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardmap_torch.core.caching import memo
from shardmap_torch.core.torch_private.engine import are_transforms_active
from shardmap_torch.core.tree import Broadcast, Tree, closed, flatten, opened
from shardmap_torch.errors import OptimizerError, SpecError, show
from shardmap_torch.ops import all_reduce
from shardmap_torch.ops.body import mesh_of_body
from shardmap_torch.optim.buckets import match_leaves
from shardmap_torch.optim.lists import foreach, is_number, placed_like
from shardmap_torch.spec import P
from shardmap_torch.types import I

X = TypeVar("X")
G = TypeVar("G", bound=Hashable)
Op: TypeAlias = Literal["sum", "max"]
Layout: TypeAlias = tuple[DeviceMesh, tuple[bool, ...]] | None
"""The mesh of a DTensor, and over which of its axes it is sharded; None of a plain tensor."""


def global_norm(tree: Tree, specs: Tree | None = None, *, ord: float = 2.0) -> Tensor:
    """Computes the norm of all entries of all leaves, each counted once, equal on all ranks.

    In a body, the powers of a leaf's shards are summed over the axes that its spec mentions, and
    over no other, where all ranks have the same value. One scalar is reduced for each distinct set
    of axes, and for each leaf if `ord` is infinite; none for replicated leaves. Outside of a body
    the leaves are any mix of DTensors and plain tensors, and `specs` is not needed.

    Shape: a scalar, of the widest dtype of the leaves, float32 at least. Types: each leaf's S
    becomes I. Sends these scalars.

    Args:
        tree: pytree of complete gradients, or of other tensors; pending sums are an error.
        specs: pytree prefix of their specs; in a body only.
        ord: the order of the norm, at least 1; `math.inf` for the largest magnitude.

    Raises:
        SpecError: specs that do not match the tree, or none in a body.
        OptimizerError: an order below 1, an empty tree.
        ShardTypeError: in a checked call, a leaf that its spec does not describe.

    Source: `optax.global_norm`, `torch.nn.utils.get_total_norm`.

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> from shardmap_torch.optim import global_norm
        >>> mesh, specs = make_mesh((2,), ("tp",), kind="simulated"), {"w": P("tp"), "b": P()}
        >>> norm = shard_map(
        ...     lambda g: global_norm(g, specs), mesh=mesh, in_specs=(specs,), out_specs=P()
        ... )
        >>> norm({"w": torch.tensor([2.0, 4.0]), "b": torch.tensor([4.0])})
        tensor(6.)
    """
    if not is_number(ord) or not ord >= 1:
        raise OptimizerError(f"global_norm: ord={show(ord)} is no norm; it must be at least 1.")
    leaves = opened(tree)[0]
    if not leaves:
        raise OptimizerError("global_norm: the tree has no leaves.")
    others = [leaf for leaf in leaves if type(leaf) is not Tensor]
    if not all([isinstance(leaf, Tensor) for leaf in others]):
        raise OptimizerError("global_norm: a leaf of the tree is no tensor.")
    in_body = mesh_of_body() is not None
    amounts = _in_body(tree, specs, ord) if in_body else _outside(tree, ord)
    dtype = reduce(torch.promote_types, [amount.dtype for amount in amounts])
    stacked = torch.stack([amount.to(dtype) for amount in amounts])
    if ord == math.inf:
        return stacked.max()
    return stacked.sum().sqrt() if ord == 2 else stacked.sum() ** (1 / ord)


def clip_by_global_norm(
    tree: X, specs: Tree | None = None, max_norm: float = 1.0, *, ord: float = 2.0
) -> tuple[X, Tensor]:
    """Scales all leaves so that their global norm is at most `max_norm`.

    Works where `global_norm` does, and sends what it sends. The scale is min(1, max_norm / norm):
    a tree whose norm is smaller is returned unchanged, bit for bit (torch adds 1e-6 to the norm it
    divides by: of [3, 4] clipped to 1 it makes 0.59999988). A norm that is no finite number
    makes every leaf nan or zero, as with `torch.nn.utils.clip_grad_norm_`; check the norm.

    Args:
        tree: pytree of complete gradients.
        specs: pytree prefix of their specs; in a body only.
        max_norm: the bound.
        ord: the order of the norm.

    Returns:
        The tree, of unchanged shapes, dtypes and types, and its norm before.

    Raises:
        OptimizerError: a bound below 0; and as `global_norm`.

    Source: `optax.clip_by_global_norm`; Pascanu et al. 2013.

    Example:
        >>> from shardmap_torch.optim import clip_by_global_norm
        >>> clip_by_global_norm({"w": torch.tensor([3.0, 4.0])}, max_norm=2.5)
        ({'w': tensor([1.5000, 2.0000])}, tensor(5.))
    """
    if not is_number(max_norm) or not max_norm >= 0:
        raise OptimizerError(f"clip_by_global_norm: max_norm={show(max_norm)} is no bound.")
    norm = global_norm(tree, specs, ord=ord)
    # A norm of zero gives infinity here, and 1 after the clamp.
    scale = (max_norm / norm).clamp(max=1)
    leaves, structure = opened(tree)
    dtypes = {leaf.dtype for leaf in leaves}
    others = [leaf for leaf in leaves if type(leaf) is not Tensor]
    if len(dtypes) == 1 and not any([isinstance(leaf, DTensor) for leaf in others]):
        scaled = foreach("mul", leaves, scale.to(dtypes.pop()))
    else:
        scaled = [placed_like(_local(leaf) * scale.to(leaf.dtype), leaf) for leaf in leaves]
    clipped: X = closed(tree, structure, scaled)
    return clipped, norm


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clips gradients in place by their global norm; DTensors and plain tensors may be mixed.

    To be called outside of a body, after `.backward()`. Sends a scalar for each distinct set of
    axes over which gradients are sharded.

    Args:
        parameters: parameters; those without a gradient are left out.
        max_norm: the bound.
        norm_type: the order of the norm.
        error_if_nonfinite: whether a norm that is no finite number is an error.

    Returns:
        The norm before, a plain tensor that is equal on all ranks.

    Raises:
        OptimizerError: a bound below 0, an order below 1, or a norm that is no finite number.

    Source: `torch.nn.utils.clip_grad_norm_`, which refuses such mixtures.

    Example:
        >>> from shardmap_torch.optim import clip_grad_norm_
        >>> w = torch.ones(2, requires_grad=True)
        >>> (w * torch.tensor([3.0, 4.0])).sum().backward()
        >>> clip_grad_norm_([w], 1.0), w.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    several = [parameters] if isinstance(parameters, Tensor) else _listed(parameters)
    grads = [p.grad for p in several if p.grad is not None]
    if not grads:
        return torch.zeros(())
    clipped, norm = clip_by_global_norm(grads, max_norm=max_norm, ord=norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise OptimizerError(f"clip_grad_norm_: the norm of the gradients is {norm.item()}.")
    for grad, new in zip(grads, clipped, strict=True):
        grad.copy_(new)
    return norm


def _listed(parameters: Iterable[Tensor]) -> list[Tensor]:
    listed = list(parameters) if isinstance(parameters, Iterable) else [None]
    if not all([isinstance(parameter, Tensor) for parameter in listed]):
        raise OptimizerError("clip_grad_norm_: the parameters are tensors, or one tensor.")
    return listed


_WIDE: Final = (torch.float32, torch.float64)
_FEW: Final = 2**18
"""Entries that a dot product adds to 1e-6 of the result; a sum adds any number, as a tree."""


def _amounts(xs: Sequence[Tensor], ord: float) -> list[Tensor]:
    """Computes the addend of each shard; of squares by a dot product, in one pass, where it can."""
    if ord != 2 or torch.compiler.is_dynamo_compiling() or are_transforms_active():
        return [_amount(x, ord) for x in xs]
    return [
        torch.dot(flat := x.view(-1), flat)
        if type(x) is Tensor
        and x.is_cpu
        and x.dtype in _WIDE
        and x.numel() <= _FEW
        and x.is_contiguous()
        else _amount(x, ord)
        for x in xs
    ]


def _amount(x: Tensor, ord: float) -> Tensor:
    """Computes the addend of one shard: the sum of powers, or the maximum."""
    if ord == 2 and x.dtype in _WIDE:
        return x.square().sum()
    wide = torch.promote_types(x.abs().dtype if x.is_complex() else x.dtype, torch.float32)
    if ord == math.inf:
        return x.abs().amax().to(wide) if x.numel() else x.new_zeros((), dtype=wide)
    powers = x.to(wide).square() if ord == 2 and not x.is_complex() else x.abs().to(wide) ** ord
    return powers.sum()


def _by_group(amounts: Iterable[tuple[G, Tensor]], op: Op) -> Iterator[tuple[G, Tensor]]:
    """Combines the amounts of each group and dtype, so that each needs one reduction."""
    groups: defaultdict[tuple[G, torch.dtype], list[Tensor]] = defaultdict(list)
    for key, amount in amounts:
        groups[key, amount.dtype].append(amount)
    for (key, _), some in groups.items():
        together = torch.stack(some)
        yield key, together.amax() if op == "max" else together.sum()


def _op(ord: float) -> Op:
    return "max" if ord == math.inf else "sum"


def _in_body(tree: Tree, specs: Tree | None, ord: float) -> list[Tensor]:
    """Computes one amount, equal on all ranks, for each distinct set of axes."""
    if specs is None:
        raise SpecError("global_norm: in a body it needs specs=: local tensors have no sharding.")
    leaves = match_leaves("tree", specs, tree, "global_norm: the specs do not match the tree:")
    axes_of = _axes_of(leaves.match)
    amounts = zip(axes_of, _amounts(leaves.values, ord), strict=True)
    # Each maximum by itself: under global strictness those of several leaves are no one maximum.
    groups = amounts if ord == math.inf else _by_group(amounts, "sum")
    return [
        all_reduce(amount, axes, dst=I, op=_op(ord)) if axes else amount for axes, amount in groups
    ]


@memo
def _axes_of(match: Broadcast[P]) -> tuple[tuple[str, ...], ...]:
    """Returns the axes over which each leaf is sharded."""
    return tuple([tuple(sorted(spec.mentioned)) for spec in match.specs])


# Outside of a body DTensors have placements, and torch does the communication.


def _outside(tree: Tree, ord: float) -> list[Tensor]:
    leaves = [_resolved(leaf) for leaf in flatten(tree)[0]]
    amounts = zip(map(_layout, leaves), _amounts(list(map(_local, leaves)), ord), strict=True)
    return [_over_ranks(layout, x, _op(ord)) for layout, x in _by_group(amounts, _op(ord))]


def _resolved(x: Tensor) -> Tensor:
    """Sums a DTensor that is a pending sum."""
    if not isinstance(x, DTensor) or not any(p.is_partial() for p in x.placements):
        return x
    return x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _layout(x: Tensor) -> Layout:
    if not isinstance(x, DTensor):
        return None
    return x.device_mesh, tuple(not p.is_replicate() for p in x.placements)


def _over_ranks(layout: Layout, amount: Tensor, op: Op) -> Tensor:
    if layout is None:
        return amount
    mesh, is_sharded = layout
    placements = [Partial(op) if sharded else Replicate() for sharded in is_sharded]
    return DTensor.from_local(amount, mesh, placements, run_check=False).full_tensor()
