"""Attention and products of many ranks: one call of a kernel, with one device's values."""

from collections.abc import Callable
from typing import Any, Final, Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shardmap_torch import Mesh, P, make_mesh, shard_map, value_and_grad
from shardmap_torch.backends.batching import add_batching_rules
from shardmap_torch.core.torch_private.engine import TorchDispatchMode
from tests.programs.support.harness import random

HEADS = P("dp", "tp")
Q, K, V = (random((2, 8, 3, 4), seed) for seed in range(3))
MESH = make_mesh((2, 4), ("dp", "tp"), kind="simulated", simulate="vmap")


def outside(attend: Callable[..., Tensor], specs: Any, *xs: Tensor) -> list[Tensor]:
    xs = tuple(x.clone().requires_grad_() for x in xs)
    y = shard_map(attend, mesh=MESH, in_specs=specs, out_specs=HEADS)(*xs)
    return [y, *torch.autograd.grad(y.sin().sum(), xs)]


def test_a_product_with_a_tensor_that_outlived_its_body_is_refused_by_torch() -> None:
    kept: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with pytest.warns(UserWarning, match="kept keeps a tensor of the body"):
        shard_map(body, mesh=MESH, in_specs=HEADS, out_specs=HEADS)(Q)
    with pytest.raises(RuntimeError, match="may have escaped"):
        Q @ kept[-1].mT
    with pytest.raises(RuntimeError, match="may have escaped"):
        scaled_dot_product_attention(kept[-1], K, V)


def by_torch_func(attend: Callable[..., Tensor], specs: Any, *xs: Tensor) -> list[Tensor]:
    def step(*xs: Tensor) -> tuple[Tensor, ...]:
        every = tuple(range(len(xs)))
        found = torch.func.grad(lambda *xs: attend(*xs).sin().sum(), every)(*xs)
        return attend(*xs), *found

    return list(shard_map(step, mesh=MESH, in_specs=specs, out_specs=(HEADS, *specs))(*xs))


def by_value_and_grad(attend: Callable[..., Tensor], specs: Any, *xs: Tensor) -> list[Tensor]:
    def step(*xs: Tensor) -> tuple[Tensor, ...]:
        every = tuple(range(len(xs)))
        found = value_and_grad(lambda *xs: attend(*xs).sin().sum(), every)(*xs)[1]
        return attend(*xs), *found

    return list(shard_map(step, mesh=MESH, in_specs=specs, out_specs=(HEADS, *specs))(*xs))


def on_one_device(attend: Callable[..., Tensor], *xs: Tensor) -> list[Tensor]:
    xs = tuple(x.clone().requires_grad_() for x in xs)
    y = attend(*xs)
    return [y, *torch.autograd.grad(y.sin().sum(), xs)]


@pytest.mark.parametrize("derive", [outside, by_torch_func, by_value_and_grad])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_over_sharded_heads_is_that_of_one_device(
    derive: Callable[..., list[Tensor]], is_causal: bool
) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    actual = derive(attend, (HEADS,) * 3, Q, K, V)
    for got, expected in zip(actual, on_one_device(attend, Q, K, V), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 3), (1, 1, 3, 3), (2, 1, 3, 3), (1, 8, 1, 3), (2, 8, 3, 3)])
def test_masks_are_sharded_as_heads_and_sequences_are(shape: tuple[int, ...]) -> None:
    sharded = [None if n == 1 else a for n, a in zip(shape, ("dp", "tp"), strict=False)]
    spec = P() if len(shape) == 2 else P(*sharded)
    mask = random(shape, 3) > -1

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask)

    f = shard_map(attend, mesh=MESH, in_specs=(*(HEADS,) * 3, spec), out_specs=HEADS, check=False)
    torch.testing.assert_close(f(Q, K, V, mask), attend(Q, K, V, mask), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 3), (1, 1, 3, 3), (1, 8, 3, 3), (2, 8, 3, 3)])
def test_a_mask_that_is_learned_gets_its_gradient(shape: tuple[int, ...]) -> None:
    """torch's kernel for CPU has none for a mask, and under vmap it would be taken."""
    bias = random(shape, 3)
    sharded = [None if n == 1 else a for n, a in zip(shape, ("dp", "tp"), strict=False)]
    spec = P() if len(shape) == 2 else P(*sharded)
    actual = outside(scaled_dot_product_attention, (*(HEADS,) * 3, spec), Q, K, V, bias)
    expected = on_one_device(scaled_dot_product_attention, Q, K, V, bias)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(5, 5), (2, 1, 5, 5), (1, 3, 5, 5)])
