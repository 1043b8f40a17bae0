"""Forward over reverse: a Hessian-vector product of a loss is a pending sum, as its gradient is."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    ShardTypeError,
    TransformError,
    all_reduce,
    make_mesh,
    shard_map,
)
from tests.programs.support.everywhere import ON_EVERY_MESH, run_on, same
from tests.programs.support.harness import random
from tests.support.fuzzing import FUZZ
from tests.support.pool import Gloo

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own

Total = Callable[[Tensor], Tensor]


def loss_of(x: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda w: (x @ w).tanh().square().sum()


def product(x: Tensor, w: Tensor, total: Total) -> Tensor:
    pushed: Tensor = torch.func.jvp(torch.func.grad(loss_of(x)), (w,), (w.cos(),))[1]
    return total(pushed)


def with_the_gradient(x: Tensor, w: Tensor, total: Total) -> Tensor:
    gradient, pushed, *_ = torch.func.jvp(torch.func.grad(loss_of(x)), (w,), (w.cos(),))
    return total(gradient) - 0.5 * total(pushed)


def hessian(x: Tensor, w: Tensor, total: Total) -> Tensor:
    found: Tensor = torch.func.hessian(loss_of(x))(w)
    return total(found)


def pushed_again(x: Tensor, w: Tensor, total: Total) -> Tensor:
    once = partial(product, x, total=lambda g: g)
    pushed: Tensor = torch.func.jvp(once, (w,), (w.cos(),))[1]
    return total(pushed)


BODIES: Final[tuple[Any, ...]] = (product, with_the_gradient, hessian, pushed_again)
CHECKS: Final[tuple[Any, ...]] = ("local", "global")


def summed(g: Tensor) -> Tensor:
    return all_reduce(g, "tp", dst=I)


def unsummed(g: Tensor) -> Tensor:
    return g


def everything(mesh: Mesh) -> None:
    x, w = random((2 * mesh.size, 3), 1), random((3,), 0)
    for body in BODIES if FUZZ or mesh.simulate == "vmap" else (product,):
        own = partial(body, total=summed)
        f = shard_map(own, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P(), check="global")
        same(f(x, w), body(x, w, unsummed))


@ON_EVERY_MESH
def test_it_is_right_after_its_sum(kind: str, gloo: Gloo) -> None:
    run_on(kind, everything, gloo)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_without_its_sum_it_is_refused(body: Any) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")

    def step(x: Tensor, w: Tensor) -> Tensor:
        found: Tensor = body(x, w, unsummed)
        return w.sum() - 0.1 * found

    for check in CHECKS:
        f: Any = shard_map(step, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P(), check=check)
        with pytest.raises(ShardTypeError, match=r"once per rank|is not what it is on one device"):
            f(random((4, 3), 1), random((3,), 0))


def test_transforms_of_which_torch_finds_no_shapes_are_named_and_reverse_mode_is_accepted() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    x, w = random((4, 3), 1), random((3,), 0)

    def of_each(x: Tensor, w: Tensor, second: Any) -> Tensor:
        return summed(torch.func.vmap(lambda row: second(loss_of(row))(w))(x).sum(0))

    def by_reverse_mode(f: Total) -> Any:
        return torch.func.jacrev(torch.func.grad(f))

    for second in (torch.func.hessian, by_reverse_mode):
        own = partial(of_each, second=second)
        check: Any = "global" if second is by_reverse_mode else True
        f: Any = shard_map(own, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P(), check=check)
        if second is by_reverse_mode:
            same(f(x, w), torch.func.vmap(lambda row: by_reverse_mode(loss_of(row))(w))(x).sum(0))
        else:
            with pytest.raises(TransformError) as caught:
                f(x, w)
            what, fix = str(caught.value).rsplit(". ", 1)
            assert what.startswith(
                "torch finds no shapes through these transforms at test_forward_mode.py:"
            )
            assert fix == (
                "Take derivatives in reverse mode in place of forward mode, as jacrev(grad(f)) for "
                "hessian(f)."
            )
