"""Casts of `jax.lax`: pcast and pvary change the type of a value, not the value."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeVar

from torch import Tensor

from shardmap_torch import ops
from shardmap_torch.core.tree import map_leaves
from shardmap_torch.errors import CollectiveError
from shardmap_torch.lax.arguments import ANY, WORDS, Arguments, Source, read, read_type, vary
from shardmap_torch.ops.arguments import Axis, each_leaf
from shardmap_torch.types import AxisType, I, K, Partial, R, TypeLike, V, Z

X = TypeVar("X")

_CASTS: Final[Mapping[tuple[AxisType, AxisType], Callable[[Tensor, tuple[str, ...]], Tensor]]] = (
    MappingProxyType(
        {
            (I, R): lambda x, axes: ops.convert(x, axes, src=I, dst=R),
            (V, Partial): lambda x, axes: ops.reinterpret(x, axes, src=V, dst=Partial),
        }
    )
)
"""Casts of JAX's pcast but those to V. None of them changes the value that a rank holds."""

_KNOWN: Final = ((I, V), (I, R), (R, V), (V, Partial))


def pcast(x: X, axis_name: Axis, *, to: TypeLike, src: TypeLike | None = None) -> X:
    """Changes the type of `x` along `axis_name`; the ranks' values stay as they are.

    | src -> to | backward |
    |---|---|
    | invarying -> varying, invarying -> reduced | all_reduce |
    | reduced -> varying | nothing |
    | varying -> unreduced | nothing |

    Shape: unchanged. Sends nothing; where the backward is an all-reduce that sends
    2(n-1)/n * x.nbytes per rank.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.
        to: "varying", "reduced" or "unreduced".
        src: the type of x along the axis; the checker knows it. Without one "varying" is taken for
            "unreduced", else "invarying".

    Raises:
        CollectiveError: outside a body, unknown axis, or no such cast.

    Source: `jax.lax.pcast`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda w, x: lax.psum((lax.pcast(w, "tp", to="varying") * x).sum(), "tp")
        >>> g = shard_map(f, mesh=mesh, in_specs=(P(invariant="tp"), P("tp")), out_specs=P())
        >>> torch.func.grad(g)(torch.tensor(1.0), torch.arange(4.0))
        tensor(6.)
    """
    target = read_type("pcast", "to", to, (V, R, Partial))
    arguments = read("pcast", axis_name, src, ANY)

    def one(leaf: Tensor) -> Tensor:
        reading = arguments.scope.read(leaf) if target == V else (I, V)
        source = _source_of_cast(arguments, target, leaf, reading[0])
        for type_ in dict.fromkeys(source.types):
            axes = source.where(type_)
            if target == V and type_ in (I, R):
                leaf = vary(leaf, Source(axes, (type_,) * len(axes)), reading[1])
            else:
                leaf = _cast(leaf, axes, type_, target)
        return leaf

    return each_leaf("pcast", x, one)


def _source_of_cast(
    arguments: Arguments, target: AxisType, x: Tensor, uncommitted: AxisType
) -> Source:
    """Returns the type before a cast; an uncommitted value gets the type `uncommitted`."""
    types = None if arguments.src is not None else arguments.scope.types_of(arguments.axes, x)
    if types is None:
        type_ = arguments.src or (V if target == Partial else I)
        return Source(arguments.axes, (type_,) * len(arguments.axes))
    committed = (uncommitted if type_ in (K, Z) else type_ for type_ in types)
    plain = tuple(V if type_.dim is not None else type_ for type_ in committed)
    return Source(arguments.axes, plain)


def _cast(x: Tensor, axes: tuple[str, ...], src: AxisType, dst: AxisType) -> Tensor:
    cast = _CASTS.get((src, dst))
    if cast is None:
        known = ", ".join(f"{WORDS[a]} -> {WORDS[b]}" for a, b in _KNOWN)
        raise CollectiveError(
            f"pcast does not go from {WORDS[src]} to {WORDS[dst]}; it goes {known}."
        )
    return cast(x, axes)


def pvary(x: X, axis_name: Axis) -> X:
    """Makes an invariant `x` a varying one: `pcast(x, axis_name, to="varying")`.

    Shape: unchanged. Types: I becomes V. Backward: all_reduce. Sends nothing forward.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.

    Raises:
        CollectiveError: outside a body, or unknown axis.

    Source: `jax.lax.pvary`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = shard_map(lambda x: lax.pvary(x, "tp"), mesh=mesh, in_specs=P(), out_specs=P("tp"))
        >>> f(torch.ones(1))
        tensor([1., 1.])
    """
    return pcast(x, axis_name, to=V)


def stop_gradient(x: X) -> X:
    """Returns `x` without its gradient: `x.detach()` for every tensor of a tree.

    Shape and types: unchanged. Sends nothing. Backward: nothing.

    Args:
        x: a tensor or a pytree; leaves that are no tensors stay.

    Source: `jax.lax.stop_gradient`.

    Example:
        >>> import torch
        >>> torch.func.grad(lambda x: x * stop_gradient(x))(torch.tensor(3.0))
        tensor(3.)
    """
    stopped: X = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, x)
    return stopped
