"""Sharding rules of convolutions, of norms over groups and batches, and of bags of embeddings."""

from collections.abc import Sequence
from math import prod

from shardmap_torch.checker.spmd.layout import (
    ANY,
    Dim,
    ShardedTensor,
    UnrelatedError,
    agreed,
    axes_of,
    counted,
    merged,
    reject_bias,
    reshape,
    size_of_one_rank,
    step_of,
    unsharded,
)
from shardmap_torch.checker.spmd.sharded import GATHER, WRAP, Sharded, Step

_HALO = (
    "exchange the rows beside a shard with ppermute and convolve in a local_region, as in "
    "examples/spatial_convolution.py; or shard the batch or the channels."
)


def convolve(step: Step) -> list[Sharded]:
    """Lays out a convolution: samples, groups and channels may be sharded, positions not.

    Channels that are contracted leave a pending sum.

    Raises:
        UnrelatedError: a dim over which the kernel goes is sharded, or channels differ.
    """
    x, weight, bias = (step.arguments[name] for name in ("input", "weight", "bias"))
    if any(map(_is_shared, [*x.dims[2:], *weight.dims[2:]])):
        raise UnrelatedError("the kernel goes over a dim that is sharded", _HALO)
    x_group, x_inner = _grouped(x, 1, step, "groups")
    group_dim, first = _grouped(weight, 0, step, "groups")
    outside, inside = (
        (weight.dims[1], first) if step.arguments["transposed"] else (first, weight.dims[1])
    )
    group_dim = agreed([x_group, group_dim], "the dim of groups")
    contracted = agreed([x_inner, inside], "the dim of input channels")
    if ANY in (contracted, group_dim, outside):
        raise size_of_one_rank()
    channels = tuple(merged([*group_dim, *outside]))
    partial = frozenset(axes_of(contracted))
    if isinstance(bias, ShardedTensor):
        agreed([channels, bias.dims[0]], "the dim of output channels")
        reject_bias(partial)
    positions = [unsharded(size) for size in step.results[0][1][2:]]
    return [Sharded((x.dims[0], channels, *positions), partial)]


def _is_shared(dim: Dim) -> bool:
    return dim == ANY or bool(axes_of(dim))


