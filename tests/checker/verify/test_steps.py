"""Steps that take gradients by themselves do not depend on `requires_grad` of their arguments."""

from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from shardmap_torch import I, P, ShardTypeError, all_reduce, check_program, make_mesh, shard_map
from tests.support.pool import Gloo

X: Final = torch.randn(4, 8, dtype=torch.float64)
W: Final = torch.randn(8, 3, dtype=torch.float64)


def loss(w: Tensor, x: Tensor) -> Tensor:
    return all_reduce((x @ w).square().sum(), "dp", dst=I)


def step(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    gradient, value = torch.func.grad_and_value(loss)(w, x)
    return w - 0.01 * all_reduce(gradient, "dp", dst=I), value


def unsummed(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    gradient, value = torch.func.grad_and_value(loss)(w, x)
    return w - 0.01 * gradient, value


def forgets_the_sum(w: Tensor, x: Tensor) -> Tensor:
    """Takes no gradient: that of the call is wrong."""
    return w * 2 + all_reduce((x @ w).sum() * w, "dp", dst=I)


def mapped(body: Any, simulate: Any = "auto", check: Any = True) -> Any:
    mesh = make_mesh((2,), ("dp",), kind="simulated", simulate=simulate)
    return shard_map(body, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check=check)


@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
@pytest.mark.parametrize("check", [True, "global"])
def test_a_step_gives_the_same_for_parameters_and_plain_tensors(simulate: str, check: Any) -> None:
    f = mapped(step, simulate, check)
    want = f(W, X)
    found = f(nn.Parameter(W), X)
    torch.testing.assert_close([y.detach() for y in found], [*want])
    one = W - 0.01 * torch.func.grad(lambda w: (X @ w).square().sum())(W)
    torch.testing.assert_close(found[0].detach(), one)
    again = f(nn.Parameter(found[0].detach()), X)
    assert again[1] < found[1]


def test_a_backward_through_the_results_of_such_a_step_is_refused() -> None:
    w = nn.Parameter(W)
    updated, _ = mapped(step)(w, X)
    assert updated.requires_grad
    with pytest.raises(ShardTypeError, match="the result of a step that takes gradients by itself"):
        (updated.sum() + w.sum()).backward()
    with pytest.raises(ShardTypeError, match="needed as I and as R over 'dp'"):
        torch.func.grad(lambda w: mapped(step)(w, X)[0].sum())(W)


@pytest.mark.parametrize("simulate", ["auto", "ranks"])
def test_tensors_that_such_a_step_closes_over_get_their_summed_gradients(simulate: Any) -> None:
    u, w, x = W.clone().requires_grad_(), W.sin().requires_grad_(), W.cos().requires_grad_()

    def body(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * u + x.sin() * w, torch.func.grad(lambda y: y.square().sum())(y)

    mesh = make_mesh((2,), ("dp",), kind="simulated", simulate=simulate)
    in_specs, out_specs = (P(replicate={"dp"}), P("dp")), (P(), P("dp"))
    f = shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    found = torch.autograd.grad(f(x, X)[0].cos().sum(), (u, w, x))
    want = torch.autograd.grad((x * u + x.sin() * w).cos().sum(), (u, w, x))
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("body", [unsummed, forgets_the_sum])
def test_a_wrong_program_is_refused_as_before(body: Any) -> None:
    with pytest.raises(ShardTypeError):
        check_program(mapped(body), nn.Parameter(W), X)


def on_processes() -> None:
    mesh = make_mesh((2,), ("dp",))
    f = shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check="global")
    generator = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.randn(8, 3, dtype=torch.float64, generator=generator))
    x = torch.randn(4, 8, dtype=torch.float64, generator=generator)
    updated, _ = f(w, x)
    want = w.detach() - 0.01 * torch.func.grad(lambda w: (x @ w).square().sum())(w.detach())
    torch.testing.assert_close(updated.detach(), want)
    with pytest.raises(ShardTypeError, match="a step that takes gradients by itself"):
        updated.sum().backward()


def test_a_step_on_processes(gloo: Gloo) -> None:
    gloo(2).run(on_processes)
