"""Ranks that share a process do not see the state that others have for a while."""

import random
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    all_reduce,
    check_program,
    make_mesh,
    shard_map,
)

Maker = Callable[[], Callable[[Tensor], Tensor]]
MESHES = {
    strategy: make_mesh((2,), ("dp",), kind="simulated", simulate=strategy)
    for strategy in ("ranks", "auto")
}
ONE = make_mesh((1,), ("dp",), kind="simulated", simulate="ranks")
MODE: ContextVar[int] = ContextVar("MODE", default=1)


def met(x: Tensor) -> Tensor:
    """Lets other ranks run, as the thread of a rank waits for them here."""
    total: Tensor = all_reduce(x.detach().sum(), "dp", dst=R)
    y: Tensor = x + 0 * total
    return y


def while_ranks_meet() -> Any:
    state = SimpleNamespace(n=1)

    def body(x: Tensor) -> Tensor:
        state.n += 2
        y: Tensor = met(x) * state.n
        state.n = 1
        return y

    return body


def in_a_context_variable() -> Any:
    def body(x: Tensor) -> Tensor:
        token = MODE.set(MODE.get() + 2)
        y = met(x) * MODE.get()
        MODE.reset(token)
        return y

    return body


def seeded() -> Any:
    def body(x: Tensor) -> Tensor:
        random.seed(0)
        first = random.random()
        return met(x) * first * random.random()

    return body


def own_tensor() -> Any:
    state = SimpleNamespace(saved=None)

    def body(x: Tensor) -> Tensor:
        state.saved = x.detach() * 2
        y = x * 1
        y.register_hook(lambda grad: grad * state.saved)
        return y * 3

    return body


def own_tensor_among_objects() -> Any:
    table = np.array([None], dtype=object)

    def body(x: Tensor) -> Tensor:
        table[0] = x * 2
        y: Tensor = met(x) * table[0]
        table[0] = None
        return y

    return body


def own_tensor_of_an_error() -> Any:
    error = ValueError(None)

    def body(x: Tensor) -> Tensor:
        error.args = (x * 2,)
        y: Tensor = met(x) * error.args[0]
        error.args = (None,)
        return y

    return body


def reset_by_a_forward_and_counted_by_hooks() -> Any:
    state = SimpleNamespace(n=0)

    def hook(grad: Tensor) -> Any:
        state.n += 1
        return grad * state.n

    def body(x: Tensor) -> Tensor:
        state.n = 1
        y = x * 1
        y.register_hook(hook)
        return y * 2

    return body


def stack() -> Any:
    sizes: list[int] = []

    class Pops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            sizes.append(len(sizes) + 2)
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * sizes.pop()

    apply: Any = Pops.apply
    return lambda x: apply(apply(x))


MAKERS: tuple[Maker, ...] = (
    *(while_ranks_meet, in_a_context_variable, seeded, own_tensor, own_tensor_among_objects),
    *(own_tensor_of_an_error, reset_by_a_forward_and_counted_by_hooks, stack),
)


def outcomes(f: Callable[[Tensor], Tensor]) -> list[Tensor]:
    found = []
    for _ in range(3):  # a state may be the first call's own
        x = torch.arange(1.0, 5.0, dtype=torch.float64).requires_grad_()
        y = f(x)
        (y * torch.arange(2.0, 6.0, dtype=torch.float64)).sum().backward()
        assert x.grad is not None
        found += [y.detach(), x.grad]
    return found


def mapped(body: Any, mesh: Any, check: Any) -> Any:
    return shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check=check)


@pytest.mark.parametrize("simulate", MESHES)
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_ranks_compute_with_state_of_their_own_what_one_rank_does(
    make: Maker, simulate: str
) -> None:
    want = outcomes(mapped(make(), ONE, False))
    got = outcomes(mapped(make(), MESHES[simulate], "local"))
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine, right)


def test_a_backward_after_another_call_finds_equal_state_or_is_refused() -> None:
    def scaled(of: Callable[[Tensor], Any]) -> list[Tensor]:
        state = SimpleNamespace(by=None)

        def body(x: Tensor) -> Tensor:
            state.by = of(x)
            y = x * 1
            y.register_hook(lambda grad: grad * state.by)
            return y * 2

        f = mapped(body, MESHES["ranks"], "local")
        x = torch.arange(1.0, 5.0).requires_grad_()
        first, second = f(x), f(x * 2)
        return [torch.autograd.grad(y.sum(), x)[0] for y in (second, first)]

    later, earlier = scaled(lambda x: x.shape[0] * 1.5)
    assert torch.equal(later, torch.full((4,), 12.0))
    assert torch.equal(earlier, torch.full((4,), 6.0))
    with pytest.raises(ShardTypeError) as error:
        scaled(lambda x: x.detach())
    assert str(error.value) == (
        "body: the body keeps what each rank has for itself in what it refers to, and a backward "
        "of it runs after another call has replaced that. Pass it as an argument, save it in the "
        "context of a Function, or close over a variable of the body itself."
    )


METRICS: dict[str, float] = {}
LOG: list[Any] = []


@pytest.mark.parametrize("simulate", ["ranks", "auto"])
def test_metrics_that_a_body_keeps_are_those_of_runs_and_not_of_checks(simulate: str) -> None:
    def body(x: Tensor) -> Tensor:
        loss: Tensor = all_reduce(x.sum(), "dp", dst=I)
        LOG.append(loss.detach())
        LOG.append({"loss": loss.item()})
        METRICS["mean"] = 0.5 * METRICS.get("mean", 0.0) + 0.5 * loss.item()
        return loss

    mesh = make_mesh((2,), ("dp",), kind="simulated", simulate=simulate)  # type: ignore[arg-type]
    f = shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P())
    METRICS.clear()
    LOG.clear()
    check_program(f, torch.ones(4))
    assert (LOG, METRICS) == ([], {})
    for means in (2.0, 3.0):
        f(torch.ones(4))
        assert METRICS == {"mean": means}
    assert LOG == [torch.tensor(4.0), {"loss": 4.0}] * 4  # two ranks, two calls


@pytest.mark.parametrize("own", [False, True])
def test_a_body_that_computes_with_a_number_that_a_run_kept_is_refused(own: bool) -> None:
    def body(x: Tensor) -> Tensor:
        loss = all_reduce(x.sum(), "dp", dst=I).item()
        scale = METRICS.get("loss", loss if own else 1.0)
        METRICS["loss"] = loss
        return x * scale

    METRICS.clear()
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    f = shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    if own:  # nothing is kept yet, and the number is the same in each run
        assert torch.equal(f(torch.ones(4)), torch.full((4,), 4.0))
    with pytest.raises(ShardTypeError, match="does something else when it runs again"):
        f(torch.full((4,), 2.0))
