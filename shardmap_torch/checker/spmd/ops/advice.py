"""Advice of global strictness: code to write in place of refused code."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from shardmap_torch.checker.spmd.layout import ShardedTensor
from shardmap_torch.spec import P

UNSEEN: Final = (
    "take derivatives of gradients in reverse mode, as jacrev(grad(f)) for hessian(f); or wrap "
    "what computes it in local_region(f, in_types, out_types)."
)
"""Advice for values of which nothing is known, as tangents of gradients are."""

LAYERS: Final = {
    "embedding": "look ids up by nn.vocab_parallel_embedding",
    "index": "look ids of a sharded table up by nn.vocab_parallel_embedding",
    "index_select": "look ids of a sharded table up by nn.vocab_parallel_embedding",
    "log_softmax": "take the loss by nn.vocab_parallel_cross_entropy",
}
"""Layers to use in place of operations on shards."""

NUMBER: Final = (
    "a number that depends on local shapes must be right on one device too: multiply sizes by "
    "axis_size(axis)."
)
"""Advice where an argument, or a factor, is another number on one device."""

IN_BACKWARD: Final = (
    "a number that depends on local shapes must be right on one device too: multiply it by "
    "axis_size({}), in the forward, or in a backward of shardmap_torch.Function, which knows axes."
)
"""The same in a backward of the user's own."""

COMPARED: Final = (
    "if these are ids of a sharded table, every rank compares them with 0 ... n of its own rows: "
    "subtract axis_index(axis) * n from them first, or look them up by "
    f"nn.vocab_parallel_embedding. Otherwise, {NUMBER}"
)
"""The same where integers are compared with that number, or clamped to it."""

SENT: Final = (
    "one device has one rank, and its value is another than that of a rank of several. Rows of one "
    "rank's part are rows of all_gather(x, axis, dim=0, dst=R), by their global numbers, as [4:5]; "
    "what is no row, as a seed or a threshold, is an argument with P(), equal on all ranks."
)
"""Advice where one rank's value is broadcast to the others."""

PART: Final = (
    "take each rank's own part: entries by their positions, x[torch.arange(n) + axis_index(axis) * "
    "n] for n of them; or of all, name the axis in its spec, or write convert(x, axis, src=R, "
    "dst=V, dim=...)."
)
"""Advice where ranks take as many entries of what is unsharded as they have of something else."""

DRAWN: Final = (
    "say how what is drawn is sharded, over each axis, as in dropout(key, x, p, spec=P('dp')) for "
    "an x that is P('dp'); or wrap draws of each rank's own, from fold_axis(key, axis), in "
    "local_region."
)
"""Advice for draws that are not this rank's part of a draw on one device."""

SHARD: Final = (
    "draw like a tensor that is sharded so, as torch.rand_like(x), or x.new_empty(...).uniform_()."
)
"""Advice for equal draws where one device draws other numbers for each rank."""

KEY: Final = "leave generator= out, or draw from a key of shardmap_torch.random."
"""Advice for draws from a generator of the user's own."""

PER_RANK: Final = "wrap code that is per-rank by nature in local_region(f, in_types, out_types)."
"""Advice for values that mean nothing on one device."""

DECIDED: Final = (
    "draw what all ranks decide alike from a key of shardmap_torch.random; where a model drops "
    "layers by such a number (LayerDrop), set its probability to 0."
)
"""Advice for a value that is each rank's own because each draws it."""

STATISTICS: Final = (
    "its statistics are those of a rank's part. Compute it from those of all: (x - m) / (v + "
    "eps).sqrt() with m = all_reduce(x.mean(dim, keepdim=True), axis, op='mean', dst=R) and v = "
    "all_reduce((x - m).square().mean(dim, keepdim=True), axis, op='mean', dst=R)."
)
"""Advice where a norm has a part of the dims that it normalizes."""

OTHER: Final = (
    "compute it from the same operands there: where a local size decides, as in "
    "a if x.shape[0] < 8 else b, compare x.shape[0] * axis_size(axis); or wrap per-rank code in "
    "local_region."
)
"""About a value that is another one than on one device."""

STACKED: Final = "gather along the dim that the blocks are of, with tiled=True."
"""About values of several ranks along a dim of their own."""


NORM: Final = (
    "squares add up, and norms do not: all_reduce(x.square().sum(), axis, dst=R).sqrt(), or "
    "dst=I if all ranks go on alike; of "
    "gradients sharded by specs optim.global_norm(grads, specs) is the norm, by which "
    "clip_by_global_norm clips."
)
"""Advice for the norm of a rank's part."""

