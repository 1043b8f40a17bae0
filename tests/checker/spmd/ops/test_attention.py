"""check="global": scaled_dot_product_attention of sharded heads, batches and positions."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import P, ShardTypeError, check_program, make_mesh, shard_map
from tests.checker.support.outcomes import outcome
from tests.support.golden import told

HEADS: Final = P("dp", "tp")
MESH: Final = make_mesh((2, 2), ("dp", "tp"), kind="simulated", simulate="ranks")
ABSTRACT: Final = make_mesh((2, 2), ("dp", "tp"), kind="abstract")
sdpa = functional.scaled_dot_product_attention


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def lower(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


def rotated(x: Tensor) -> Tensor:
    """Rotary embeddings, with tables made in the body."""
    angles = torch.outer(torch.arange(x.shape[-2]), 0.1 ** torch.arange(x.shape[-1] // 2))
    a, b = x.to(angles.dtype).chunk(2, -1)
    turned = torch.cat(
        [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1
    )
    return turned.to(x.dtype)


def with_mask_of_the_body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = rotated(q) @ rotated(k).mT
    size = q.shape[-2]
    mask = torch.full((size, size), float("-inf"), dtype=q.dtype).triu(1)
    weights = (weights + mask).masked_fill(~lower(size), float("-inf"))
    return sdpa(rotated(q), rotated(k), v, attn_mask=mask) + weights.softmax(-1) @ v


Attention = Callable[..., Tensor]


def with_copies(heads: Callable[[Tensor, Tensor], Tensor]) -> Attention:
    """Attention to copies of the keys' heads, as many as the queries that a rank has."""
    return lambda q, k, v: sdpa(q, heads(k, q), heads(v, q))


def by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def in_groups(k: Tensor, q: Tensor) -> Tensor:
    return k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


ONE_HEAD: Final[dict[str, Attention]] = {
    "expanded": with_copies(lambda k, q: k.expand_as(q)),
    "repeated": with_copies(lambda k, q: k.repeat(1, q.shape[1], 1, 1)),
    "repeated in groups": with_copies(in_groups),
    "expanded and flattened": with_copies(
        lambda k, q: k[:, :, None].expand(-1, -1, q.shape[1], -1, -1).flatten(1, 2)
    ),
    "by products": by_products,
    "expanded, by products": lambda q, k, v: by_products(q, k.expand_as(q), v.expand_as(q)),
}

RIGHT: Final[dict[str, tuple[Attention, int, tuple[P, ...], tuple[int, ...]]]] = {
    "causal": (lambda q, k, v: sdpa(q, k, v, is_causal=True), 4, (HEADS,) * 3, ()),
    "grouped": (lambda q, k, v: sdpa(q, k, v, enable_gqa=True), 2, (HEADS,) * 3, ()),
    "one head of keys": (
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True, is_causal=True),
        1,
        (HEADS, P("dp"), P("dp")),
        (),
    ),
    "grouped, unsharded heads": (
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
        2,
        (P("dp"),) * 3,
        (),
    ),
    "mask of two dims": (
        lambda q, k, v: sdpa(q, k, v, attn_mask=lower(q.shape[-2])),
        4,
        (HEADS,) * 3,
        (),
    ),
    "mask of four dims, grouped": (
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=m > 0, enable_gqa=True),
        2,
        (HEADS, HEADS, HEADS, P("dp")),
        (4, 1, 6, 6),
    ),
    "additive mask of each head": (
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=m),
        4,
        (HEADS, HEADS, HEADS, P(None, "tp")),
        (1, 4, 6, 6),
    ),
    "positions of queries, with their mask": (
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=m),
        4,
        (P("dp", None, "tp"), P("dp"), P("dp"), P("tp")),
        (6, 6),
    ),
    "mask and rotary tables of the body": (with_mask_of_the_body, 4, (HEADS,) * 3, ()),
    **{name: (body, 1, (HEADS, P("dp"), P("dp")), ()) for name, body in ONE_HEAD.items()},
}


@pytest.mark.parametrize("name", RIGHT)
def test_attention_on_shards_is_that_of_one_device(name: str) -> None:
    attention, heads, specs, mask = RIGHT[name]
    operands = [drawn(4, 4, 6, 8), drawn(4, heads, 6, 8), drawn(4, heads, 6, 8)]
    operands += [drawn(*mask)] if mask else []
    mapped: Any = shard_map(
        attention, mesh=MESH, in_specs=specs, out_specs=specs[0], check="global"
    )
    torch.testing.assert_close(outcome(mapped, operands), outcome(attention, operands))


WRONG: Final[dict[str, tuple[Attention, int, tuple[P, ...], tuple[int, ...]]]] = {
    "grouped with unsharded keys": (
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
        2,
        (HEADS, P("dp"), P("dp")),
        (),
    ),
    "copies of unsharded keys in groups of a rank": (
        with_copies(in_groups),
        2,
        (HEADS, P("dp"), P("dp")),
        (),
    ),
    "causal positions": (
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        4,
        (P("dp", None, "tp"), P("dp"), P("dp")),
        (),
    ),
    "positions of keys": (
        lambda q, k, v: sdpa(q, k, v),
        4,
        (P("dp"), P("dp", None, "tp"), P("dp", None, "tp")),
        (),
    ),
    "mask of other heads": (
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=m),
        4,
        (HEADS, HEADS, HEADS, P(None, "dp")),
        (1, 4, 6, 6),
    ),
    "mask of the first rows": (
        lambda q, k, v, m: sdpa(q, k, v, attn_mask=m[: q.shape[-2]]),
        4,
        (P("dp", None, "tp"), P("dp"), P("dp"), P()),
        (6, 6),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_attention_that_is_another_on_one_device_is_refused(name: str) -> None:
    attention, heads, specs, mask = WRONG[name]
    operands = [drawn(4, 4, 6, 8), drawn(4, heads, 6, 8), drawn(4, heads, 6, 8)]
    operands += [drawn(*mask)] if mask else []
    mapped = shard_map(attention, mesh=ABSTRACT, in_specs=specs, out_specs=specs[0], check="global")
    with told(ShardTypeError):
        check_program(mapped, *operands)


aten = torch.ops.aten
BACKENDS: Final[dict[str, Attention]] = {
    "flash": lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v)[0],
    "efficient": lambda q, k, v: aten._scaled_dot_product_efficient_attention(
        q, k, v, lower(6).to(q.dtype).expand(q.shape[0], q.shape[1], 6, 6), True
    )[0],
    "cudnn": lambda q, k, v: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[0],
}


@pytest.mark.parametrize("name", BACKENDS)
def test_the_overloads_of_all_backends_have_a_rule(name: str) -> None:
    operands = [torch.randn(4, 4, 6, 8) for _ in range(3)]
    specs = (HEADS,) * 3
    mapped = shard_map(
        BACKENDS[name], mesh=ABSTRACT, in_specs=specs, out_specs=HEADS, check="global"
    )
    check_program(mapped, *operands)
    positions = (P("dp"), P("dp", None, "tp"), P("dp", None, "tp"))
    other = shard_map(
        BACKENDS[name], mesh=ABSTRACT, in_specs=positions, out_specs=P("dp"), check="global"
    )
    with pytest.raises(ShardTypeError, match="mixes all positions of keys"):
        check_program(other, *operands)
