"""JAX's casts of equal values: finished gradients in bodies, and the other reading."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    CollectiveError,
    I,
    Mesh,
    P,
    ShardTypeError,
    SpecError,
    all_reduce,
    check_program,
    lax,
    make_mesh,
    shard_map,
)
from tests.programs.support.everywhere import claimed, same
from tests.programs.support.harness import random
from tests.support.golden import told

Loss = Callable[[Tensor, Tensor], Tensor]

CASTS: dict[str, Loss] = {
    "pcast": lambda w, x: lax.psum(((lax.pcast(w, "i", to="varying") * x) ** 2).sum(), "i"),
    "pvary": lambda w, x: lax.psum(((lax.pvary(w, "i") * x) ** 2).sum(), "i"),
    "two uses": lambda w, x: lax.psum((lax.pvary(w, "i") * x).exp().sum(), "i") + w.square().sum(),
}
ALONE: dict[str, Loss] = {
    "pcast": lambda w, x: ((w * x) ** 2).sum(),
    "pvary": lambda w, x: ((w * x) ** 2).sum(),
    "two uses": lambda w, x: (w * x).exp().sum() + w.square().sum(),
}


def inner_step(mesh: Mesh) -> None:
    """A step whose gradient no one sums, as in JAX: the cast has done so."""
    w, x = random((3,), 0), random((2 * mesh.size, 3), 1)
    for check in ("local", "global"):
        for name, loss in CASTS.items():

            def step(w: Tensor, x: Tensor, loss: Loss = loss) -> tuple[Tensor, Tensor]:
                value, gradient = torch.func.grad_and_value(loss)(w, x)[::-1]
                return w - 0.1 * gradient, value

            f = shard_map(step, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check=check)
            gradient, value = torch.func.grad_and_value(ALONE[name])(w, x)
            same(f(w, x), (w - 0.1 * gradient, value))


def outside(mesh: Mesh) -> None:
    """Per-leaf gradients from outside are those of one device, whichever reading."""
    for name, loss in CASTS.items():
        w = random((3,), 0).requires_grad_()
        x = random((2 * mesh.size, 3), 1).requires_grad_()
        f: Any = shard_map(loss, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
        f(w, x).backward()
        same((w.grad, x.grad), torch.func.grad(ALONE[name], (0, 1))(w.detach(), x.detach()))


def other_reading(mesh: Mesh) -> None:
    """One use is cast and another not: a program that sums the gradient itself."""
    w, x = random((3,), 0), random((2 * mesh.size, 3), 1)

    def step(w: Tensor, x: Tensor) -> Any:
        gradient = torch.func.grad(
            lambda w: lax.psum((lax.pvary(w, "i") * x + w * x.exp()).sum(), "i")
        )(w)
        return all_reduce(gradient, "i", dst=I)

    f = shard_map(step, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    same(f(w, x), (x + x.exp()).sum(0))


MESH = make_mesh((2,), ("i",), kind="simulated")


def test_wrong_programs_stay_refused_in_both_readings() -> None:
    def unsummed(w: Tensor, x: Tensor) -> Any:
        gradient = torch.func.grad(
            lambda w: lax.psum((lax.pvary(w, "i") * x + w * x.exp()).sum(), "i")
        )(w)
        return w - gradient

    def twice(w: Tensor, x: Tensor) -> Any:  # a finished gradient is summed again
        gradient = torch.func.grad(lambda w: CASTS["pvary"](w, x))(w)
        return all_reduce(w - gradient, "i", dst=I)

    args: Any = (torch.ones(3), torch.ones(4, 3))
    for body in (unsummed, twice):
        for check in ("local", "global"):
            f = shard_map(body, mesh=MESH, in_specs=(P(), P("i")), out_specs=P(), check=check)
            with pytest.raises(ShardTypeError):
                f(*args)


def test_the_gradient_of_a_sum_of_equal_values_is_finished() -> None:
    def step(w: Tensor) -> Any:
        return torch.func.grad(lambda w: lax.psum(w * w, "i"))(w)

    f = shard_map(step, mesh=MESH, in_specs=P(), out_specs=P())
    assert f(torch.tensor(3.0)).item() == 12.0  # of 2 w**2


def gathers(mesh: Mesh) -> None:
    """JAX's default, varying copies, under global strictness."""
    x = random((2 * mesh.size, 3), 0).requires_grad_()

    def body(x: Tensor) -> Tensor:
        everything = lax.all_gather(x, "i", tiled=True)
        return x * everything.sum(0)

    f: Any = shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check="global")
    y = f(x)
    same(y, x * x.sum(0))
    whole: Any = y.full_tensor() if hasattr(y, "full_tensor") else y
    whole.square().sum().backward()
    same(x.grad, torch.func.grad(lambda x: (x * x.sum(0)).square().sum())(x.detach()))


def test_copies_stay_refused_where_one_device_has_another_value() -> None:
    x = torch.ones(4)
    wrong: list[Any] = [
        lambda x: lax.psum(lax.all_gather(x, "i", tiled=True), "i"),
        lambda x: lax.psum(lax.all_gather(x, "i", tiled=True).sum(), "i"),
        lambda x: lax.psum(lax.pcast(lax.psum(x, "i"), "i", to="varying"), "i"),
    ]
    for body in wrong:
        check_program(shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P()), x)
        with pytest.raises(ShardTypeError, match="check='global'"):
            check_program(
                shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P(), check="global"), x
            )


def test_a_mean_of_copies_is_the_value_itself() -> None:
    def body(x: Tensor) -> Tensor:
        return lax.pmean(lax.all_gather(x, "i", tiled=True).square().sum(), "i")

    x = torch.arange(4.0, requires_grad=True)
    y = shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P(), check="global")(x)
    y.backward()
    assert x.grad is not None
    assert (y.item(), x.grad.tolist()) == (14.0, [0.0, 2.0, 4.0, 6.0])


def test_check_vma_is_jaxs_word_for_check() -> None:
    wrong: Any = {"mesh": MESH, "in_specs": P("i"), "out_specs": P()}
    with pytest.raises(ShardTypeError):
        shard_map(lambda x: x, check_vma=True, **wrong)(torch.ones(2))
    unchecked = shard_map(
        lambda x: lax.psum(x, "i"), mesh=MESH, in_specs=P("i"), out_specs=P(), check_vma=False
    )
    assert unchecked(torch.ones(2)).tolist() == [2.0]
    for options in ({"check_vma": 1}, {"check_vma": True, "check": "global"}):
        with pytest.raises(SpecError) as caught:
            shard_map(lambda x: x, **wrong, **options)
        assert str(caught.value) == (
            f"check_vma={options['check_vma']} is JAX's word for check: it takes a bool, and "
            "stands in the place of check."
        )


def test_a_cast_that_does_not_exist_is_named() -> None:
    f = shard_map(lambda x: lax.pvary(x, "i"), mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    with told(CollectiveError):
        f(torch.ones(2))


test_on_every_mesh_of_another_shape = claimed(
    {
        "the gradient of a cast value is finished in the body": inner_step,
        "gradients from outside are those of one device": outside,
        "a program that needs the other reading gets it": other_reading,
        "gathered copies are one device values under global": gathers,
    },
    (3,),
    ("i",),
)