CUT: Final = (
    "compare positions, in a sharded dim the rank's own: in place of ones(n, columns).tril() take "
    "mask = rows[:, None] >= torch.arange(columns) (<= for triu), with rows = torch.arange(n) + "
    "axis_index(axis) * n. Hide by x.masked_fill(~mask, -inf) before a softmax, logsumexp or max, "
    "and by torch.where(mask, x, 0) before a sum or product."
)
"""Advice for a triangle of a part of the rows or columns."""

PICKED: Final = (
    "it tells which ranks have the {} over {!r}, from {}",
    "of the indices that these ranks have take one: count them from the first rank's on, as "
    "at + axis_index({1!r}) * x.shape[dim], and all_reduce them over {1!r} with op='min', "
    "elsewhere with a number beyond all; or gather the dim first, with all_gather.",
)
"""Words for a comparison that tells which ranks have an extremum of all, and advice."""


def gather_advice(x: ShardedTensor, axes: Sequence[str], dim: int, split: int | None) -> str:
    """Returns advice for a gather, or an exchange, of a dim that the axes do not shard within."""
    shards = {axis: x.sharded_by(axis) for axis in axes}
    other = next((at for at in shards.values() if at != dim), dim)
    if other is None:
        return "leave it out over axes that shard no dim, over which all ranks have the same."
    if other != dim:
        say, split = f"gather with dim={other}", dim if split == other else split
        say = say if split is None else f"say split_dim={split}, concat_dim={other}"
        return f"{min(shards)!r} shards dim {other}: {say}."
    return (
        "gather the axes that shard the dim at once, in the order of its spec, or one by one, the "
        "last one first."
    )


DST: Final = "dst=R if ranks go on with it on their own shards, dst=I if all do the same"
"""Advice about the type after a sum."""

AVERAGED: Final = "op='mean'"
"""The start of the cause of a factor that comes from a mean over the ranks."""

MEANS: Final = {
    AVERAGED: "leave out",
    "ReduceOp.AVG": "take ReduceOp.SUM in place of",
    "pmean": "take psum in place of",
}
"""The same by what users write, and what to do about it."""

DIVIDED: Final = "a division by the number of ranks"
"""The start of the cause of a factor that comes from such a division."""

COPIES: Final = "a sum of what every rank has"
"""The start of the cause of a factor that comes from equal values on the ranks."""


def in_digits(scale: Fraction) -> str:
    """Returns a factor as a fraction, or as a decimal where that is none, as a root is."""
    return f"{scale}" if scale.denominator <= 10**6 else f"{float(scale):.6g}"


def multiple(scale: Fraction, cause: str, axis: str, is_pending: bool) -> tuple[str, str]:
    """Returns what is said of a value that is a multiple of that on one device, and advice.

    Args:
        scale: the factor.
        cause: the step that made it.
        axis: over which it is a mean of each rank's part; empty if it is none.
        is_pending: whether the means have not been summed yet.
    """
    if axis and is_pending:
        what = "mean of a rank's part"
        fix = f"all_reduce it over {axis!r} first, with op='mean', and {DST}."
    elif axis:
        what = "sum of the means of all parts"
        fix = f"reduce it over {axis!r} with op='mean', or divide the mean by axis_size({axis!r})."
    if axis:
        return f"over {axis!r} it is the {what}, from {cause}", fix
    told = f"it is {in_digits(scale)} times that value, because of {cause}"
    for mean, instead in MEANS.items():
        if cause.startswith(mean):
            fix = f"{instead} {mean}, which is right for means of each rank's part."
            return f"{told}, of what is to be added up", fix
    if cause.startswith(COPIES):
        return told, "leave out the all_reduce, or add up the numbers of each rank's own part."
    if cause.startswith(DIVIDED):
        return told, "leave that division out: what it divides is that of one device already."
    return told, NUMBER


def counted(name: str, is_draw: bool) -> tuple[str, str]:
    """Returns what is said of positions that each rank counts by itself, and advice."""
    if is_draw:
        return "each rank draws the first of the numbers that one device draws", DRAWN
    return (
        f"its {name} counts the entries that a rank has, from 0 on each rank",
        "positions in a sharded dim depend on the rank: write torch.arange(n) + "
        "axis_index(axis) * n, or pass them as an argument that is sharded.",
    )


def spec_advice(own: P, is_right: bool) -> str:
    """Returns advice for a value that is sharded otherwise than its spec promises.

    Args:
        own: the spec of the value.
        is_right: whether that says all of its layout.
    """
    if is_right:
        return f"say {own!r}, as it is sharded; or gather and shard it as the spec says."
    return (
        "no spec says this: gather the last axis of a dim's spec first, and keep a sharded dim the "
        "first of those that it is split into."
    )