def _grouped(x: ShardedTensor, dim: int, step: Step, count: str) -> tuple[Dim, Dim]:
    """Splits channels into groups and what is in one; the argument `count` is their number.

    Raises:
        UnrelatedError: a rank has not so many groups.
    """
    num_local = step.arguments[count]
    num_groups = step.unsharded_arguments.get(count, num_local)
    dims = reshape(x.part([dim]), (num_groups, x.global_shape[dim] // num_groups))
    if ANY in dims:
        return ANY, ANY
    if prod(base for axis, base in dims[0] if axis is None) != num_local:
        raise UnrelatedError(
            f"it makes {num_local} groups on a rank and {num_groups} on one device, and the "
            f"channels are {_words(x.dims[dim])}",
            "divide the groups over the ranks as the channels are: groups // axis_size(axis).",
        )
    return dims[0], dims[1]


def _words(dim: Dim) -> str:
    axes = axes_of(dim)
    return f"sharded over {', '.join(map(repr, axes))}" if axes else "unsharded"


def group_norm(step: Step) -> list[Sharded]:
    """Lays out a group norm: samples and groups may be sharded, positions not.

    Raises:
        UnrelatedError: a group has entries on several ranks.
    """
    x = step.arguments["input"]
    if ANY in x.dims[1:]:
        raise size_of_one_rank()
    if any(map(_is_shared, x.dims[2:])):
        raise UnrelatedError("it takes a mean over a dim that is sharded", WRAP)
    groups, inner = _grouped(x, 1, step, "group")
    if axes_of(inner):
        raise UnrelatedError(
            "it takes a mean over channels of one group, which are sharded", GATHER
        )
    _require_like_channels(step, x.dims[1], ("weight", "bias"))
    statistics = Sharded((x.dims[0], groups))
    return [Sharded(x.dims), statistics, statistics]


def _require_like_channels(step: Step, channels: Dim, names: Sequence[str]) -> None:
    for name in names:
        each = step.arguments.get(name)
        if isinstance(each, ShardedTensor) and each.dims != (channels,):
            raise UnrelatedError(
                f"its {name} is not sharded like the channels",
                "shard it like the channels, with P or with convert(x, axis, src=R, dst=V, dim=0).",
            )


def batch_norm(step: Step) -> list[Sharded]:
    """Lays out a batch norm: channels may be sharded, and samples too where it takes no mean.

    Raises:
        UnrelatedError: it takes a mean over a dim that is sharded.
    """
    x = step.arguments["input"]
    if ANY in x.dims:
        raise size_of_one_rank()
    others = [dim for at, dim in enumerate(x.dims) if at != 1]
    if step.arguments["training"] and any(map(_is_shared, others)):
        raise UnrelatedError("it takes a mean over a dim that is sharded", WRAP)
    _require_like_channels(step, x.dims[1], ("weight", "bias", "running_mean", "running_var"))
    saved = [
        (x.dims[1] if global_shape != (0,) else unsharded(0),)
        for _, global_shape in step.results[1:]
    ]
    return [Sharded(x.dims), *map(Sharded, saved)]


def patches(step: Step) -> list[Sharded]:
    """Lays out `im2col`: each channel of each sample is taken apart into patches."""
    (x,) = step.shards
    ((_, global_shape),) = step.results
    if any(map(_is_shared, x.dims[-2:])) or ANY in x.dims:
        raise UnrelatedError("the patches go over a dim that is sharded", _HALO)
    *samples, channels, _, _ = x.dims
    size = prod(step.arguments["kernel_size"])
    digits_taken = tuple(merged([*channels, *unsharded(size)]))
    return [Sharded((*samples, digits_taken, unsharded(global_shape[-1])))]


def embed_bags(step: Step) -> list[Sharded]:
    """Lays out bags of embeddings: features may be sharded, and bags of one size.

    Raises:
        UnrelatedError: rows of the table are sharded, or bags of several sizes.
    """
    weight, indices, offsets = (step.arguments[n] for n in ("weight", "indices", "offsets"))
    if _is_shared(weight.dims[0]):
        raise UnrelatedError("it looks up rows of a table whose rows are sharded", WRAP)
    each = step.arguments["per_sample_weights"]
    if isinstance(each, ShardedTensor) and each.dims != indices.dims:
        raise UnrelatedError("its per_sample_weights are not sharded like the indices", GATHER)
    bags = _bags(indices, offsets, step)
    ((_, result), *others) = step.results
    if len(bags) > 1 and bags != unsharded(result[0]) and not axes_of(bags):
        raise size_of_one_rank()
    # What it notes for its backward must not be used for anything else.
    notes: list[Sequence[Dim]] = [[counted(1)] * len(global_shape) for _, global_shape in others]
    return [Sharded((bags, weight.dims[1])), *(Sharded(tuple(dims)) for dims in notes)]


def _bags(indices: ShardedTensor, offsets: ShardedTensor, step: Step) -> Dim:
    """The dim of the bags."""
    size = step_of(offsets.dims[0])
    if size is None:
        if any(map(_is_shared, [*indices.dims, *offsets.dims])):
            raise UnrelatedError("its bags are sharded, and of sizes that may differ", WRAP)
        return unsharded(step.results[0][1][0])
    if step.arguments["include_last_offset"] or indices.global_shape != (
        offsets.global_shape[0] * size,
    ):
        raise UnrelatedError("its bags are not all of one size", WRAP)
    bags, inner = reshape(indices, (offsets.global_shape[0], size))
    if ANY in (bags, inner) or axes_of(inner) or inner != unsharded(size):
        raise UnrelatedError("a bag has entries on several ranks", GATHER)
    return bags