def test_the_rule_takes_batches_at_any_dim_and_masks_of_fewer_dims(shape: tuple[int, ...]) -> None:
    q, k, v = (random((2, 3, 5, 4), seed).float() for seed in range(3))
    batched = [torch.stack([x, x.sin(), x.cos()], dim) for x, dim in ((q, 1), (k, 0), (v, 2))]
    masks = torch.stack([random(shape, seed).float() for seed in range(3)], len(shape) - 2)

    def attend(*operands: Tensor) -> Tensor:
        q, k, v, mask = operands
        return scaled_dot_product_attention(q, k, v, mask)

    add_batching_rules()
    with Calls() as calls:
        found = torch.func.vmap(attend, (1, 0, 2, len(shape) - 2))(*batched, masks)
    assert calls.count < 30
    for at, y in enumerate(found):
        own = [x.select(dim, at) for x, dim in zip(batched, (1, 0, 2), strict=True)]
        expected = attend(*own, masks.select(len(shape) - 2, at))
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("derive", [outside, by_torch_func, by_value_and_grad])
def test_more_ranks_take_no_more_operators(
    derive: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for num_ranks in (4, 64):
        mesh = make_mesh((1, num_ranks), ("dp", "tp"), kind="simulated", simulate="vmap")
        monkeypatch.setitem(globals(), "MESH", mesh)
        xs = [random((1, 64, 2, 2), seed) for seed in range(3)]
        derive(scaled_dot_product_attention, (HEADS,) * 3, *xs)  # checks it
        with Calls() as calls:
            derive(scaled_dot_product_attention, (HEADS,) * 3, *xs)
        counts.append(calls.count)
    assert counts[1] <= counts[0]


@pytest.mark.parametrize("dims", [(None, 0), (1, 2), (0, 1), (2, None)])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 2, 3, 4), (4,)])
def test_products_by_a_matrix_of_each_rank_are_one_call(shape: tuple[int, ...], dims: Any) -> None:
    dims = tuple([None if dim is None else min(dim, len(shape)) for dim in dims])
    pairs = list(zip((random(shape, 0), random((4, 5), 1)), dims, strict=True))
    xs = [x if dim is None else torch.stack([x, x.sin(), x.cos()], dim) for x, dim in pairs]
    xs = [x.requires_grad_() for x in xs]
    add_batching_rules()
    with Calls() as calls:
        found = torch.func.vmap(torch.matmul, dims)(*xs)
    if dims[1] is not None and len(shape) > 1:  # others are taken apart by torch
        assert calls.count <= 6
    a, w = (
        [x if dim is None else x.select(dim, i) for i in range(3)]
        for x, dim in zip(xs, dims, strict=True)
    )
    expected = torch.stack(list(map(torch.matmul, a, w)))
    ends = [(y, *torch.autograd.grad(y.sin().sum(), xs)) for y in (found, expected)]
    torch.testing.assert_close(*ends)


X, Y, VALUES = random((4, 3, 5), 3), random((4, 3), 4), random((4,), 5)
ROWS: Final = torch.tensor([0, 2])
WRITES: Final[dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], Any]]] = {
    "one of both": (lambda x, y: torch.select_scatter(x, y, 2, -1), (X, Y), (P("dp"), P("dp"))),
    "one of y": (lambda x, y: torch.select_scatter(x, y[0], 1, 3), (X[0], Y), (P(), P("tp"))),
    "one of x": (lambda x, y: x.select_scatter(y[:2], -1, 0), (X, Y), (P("dp"), P())),
    "over two axes": (
        lambda x, y: torch.select_scatter(x, y, 2, 1),
        (X, Y),
        (P("dp"), P("dp", None)),
    ),
    "of two axes": (
        lambda x, y: torch.select_scatter(x[:, 0], y[0].repeat(2), 1, 1),
        (random((4, 1, 5), 6), random((4, 1), 7)),
        (P("dp"), P("tp")),
    ),
    "a number": (lambda x, v: x.index_fill(1, ROWS, v[0]), (X[0], VALUES), (P(), P("tp"))),
    "a number of both": (lambda x, v: x.index_fill(1, ROWS, v[0]), (X, VALUES), (P("dp"), P("dp"))),
}


@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_at_an_index_is_each_ranks_own_with_its_gradient(
    name: str, simulate: Literal["vmap", "ranks"]
) -> None:
    body, operands, specs = WRITES[name]
    flows = "number" not in name  # the gradient of a number to fill in branches on the indices

    def total(*xs: Tensor) -> Tensor:
        return body(*xs).square().sum()[None, None]

    def mapped(mesh: Mesh, *xs: Tensor) -> list[Tensor]:
        xs = tuple(x.detach().clone().requires_grad_(flows) for x in xs)
        y = shard_map(total, mesh=mesh, in_specs=specs, out_specs=HEADS)(*xs)
        return [y.detach(), *(torch.autograd.grad(y.sum(), xs) if flows else ())]

    others: Literal["vmap", "ranks"] = "ranks"
    mesh, each = (
        make_mesh((2, 2), ("dp", "tp"), kind="simulated", simulate=how)
        for how in (simulate, others)
    )
    for found, expected in zip(mapped(mesh, *operands), mapped(each, *operands), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_sequences_may_vary_over_an_outer_axis_alone(axis: str) -> None:
    xs = [random((8, 2, 3, 4), seed) for seed in range(3)]
    f = shard_map(scaled_dot_product_attention, mesh=MESH, in_specs=P(axis), out_specs=P(axis))
    both: list[list[Tensor]] = []
    attends: list[Any] = [f, scaled_dot_product_attention]
    for attend in attends:
        own = [x.clone().requires_grad_() for x in xs]
        y: Tensor = attend(*own)
        both.append([y, *torch.autograd.grad(y.sin().sum(), own)])
    for found, expected in zip(*both, strict=True):
        torch.testing.assert_close(found, expected)
