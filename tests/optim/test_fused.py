"""The fused operator gives what the composition gives, and serves only where it is known to."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from shardmap_torch import P, make_mesh, shard_map
from shardmap_torch.core.storage import memory_of
from shardmap_torch.core.tree import flatten
from shardmap_torch.optim import Optimizer, adamw, warmup_cosine

FUSED = importlib.import_module("shardmap_torch.optim.lists")

OPTIMIZER = adamw(
    warmup_cosine(0.1, steps=9), betas=(0.8, 0.9), weight_decay=0.3, decays=lambda p: p.ndim > 1
)


def tree(seed: int) -> dict[str, Tensor]:
    """Leaves in float64: of other strides than in the next tree, empty, without dims, expanded."""
    torch.manual_seed(seed)
    square = torch.randn(4, 4, dtype=torch.float64)
    return {
        "contiguous": torch.randn(3, 5, dtype=torch.float64),
        "transposed": square.T if seed % 2 else square,
        "every other": torch.randn(9, 2, dtype=torch.float64)[::2],
        "expanded": torch.randn(1, 3, dtype=torch.float64).expand(2, 3),
        "empty": torch.zeros(0, 2, dtype=torch.float64),
        "scalar": torch.randn((), dtype=torch.float64),
    }


def train(optimizer: Optimizer, weights: Any, grads: Any, steps: int = 3) -> list[Tensor]:
    state = optimizer.init(weights)
    for _ in range(steps):
        weights, state = optimizer.update(weights, grads, state)
    return flatten((weights, state))[0]


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of tensors of each call of the operator."""
    calls: list[int] = []

    def operator(params: list[Tensor], *rest: Any, **options: Any) -> None:
        calls.append(len(params))
        torch._fused_adamw_(params, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(FUSED, "fused_adamw_", operator)
        yield calls


def by_composition(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> list[Tensor]:
    with monkeypatch.context() as patched:
        patched.setattr(FUSED, "_DEVICES", frozenset())
        return train(*arguments)


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_it_gives_the_values_of_the_composition_for_leaves_in_any_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, grads = tree(0), tree(1)
    with counted(monkeypatch) as calls:
        found = train(OPTIMIZER, weights, grads)
    assert calls == [len(weights)] * 3
    assert_alike(found, by_composition(monkeypatch, OPTIMIZER, weights, grads))


def test_wider_moments_take_it_and_mixed_dtypes_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(2, 2)}
    for optimizer, expected in (
        (adamw(0.1, state_dtype=torch.float64), [2]),
        (adamw(0.1), []),
    ):
        with counted(monkeypatch) as calls:
            found = train(optimizer, weights, weights, 1)
        assert calls == expected
        composed = by_composition(monkeypatch, optimizer, weights, weights, 1)
        assert all(map(torch.equal, found, composed))


def test_gradients_that_are_negated_when_they_are_read_do_not_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, grads = {"w": torch.ones(())}, {"w": torch.tensor(1 + 2j).conj().imag}
    assert grads["w"].is_neg()
    with counted(monkeypatch) as calls:
        found = train(OPTIMIZER, weights, grads)
        expected = train(OPTIMIZER, weights, {"w": grads["w"].resolve_neg()})
    assert calls == [1] * 3
    torch.testing.assert_close(found, expected)


def test_results_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tree(0)
    weights["tied"] = weights["contiguous"]
    with counted(monkeypatch) as calls:
        state = OPTIMIZER.init(weights)
        after, new = OPTIMIZER.update(weights, weights, state)
    assert calls
    leaves = [x for x in flatten((weights, state, after, new))[0] if x.numel()]
    own = [memory_of(x) for x in flatten((after, new))[0] if x.numel()]
    assert len(set(own)) == len(own)
    assert len(set(map(memory_of, leaves))) == len(leaves) - 1  # the tied one was given twice


@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
def test_it_runs_in_a_body_on_what_the_ranks_have(
    monkeypatch: pytest.MonkeyPatch, simulate: Any
) -> None:
    mesh = make_mesh((2,), ("x",), kind="simulated", simulate=simulate)
    specs = {"contiguous": P(None), "transposed": P(None, "x"), "scalar": P()}
    weights, grads = ({name: tree(seed)[name] for name in specs} for seed in (0, 1))
    state_specs = OPTIMIZER.specs(specs)
    step = shard_map(
        OPTIMIZER.update,
        mesh=mesh,
        in_specs=(specs, specs, state_specs),
        out_specs=(specs, state_specs),
        check="global",
    )
    with counted(monkeypatch) as calls:
        found = flatten(step(weights, grads, OPTIMIZER.init(weights)))[0]
    assert calls == [3] * (1 if simulate == "vmap" else 2)
    assert_alike(found, by_composition(monkeypatch, OPTIMIZER, weights, grads, 1))


@pytest.mark.parametrize("where", [(0, 0), (1, 0), (None, 0), (0, None)])
def test_it_runs_on_what_a_vmap_batches(monkeypatch: pytest.MonkeyPatch, where: Any) -> None:
    shapes = [(4,) if dim is None else (4, 4) for dim in where]
    weights, grads = ({"a": torch.randn(shape), "b": torch.randn(shape)} for shape in shapes)

    def update(weights: Any, grads: Any) -> Any:
        return OPTIMIZER.update(weights, grads, OPTIMIZER.init(weights))[0]

    with counted(monkeypatch) as calls:
        found = torch.func.vmap(update, where)(weights, grads)
    assert calls == ([] if None in where else [2])
    for at in range(4):
        own = [
            {name: x if dim is None else x.select(dim, at) for name, x in each.items()}
            for each, dim in zip((weights, grads), where, strict=True)
        ]
        torch.testing.assert_close({name: x[at] for name, x in found.items()}, update(*own))


def test_what_a_vmap_batches_otherwise_is_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of several ranks at one position of two lists, or a number that is batched."""
    weights, rates = {"a": torch.randn(4, 3), "b": torch.randn(4, 3)}, torch.rand(4)

    def decayed(weights: Any, rate: Tensor) -> Any:
        return FUSED.foreach("mul", [*weights.values()], rate)

    def added(weights: Any, rate: Tensor) -> Any:
        columns = [x.unsqueeze(-1) for x in weights.values()]
        return FUSED.foreach("add", [*weights.values()], columns)

    for f in (decayed, added):
        found = torch.func.vmap(f)(weights, rates)
        for at in range(4):
            own = f({name: x[at] for name, x in weights.items()}, rates[at])
            torch.testing.assert_close([x[at] for x in found], own)


def _of_rate(rate: Tensor) -> Tensor:
    weights = {"a": torch.ones(3, dtype=torch.float64)}
    return sum_of(train(adamw(lambda step: rate / step), weights, weights, 2))


def _of_weights(weights: Tensor) -> Tensor:
    return sum_of(train(adamw(0.1), {"a": weights}, {"a": weights.cos()}, 2))


def sum_of(leaves: list[Tensor]) -> Tensor:
    return torch.stack([x.sum().double() for x in leaves]).sum()


def slope(function: Any, at: Tensor) -> Tensor:
    """The sum of the derivatives, by differences."""
    step = 1e-6
    down, up = (function(at + sign * step) for sign in (-1, 1))
    return torch.as_tensor((up - down) / (2 * step))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("function", [_of_rate, _of_weights])
def test_derivatives_flow_through_an_update(function: Any) -> None:
    at = torch.tensor(0.3, dtype=torch.float64)
    at = at.expand(3).contiguous() if function is _of_weights else at
    expected = slope(function, at)
    leaf = at.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad(function(leaf), leaf)
    by_func = torch.func.grad(function)(at)
    with forward_ad.dual_level():
        dual = function(forward_ad.make_dual(at, torch.ones_like(at)))
        forward = forward_ad.unpack_dual(dual).tangent
    found = [by_autograd.sum(), by_func.sum(), forward]
    for one, other in pairwise([*found, expected]):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
