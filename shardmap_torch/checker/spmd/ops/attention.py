"""Sharding rules of `scaled_dot_product_attention`, in the overloads of all its backends.

Queries, keys and values are `[batch..., heads, positions, features]`. Batches and heads are done
one by one, so that they may be sharded; with grouped heads, each of the keys' goes with as many of
the queries' in a row. Positions of queries may be sharded where no causal mask counts them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardmap_torch.checker.rules.rule import overloads
from shardmap_torch.checker.spmd.layout import (
    ANY,
    Dim,
    ShardedTensor,
    UnrelatedError,
    agreed,
    axes_of,
    in_words,
    unsharded,
)
from shardmap_torch.checker.spmd.sharded import WRAP, Rule, Sharded, Step
from shardmap_torch.core.torch_private.engine import OpOverload

_MASKS: Final = ("attn_mask", "attn_bias", "bias")


def _attention(step: Step) -> list[Sharded]:
    lead, rows, features = _laid_out(step)
    found = []
    for index, (_, shape) in enumerate(step.results):
        own: tuple[Dim, ...] = tuple(map(unsharded, shape))
        if index == 0:
            own = (*lead, rows, features)
        elif index == 1:  # the logarithms of sums, which some backends pad
            count = len(lead)
            own = (*lead, rows if axes_of(rows) else own[count], *own[count + 1 :])
        found.append(Sharded(own))
    return found


def _attention_backward(step: Step) -> list[Sharded]:
    lead, rows, features = _laid_out(step)
    query = step.arguments["query"]
    for name in ("grad_out", "grad_out_", "out"):
        x = step.arguments.get(name)
        if isinstance(x, ShardedTensor) and x.dims != (*lead, rows, features):
            raise UnrelatedError(f"{name} is not sharded like the result", WRAP)
    names = ("query", "key", "value", _mask_name(step.arguments))
    found = []
    for name, (_, shape) in zip(names, step.results, strict=False):
        x = step.arguments.get(name)
        if not isinstance(x, ShardedTensor) or x.global_shape != shape:
            raise UnrelatedError("it gives a gradient of another shape than its operand", WRAP)
        found.append(Sharded(x.dims, frozenset(query.axes) - frozenset(x.axes)))
    return found


def _laid_out(step: Step) -> tuple[tuple[Dim, ...], Dim, Dim]:
    """The dims of the result: batches and heads, positions, features."""
    query, key, value = (step.arguments[name] for name in ("query", "key", "value"))
    mask = step.arguments.get(_mask_name(step.arguments))
    heads = _grouped(query, [key, value])
    batches = [
        agreed([x.dims[dim] for x in (query, key, value)], f"batch dim {dim}")
        for dim in range(len(query.dims) - 3)
    ]
    for x in (query, key, value):
        _reject_sharded(x.dims[-1], "features")
    _reject_sharded(key.dims[-2], "positions of keys")
    _reject_sharded(value.dims[-2], "positions of values")
    rows = query.dims[-2]
    if step.arguments.get("is_causal"):
        _reject_sharded(rows, "positions of queries, which a causal mask counts")
    if isinstance(mask, ShardedTensor):
        _check_mask(mask, [*batches, heads, rows, key.dims[-2]])
    return (*batches, heads), rows, value.dims[-1]


def _reject_sharded(dim: Dim, what: str) -> None:
    if axes_of(dim) or dim == ANY:
        raise UnrelatedError(f"it mixes all {what}, and they are sharded", WRAP)


def _grouped(query: ShardedTensor, others: Sequence[ShardedTensor]) -> Dim:
    """The queries' heads; each head of the keys goes with several in a row of them."""
    heads = query.dims[-3]
    for x in others:
        own, size, all_ = x.dims[-3], x.global_shape[-3], query.global_shape[-3]
        if size == 1 or own == heads:
            continue  # one head for all of them, or one for each
        if ANY in (own, heads) or all_ % size or _with_groups(own, all_ // size) != heads:
            raise UnrelatedError(
                f"its heads are {in_words(heads)} in the queries ({all_} on one device) and "
                f"{in_words(own)} in the keys or values ({size} on one device), so that heads on a "
                "rank do not belong together",
                "shard both over the same axes, by a number of ranks that divides the heads of the "
                "keys.",
            )
    return heads


def _with_groups(heads: Dim, size: int) -> Dim:
    """The heads after each has become several in a row."""
    if heads and heads[-1][0] is None:
        return (*heads[:-1], (None, heads[-1][1] * size))
    return (*heads, *unsharded(size))


def _check_mask(mask: ShardedTensor, dims: Sequence[Dim]) -> None:
    """Requires that a mask is sharded like the weights that it masks, where it is not expanded."""
    for at in range(1, len(mask.dims) + 1):
        if mask.global_shape[-at] != 1:
            agreed([mask.dims[-at], dims[-at]], f"dim {len(mask.dims) - at} of the mask")


def _mask_name(arguments: Mapping[str, Any]) -> str:
    return next((name for name in _MASKS if name in arguments), "")


_FORWARD: Final = (
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable"
)
_BACKWARD: Final = " ".join(f"{name}_backward" for name in _FORWARD.split())

ATTENTION: Final[Mapping[OpOverload, Rule]] = {
    **dict.fromkeys(overloads(_FORWARD), _attention),
    **dict.fromkeys(overloads(_BACKWARD), _attention_backward),
}
