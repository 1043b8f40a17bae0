"""The assertions for users' tests accept what is right, and say what is wrong."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    ShapeDtype,
    ShardTypeError,
    TransformError,
    all_reduce,
    convert,
    make_mesh,
    shard_map,
    value_and_grad,
)
from shardmap_torch.testing import assert_bytes, assert_equals_one_device
from shardmap_torch.testing.plugin import simulated_mesh
from tests.support.golden import hold_own, told

__all__ = ["simulated_mesh"]

Weights = dict[str, Tensor]
SPECS: Any = {"in_specs": ({"up": P(None, "tp"), "down": P("tp")}, P("dp")), "out_specs": P("dp")}


def mlp(weights: Weights, x: Tensor) -> Tensor:
    h = torch.relu(convert(x, "tp", src=I, dst=R) @ weights["up"])
    return all_reduce(h @ weights["down"], "tp", dst=I)


def twice(weights: Weights, x: Tensor) -> Tensor:
    return 2 * mlp(weights, x)


def detached(weights: Weights, x: Tensor) -> Tensor:
    return mlp({**weights, "up": weights["up"].detach()}, x)


def reference(weights: Weights, x: Tensor) -> Tensor:
    return torch.relu(x @ weights["up"]) @ weights["down"]


def inputs() -> tuple[Weights, Tensor]:
    return {"up": torch.randn(6, 8), "down": torch.randn(8, 6)}, torch.randn(4, 6)


def test_a_right_layer_passes_as_a_function_and_as_a_body(
    simulated_mesh: Callable[..., Mesh],
) -> None:
    mesh = simulated_mesh(dp=2, tp=2)
    assert mesh.simulate == "ranks"
    assert_equals_one_device(mlp, reference, *inputs(), mesh=mesh, **SPECS)
    assert_equals_one_device(shard_map(mlp, **SPECS), reference, *inputs(), mesh=mesh)
    assert_equals_one_device(mlp, reference, *inputs(), mesh=mesh, check="global", **SPECS)


def test_tensors_that_a_layer_makes_itself_are_float64_too(
    simulated_mesh: Callable[..., Mesh],
) -> None:
    def rolled(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda weights, x: f(weights, x @ torch.eye(6).roll(1))

    mesh = simulated_mesh(dp=2, tp=2)
    assert_equals_one_device(rolled(mlp), rolled(reference), *inputs(), mesh=mesh, **SPECS)
    assert torch.get_default_dtype() is torch.float32


def test_a_body_is_checked_as_strictly_as_it_is_asked(simulated_mesh: Callable[..., Mesh]) -> None:
    def biased(x: Tensor, b: Tensor) -> Tensor:
        return all_reduce(x.sum(0) + b, "dp", dst=I)

    args = (torch.randn(4, 3), torch.ones(3))
    specs: Any = {"mesh": simulated_mesh(dp=2), "in_specs": (P("dp"), P()), "out_specs": P()}
    pair = biased, lambda x, b: x.sum(0) + 2 * b
    assert_equals_one_device(*pair, *args, **specs)
    with pytest.raises(ShardTypeError, match="counted once per rank"):
        assert_equals_one_device(*pair, *args, check="global", **specs)


def test_a_wrong_result_is_told_with_the_line(simulated_mesh: Callable[..., Mesh]) -> None:
    mesh = simulated_mesh(dp=2, tp=2)
    with told(AssertionError):
        assert_equals_one_device(twice, reference, *inputs(), mesh=mesh, **SPECS)


def test_a_wrong_gradient_of_one_leaf_is_told_alone(simulated_mesh: Callable[..., Mesh]) -> None:
    mesh = simulated_mesh(dp=2, tp=2)
    with told(AssertionError):
        assert_equals_one_device(detached, reference, *inputs(), mesh=mesh, **SPECS)


def test_a_step_that_takes_gradients_is_compared_by_its_results(
    simulated_mesh: Callable[..., Mesh],
) -> None:
    def step(w: Tensor, x: Tensor, rate: float = 0.1) -> tuple[Tensor, Tensor]:
        def loss(w: Tensor) -> Tensor:
            return all_reduce((x @ w).square().mean(), "dp", op="mean", dst=I)

        value, gradient = value_and_grad(loss)(w)
        return w - rate * all_reduce(gradient, "dp", dst=I), value

    def alone(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = torch.func.grad_and_value(lambda w: (x @ w).square().mean())(w)
        return w - 0.1 * gradient, value

    args = torch.randn(3), torch.randn(4, 3)
    how: Any = {"mesh": simulated_mesh(dp=2), "in_specs": (P(), P("dp")), "out_specs": (P(), P())}
    assert_equals_one_device(step, alone, *args, **how, gradients=False)
    with pytest.raises(ShardTypeError, match="takes gradients by itself") as caught:
        assert_equals_one_device(step, alone, *args, **how)
    hold_own(caught.value.__notes__[-1])
    with pytest.raises(AssertionError, match=r"result\[0\]"):
        assert_equals_one_device(partial(step, rate=0.2), alone, *args, **how, gradients=False)


def test_a_step_that_calls_autograd_is_compared_by_its_results(
    simulated_mesh: Callable[..., Mesh],
) -> None:
    def step(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        loss = all_reduce((x @ w).square().sum(), "dp", dst=I)
        return w - all_reduce(torch.autograd.grad(loss, w)[0], "dp", dst=I), loss.detach()

    def alone(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        loss = (x @ w).square().sum()
        return w - torch.autograd.grad(loss, w)[0], loss

    args = torch.randn(3, requires_grad=True), torch.randn(4, 3)
    how: Any = {"mesh": simulated_mesh(dp=2), "in_specs": (P(), P("dp")), "out_specs": (P(), P())}
    assert_equals_one_device(step, alone, *args, **how, gradients=False)
    with pytest.raises(TransformError, match=r"second time(?s:.*)\nWith gradients=False "):
        assert_equals_one_device(step, alone, *args, **how)


def test_other_leaves_of_a_result_are_compared(simulated_mesh: Callable[..., Mesh]) -> None:
    specs: Any = {"in_specs": P(), "out_specs": (P(), None), "mesh": simulated_mesh(tp=2)}
    with pytest.raises(AssertionError) as caught:
        assert_equals_one_device(lambda x: (x, 3), lambda x: (x, 4), torch.ones(2), **specs)
    assert str(caught.value).splitlines()[1:] == ["  result[1]: 3, and 4 on one device"]


def test_bytes_are_counted_and_listed() -> None:
    mesh = make_mesh((16, 8), ("dp", "tp"), kind="abstract")
    f = shard_map(mlp, mesh=mesh, **SPECS)
    w = ShapeDtype((64, 64), requires_grad=True)
    arguments = {"up": w, "down": w}, ShapeDtype((128, 64), requires_grad=True)
    assert_bytes(f, arguments, {"tp": 7168, "dp": 2 * 3840})
    with told(AssertionError):
        assert_bytes(f, arguments, {"tp": 7168, "pp": 1})
