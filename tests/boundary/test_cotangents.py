"""Cotangents of plain results, and tangents of plain inputs, that differ on ranks are refused."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, P, SpecError, all_reduce, full, make_mesh, shard_map
from tests.support.golden import hold_own
from tests.support.pool import Gloo

X = torch.arange(4.0, dtype=torch.float64)
Step = Callable[[Callable[..., Tensor], Tensor, float], Tensor]


def scaled(f: Callable[..., Tensor], w: Tensor, own: float) -> Tensor:
    return torch.autograd.grad(f(w, X) * own, w)[0]


def given(f: Callable[..., Tensor], w: Tensor, own: float) -> Tensor:
    y = f(w, X)
    return torch.autograd.grad(y, w, torch.full_like(y, own))[0]


def hooked(f: Callable[..., Tensor], w: Tensor, own: float) -> Tensor:
    y = f(w, X) * 2
    y.register_hook(lambda grad: grad * own)
    return torch.autograd.grad(y, w)[0]


def vector_jacobian(f: Callable[..., Tensor], w: Tensor, own: float) -> Tensor:
    found: tuple[Tensor, Callable[..., tuple[Tensor]]]
    found = torch.func.vjp(lambda w: f(w, X), w.detach())  # type: ignore[assignment]  # torch's
    y, pull_back = found
    gradient = pull_back(torch.full_like(y, own))[0]
    return gradient


def pushed_forward(f: Callable[..., Tensor], w: Tensor, own: float) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, once a process
        tangent: Tensor = torch.func.jvp(f, (w.detach(), X), (w.detach(), X * own))[1]
    return tangent


def loss(w: Tensor, x: Tensor) -> Tensor:
    return all_reduce((w * x).sin().sum(), "dp", dst=I)


STEPS: dict[str, Step] = {
    step.__name__: step for step in (scaled, given, hooked, vector_jacobian, pushed_forward)
}


OTHER = "has other values on rank 1 than on rank 0"
TOLD = (
    (
        f"  the gradient of a result: float64[], {OTHER}",
        "Fix: compute the loss alike on all processes, scale and hooks included; what differs by "
        "rank belongs in the body.",
    ),
    (
        f"  the tangent of x: float64[4], P('dp'), {OTHER}",
        "Fix: take the derivative along one tangent of x on all processes.",
    ),
)


def ends(name: str, late: bool, differs: bool) -> Any:
    """Returns what three steps give, or their error; one rank scales the later ones, or all."""
    mesh = make_mesh((2,), ("dp",))
    f = shard_map(loss, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P())
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    try:
        for turn in range(3):
            own = 3.0 if differs and mesh.rank and (turn or not late) else 1.0
            found = STEPS[name](f, w, own)
        return float(full(found))
    except SpecError as error:
        return str(error)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_what_one_rank_scales_is_named_on_every_rank(name: str, late: bool, gloo: Gloo) -> None:
    first, second = gloo(2).run(ends, name, late, True)
    assert first == second
    head, line, fix = re.sub(
        r"test_cotangents.py:\d+: .*?:$", "...:", first, flags=re.M
    ).splitlines()
    hold_own(head)
    assert (line, fix) == TOLD[name == "pushed_forward"]


@pytest.mark.parametrize("name", STEPS)
def test_what_all_ranks_scale_alike_is_the_gradient_of_one_device(name: str, gloo: Gloo) -> None:
    factor = 2.0 if name in ("hooked", "pushed_forward") else 1.0
    expected = factor * float((X * X.cos()).sum())
    assert gloo(2).run(ends, name, False, False) == pytest.approx([expected] * 2, rel=1e-12)
