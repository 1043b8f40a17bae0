"""Sharding rules written as letters for dims, as in "bmk,bkn->bmn" for `bmm`.

Dims of one letter must be sharded alike. One that the result lacks is summed over, so that sharding
it leaves a pending sum. Dims of a capital letter are mixed in other ways: each rank must have all
of them. Products, norms, convolutions and attention are such rules, and so is what is done to each
of the matrices or images that the last dims hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Final

from shardmap_torch.checker.spmd.layout import (
    ANY,
    Dim,
    Shape,
    ShardedTensor,
    UnrelatedError,
    agreed,
    axes_of,
    broadcast,
    in_words,
    merged,
    reject_bias,
    reshape,
    size_of_one_rank,
    unsharded,
)
from shardmap_torch.checker.spmd.ops.advice import CUT, STATISTICS
from shardmap_torch.checker.spmd.sharded import WRAP, Rule, Sharded, Step

Words = Mapping[str, str]
"""Nouns for dims of a letter, for messages."""

_FRONT: Final = "..."
"""Stands for the dims in front, which are those of all operands."""


def contract(
    equation: str,
    operands: Sequence[Sequence[Dim]],
    results: Sequence[Shape],
    words: Words | None = None,
    fix: str = WRAP,
) -> list[Sharded]:
    """Lays out results of these shapes on one device; dims without a known letter are unsharded.

    Raises:
        UnrelatedError: the operands are not sharded alike, or a dim that is mixed is sharded.

    Example:
        >>> rows, columns = (("tp", 2), (None, 4)), ((None, 8),)
        >>> contract("mk,kn->mn", [(columns, rows), (rows, columns)], [(8, 8)])
        [Sharded(dims=(((None, 8),), ((None, 8),)), partial=frozenset({'tp'}), ...)]
    """
    inputs, output = equation.split("->")
    found: dict[str, list[Dim]] = {}
    for term, own in zip(inputs.split(","), operands, strict=True):
        for letter, dim in zip(_letters(term, len(own)), own, strict=True):
            found.setdefault(letter, []).append(dim)
    dims = {letter: agreed(each, f"dim {letter}") for letter, each in found.items()}
    for letter, dim in dims.items():
        is_mixed = letter.isupper()
        is_summed = letter.islower() and letter not in output
        # Of equal entries, which any sharding suits, a rank has another number.
        if (is_mixed and axes_of(dim)) or (dim == ANY and (is_mixed or is_summed)):
            what = (words or {}).get(letter)
            told = f"{what}, and they are" if what else "entries along a dim that is"
            raise UnrelatedError(f"it mixes all {told} sharded", fix)
    summed = [dim for letter, dim in dims.items() if letter.islower() and letter not in output]
    partial = frozenset(axis for dim in summed for axis in axes_of(dim))
    pairs = zip_longest(output.split(","), results, fillvalue="")
    return [Sharded(_result(term, shape, dims), partial) for term, shape in pairs]


def _letters(term: str, rank: int) -> list[str]:
    """Returns a letter for each dim: digits for those in front, and "" for one without a letter."""
    letters = [*term.removeprefix(_FRONT)]
    front = rank - len(letters)
    return [str(at) if term.startswith(_FRONT) else "" for at in range(front)] + letters


def _result(term: str, shape: Any, dims: Mapping[str, Dim]) -> tuple[Dim, ...]:
    found = [dims.get(letter, ()) for letter in _letters(term, len(shape))]
    return tuple(
        dim if axes_of(dim) or dim == ANY else unsharded(size)
        for dim, size in zip(found, shape, strict=True)
    )


def product(equation: str) -> Rule:
    """Makes the rule of a product; operands beyond the letters are added, as in `addmm`."""
    count = equation.count(",") + 1

    def rule(step: Step) -> list[Sharded]:
        shards, shapes = step.shards, [shape for _, shape in step.results]
        [found] = contract(equation, [x.dims for x in shards[-count:]], shapes)
        added = shards[:-count]
        if not added:
            return [found]
        made = ShardedTensor(found.dims, *step.results[0])
        dims = broadcast([*added, made], len(found.dims))
        if any(own not in (dim, ANY) for own, dim in zip(found.dims, dims, strict=True)):
            raise UnrelatedError("the addend is sharded differently from the product")
        reject_bias(found.partial)
        return [replace(found, dims=dims)]

    return rule


def each(count: int) -> Rule:
    """Makes the rule of an operation on each matrix, or what else the last `count` dims hold."""

    def rule(step: Step) -> list[Sharded]:
        (x,), shapes = step.shards, [shape for _, shape in step.results]
        return contract(f"...{'ABC'[:count]}->{','.join(['...'] * len(shapes))}", [x.dims], shapes)

    return rule


def triangle(step: Step) -> list[Sharded]:
    """Lays out a triangle of each matrix.

    Raises:
        UnrelatedError: a rank has a part of the rows or columns, which it counts from 0.
    """
    try:
        return each(2)(step)
    except UnrelatedError:
        raise UnrelatedError(
            "it counts the rows and columns that a rank has, from 0", CUT
        ) from None


EACH: Final = {
    1: "reflection_pad1d replication_pad1d",
    2: "reflection_pad2d replication_pad2d _linalg_eigh _linalg_svd linalg_qr col2im",
    3: "reflection_pad3d replication_pad3d im2col",
}
"""Operations on each of the tensors that the last dims, as many as this, hold."""


def grouped_products(step: Step) -> list[Sharded]:
    """Lays out products of groups of rows, or of columns, whose ends each rank must have."""
    first, second = step.arguments["self"], step.arguments["mat2"]
    offsets = step.arguments["offs"]
    equation = _GROUPED.get((len(first.dims), len(second.dims)))
    if equation is None or (offsets is not None and axes_of(offsets.dims[0])):
        raise UnrelatedError("it divides a sharded dim into groups", WRAP)
    return contract(equation, [first.dims, second.dims], [step.results[0][1]])


_GROUPED: Final = {(2, 3): "Mk,Gkn->Mn", (2, 2): "mK,Kn->Gmn", (3, 3): "gmk,gkn->gmn"}
"""Products of groups by the numbers of dims; of two matrices each group gives one more."""


def bags(step: Step) -> list[Sharded]:
    """Lays out sums of rows of a table by lists of indices: columns of the table may be sharded."""
    weight, *others = _given(step, "weight", "indices", "offsets", "per_sample_weights")
    equation = (
        f"Re{',I,O,P'[: 2 * len(others)]}->Oe,,,{'Oe' if step.arguments['mode'] == 2 else ''}"
    )
    dims = [x.dims for x in (weight, *others)]
    return contract(equation, dims, [shape for _, shape in step.results], _IN_BAGS)


_IN_BAGS: Final = {"R": "rows of the table", **dict.fromkeys("IOP", "indices, which bags divide")}


# ------------------------------------------------------------------- convolutions and norms

_HALO = (
    "exchange the rows beside a shard with ppermute and convolve in a local_region, as in "
    "examples/spatial_convolution.py; or shard the batch or the channels."
)

_POSITIONS: Final = dict.fromkeys("XYZPQR", "positions, over which the kernel goes")
_AVERAGED: Final = dict.fromkeys("NCXYZ", "entries of which it takes a mean")


def convolve(step: Step) -> list[Sharded]:
    """Lays out a convolution: samples, groups and channels may be sharded, positions not.

    Raises:
        UnrelatedError: a dim over which the kernel goes is sharded, or channels differ.
    """
    x, weight, bias = (step.arguments[name] for name in ("input", "weight", "bias"))
    ((_, shape),) = step.results
    rank, (count, groups) = len(shape) - 2, _groups(step, "groups")
    inside, kernel = "XYZ"[:rank], "PQR"[:rank]
    channels = "gio" if step.arguments["transposed"] else "goi"
    operands = [_split(x, 1, count, groups), _split(weight, 0, count, groups)]
    split = (shape[0], groups, shape[1] // groups, *shape[2:])
    equation = f"ngi{inside},{channels}{kernel}->ngo{inside}"
    [found] = contract(equation, operands, [split], _POSITIONS, _HALO)
    samples, *own = found.dims
    dims = (samples, tuple(merged([*own[0], *own[1]])), *own[2:])
    if isinstance(bias, ShardedTensor):
        agreed([dims[1], bias.dims[0]], "the dim of output channels")
        reject_bias(found.partial)
    return [replace(found, dims=dims)]


def group_norm(step: Step) -> list[Sharded]:
    """Lays out a group norm: samples and groups may be sharded, positions not.

    Raises:
        UnrelatedError: a group has entries on several ranks.
    """
    x, (count, groups) = step.arguments["input"], _groups(step, "group")
    rank, scales = len(x.dims) - 2, _given(step, "weight", "bias")
    operands = [_split(x, 1, count, groups), *(_split(each, 0, count, groups) for each in scales)]
    shapes = [shape for _, shape in step.results[1:]]
    equation = f"ngC{'XYZ'[:rank]}{',gC' * len(scales)}->ng,ng"
    return [Sharded(x.dims), *contract(equation, operands, shapes, _AVERAGED, STATISTICS)]


def batch_norm(step: Step) -> list[Sharded]:
    """Lays out a batch norm: channels may be sharded, and samples too where it takes no mean.

    Raises:
        UnrelatedError: it takes a mean over a dim that is sharded.
    """
    x = step.arguments["input"]
    others = _given(step, "weight", "bias", "running_mean", "running_var")
    letters = "NXYZ" if step.arguments["training"] else "nxyz"
    own = f"{letters[0]}c{letters[1 : len(x.dims) - 1]}"
    shapes = [shape for _, shape in step.results]
    saved = ["c" if shape != (0,) else "" for shape in shapes[1:]]
    equation = f"{','.join([own, *'c' * len(others)])}->{','.join([own, *saved])}"
    dims = [each.dims for each in (x, *others)]
    return contract(equation, dims, shapes, _AVERAGED, STATISTICS)


def _given(step: Step, *names: str) -> list[ShardedTensor]:
    found = [step.arguments.get(name) for name in names]
    return [x for x in found if isinstance(x, ShardedTensor)]


def _groups(step: Step, name: str) -> tuple[int, int]:
    """Returns the numbers of groups of channels on a rank and on one device."""
    count: int = step.arguments[name]
    return count, step.unsharded_arguments.get(name, count)


def _split(x: ShardedTensor, at: int, count: int, groups: int) -> tuple[Dim, ...]:
    """Returns the dims with that of the channels split into groups and what is in one.

    Raises:
        UnrelatedError: a rank has not so many groups.
    """
    channels, per_group = x.part([at]), x.global_shape[at] // groups
    if ANY in channels.dims:
        raise size_of_one_rank()
    outer, inner = reshape(channels, (groups, per_group))
    have = 1
    for axis, base in outer:
        have *= base if axis is None else 1
    if have != count:
        raise UnrelatedError(
            f"it makes {count} groups on a rank and {groups} on one device, and the channels are "
            f"{in_words(x.dims[at])}",
            "divide the groups over the ranks as the channels are: groups // axis_size(axis).",
        )
    return (*x.dims[:at], outer, inner, *x.dims[at + 1 :])


# ------------------------------------------------------------------------------ attention

_MASKS: Final = ("attn_mask", "attn_bias", "bias")

_ATTENDED: Final = {
    **dict.fromkeys("EV", "features"),
    "K": "positions of keys",
    "Q": "positions of queries, which a causal mask counts",
}


def attend(step: Step) -> list[Sharded]:
    """Lays out attention, whose operands are `[batch..., heads, positions, features]`.

    Batches and heads are done one by one. With grouped heads, each of the keys' goes with as many
    of the queries' in a row. Positions of queries may be sharded where no causal mask counts them.

    Raises:
        UnrelatedError: heads do not belong together, or other dims are sharded.
    """
    query, *others = (step.arguments[name] for name in ("query", "key", "value"))
    shapes = [shape for _, shape in step.results]
    rows = "Q" if step.arguments.get("is_causal") else "q"
    padded = "Z" * (len(shapes[1]) - len(query.dims) + 1)  # the logarithms of sums
    equation = f"...h{rows}E,...hKE,...hKV->...h{rows}V,...h{rows}{padded}"
    operands = [query.dims, *(_with_heads_of(query, x) for x in others)]
    found = contract(equation, operands, shapes, _ATTENDED)
    mask = next((step.arguments[name] for name in _MASKS if name in step.arguments), None)
    if isinstance(mask, ShardedTensor):
        weights = [*found[0].dims[:-1], others[0].dims[-2]]
        for at in range(1, len(mask.dims) + 1):
            if mask.global_shape[-at] != 1:
                agreed([mask.dims[-at], weights[-at]], f"dim {len(mask.dims) - at} of the mask")
    return found


def _with_heads_of(query: ShardedTensor, x: ShardedTensor) -> tuple[Dim, ...]:
    """Returns the dims of keys or values after each head has become as many as go with it."""
    heads, own = query.dims[-3], x.dims[-3]
    size, all_ = x.global_shape[-3], query.global_shape[-3]
    many = tuple(merged([*own, (None, all_ // size)]))
    # Of equal heads it does not matter which one goes with a query's.
    if size == 1 or own in (heads, ANY) or (not all_ % size and many == heads and heads != ANY):
        return (*x.dims[:-3], heads, *x.dims[-2:])
    raise UnrelatedError(
        f"its heads are {in_words(heads)} in the queries ({all_} on one device) and "
        f"{in_words(own)} in the keys or values ({size} on one device), so that heads on a rank do "
        "not belong together",
        "shard both over the same axes, by a number of ranks that divides the heads of the keys.",
    )


ATTENTION: Final = (
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable"
)
"""Attention in the overloads of all its backends."""
