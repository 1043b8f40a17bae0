"""Attention of sharded heads equals torch's on one device, grouped or not."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardmap_torch import I, LayerError, P, R, convert, make_mesh, shard_map, validate_rule
from shardmap_torch.nn import attention, own_kv_heads
from shardmap_torch.nn.attention import selected_heads
from tests.nn.support.cases import Case, budget, mapped, random
from tests.support.golden import told

Q, K, V = random(4, 6, 4, 2), random(4, 6, 2, 2, seed=1), random(4, 6, 2, 3, seed=2)
Q8 = random(4, 6, 8, 2)
SEES = torch.tensor([[j <= i or j == 5 for j in range(6)] for i in range(6)])


def torchs(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    return y.transpose(1, 2)


def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last two queries only."""
    return attention(q[:, 4:], k, v, causal=True, offset=torch.tensor(4))


def decode_one_device(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torchs(q, k, v, is_causal=True)[:, 4:]


def masked(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return attention(q, k, v, mask=SEES, causal=causal, scale=0.5)


def replicated_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (own_kv_heads(convert(x, "tp", src=I, dst=R), "tp", 8) for x in (k, v))
    return attention(q, k, v, causal=True)


HEADS = P("dp", None, "tp")
SHARDED: dict[str, Any] = {
    "in_specs": (HEADS, HEADS, HEADS),
    "out_spec": HEADS,
    "inputs": (Q, K, V),
}
CASES = {
    "causal": Case(partial(attention, causal=True), partial(torchs, is_causal=True), **SHARDED),
    "of all": Case(attention, torchs, **SHARDED),
    "with an offset": Case(decode, decode_one_device, **SHARDED),
    "masked": Case(
        partial(masked, causal=False), partial(torchs, attn_mask=SEES, scale=0.5), **SHARDED
    ),
    "masked and causal": Case(
        partial(masked, causal=True),
        partial(torchs, attn_mask=SEES.tril(), scale=0.5),
        **SHARDED,
    ),
    "of fewer key heads than ranks": Case(
        replicated_heads,
        partial(torchs, is_causal=True),
        (HEADS, P("dp"), P("dp")),
        HEADS,
        (Q8, K, V),
        sizes=(1, 4),
    ),
}


@pytest.mark.parametrize("name", ["of all", "causal"])
def test_a_product_with_the_hessian_is_that_of_one_device(name: str) -> None:
    """torch's fused kernels have one derivative only, also where nothing is mapped."""
    case = CASES[name]
    mesh = make_mesh(case.sizes, ("dp", "tp"), kind="simulated", simulate="vmap")
    found = []
    for f in (mapped(case, mesh), case.body, sdpa_kernel(SDPBackend.MATH)(case.reference)):

        def slope(*xs: Tensor, f: Any = f) -> Any:
            return sum(g.sin().sum() for g in torch.func.grad(pulled(f), (0, 1, 2))(*xs))

        found.append(torch.func.grad(slope, (0, 1, 2))(Q, K, K))  # kernels take one width
    for each in found[:-1]:
        torch.testing.assert_close(each, found[-1])


def pulled(f: Any) -> Any:
    return lambda *xs: f(*xs).sin().sum()


def test_nothing_is_sent() -> None:
    assert budget(CASES["causal"]) == ({}, {})
    # Keys and values that all ranks hold: their gradients are summed.
    assert budget(CASES["of fewer key heads than ranks"]) == ({}, {"all_reduce": 2})


def test_a_query_that_sees_no_key_gets_zeros() -> None:
    mask = torch.tensor([[False, False], [True, False]])
    v = torch.tensor([[[3.0]], [[5.0]]])
    found = attention(torch.ones(2, 1, 4), torch.ones(2, 1, 4), v, mask=mask)
    assert found.flatten().tolist() == [0, 3]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_choice_of_key_heads_keeps_its_promise(num_ranks: int) -> None:
    region = selected_heads("tp", 6).typed(P(), ranks=(4,))
    assert validate_rule(region, random(2, 3, 2, 2), num_ranks=num_ranks)


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 3), (2, 3), (2, 3)],
        [(2, 3, 4), (2, 2, 4), (2, 2, 4)],
    ],
)
def test_shapes_that_do_not_match_are_refused(shapes: list[tuple[int, ...]]) -> None:
    with told(LayerError):
        attention(*(torch.ones(shape) for shape in shapes))


@pytest.mark.parametrize(
    "num_heads",
    [
        2**61 - 1,
        8,
    ],
)
def test_heads_that_do_not_divide_are_refused_with_what_does(num_heads: int) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    f = shard_map(
        lambda kv: own_kv_heads(kv, "tp", num_heads), mesh=mesh, in_specs=P(), out_specs=P("tp")
    )
    with told(LayerError):
        f(torch.ones(1, 3, 2))
