"""The quick start of spmd_types, its nested `local_map`, and its typed scalars.

Source: README, `local_map` in runtime.py and _scalar.py of the wheel of spmd_types 0.3.1. There a
plain tensor is given its types by `assert_type`; here specs give them to the arguments of a body,
in which `assert_type` is a check. `Scalar` has no counterpart: what varies is a tensor.
"""

from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    Partial,
    R,
    ShardTypeError,
    V,
    all_reduce,
    assert_type,
    axis_index,
    axis_size,
    check_program,
    convert,
    local_region,
    make_mesh,
    reinterpret,
    shard_map,
)
from tests.programs.support.everywhere import run_on, same
from tests.programs.support.harness import random
from tests.programs.support.ported import compare
from tests.support.golden import told
from tests.support.pool import Gloo

AXES: Final = ("dp", "tp")
PENDING: Final = P(partial={"tp"}, replicate={"dp"})
SHAPE: Final = (2, 2)
CHECKS: Final = (True, "global")


def quick_start(x: Tensor) -> Tensor:
    assert_type(x, {"dp": R, "tp": Partial})
    y = all_reduce(x, "tp", dst=R)
    assert_type(y, {"dp": R, "tp": R})
    z = torch.mul(y, y)
    assert_type(z, {"dp": R, "tp": R})
    return z


def squared(check: Any, mesh: Mesh) -> None:
    mapped = shard_map(quick_start, mesh=mesh, in_specs=PENDING, out_specs=P(), check=check)
    x = random((4,), 0).requires_grad_()
    z = mapped(x)
    same((z, *torch.autograd.grad(z.sum(), x)), (x.square(), 2 * x))


@local_region(in_types=(P("dp"), [P(), P()]), out_types=(P("dp"), P("dp")))
def products(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    return x @ weights[0], x @ weights[1]


def mapped_locally(p: dict[str, Tensor], x: Tensor) -> Tensor:
    weights = convert([p["a"], p["b"]], "dp", src=I, dst=R)
    one, other = products(x, weights)
    return all_reduce((one * other.sin()).sum(), "dp", dst=I)


def nested(check: Any, mesh: Mesh) -> None:
    params = {"a": random((3, 2), 1), "b": random((3, 2), 2)}

    def original(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return ((x @ p["a"]) * (x @ p["b"]).sin()).sum()

    compare(mesh, mapped_locally, original, params, (random((4, 3), 3),), (P(), P("dp")), check)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("scenario", [squared, nested])
@pytest.mark.parametrize("kind", ["vmap", "ranks", "gloo"])
def test_the_examples_are_those_of_one_device(
    kind: str, scenario: Any, check: Any, gloo: Gloo
) -> None:
    run_on(kind, partial(scenario, check), gloo, SHAPE, AXES)


def test_scalars_are_tensors_with_types() -> None:
    def body(x: Tensor) -> Tensor:
        share = axis_index("tp") / axis_size("tp")
        assert_type(share, {"tp": V})
        local_sum = reinterpret(x.sum() * share, "tp", src=V, dst=Partial)
        assert_type(local_sum, {"tp": Partial})
        return all_reduce(local_sum, "tp", dst=R)

    mesh = make_mesh((4,), ("tp",), kind="simulated")
    x = random((8,), 0)
    weights = torch.arange(4.0).repeat_interleave(2) / 4
    same(shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P())(x), (x * weights).sum())


def unreduced(x: Tensor) -> Tensor:
    return all_reduce(torch.mul(x, x), "tp", dst=R)


def reduced_twice(x: Tensor) -> Tensor:
    return all_reduce(all_reduce(x, "tp", dst=R), "tp", dst=R)


def asserted_too_early(x: Tensor) -> Tensor:
    assert_type(x, {"tp": R})
    return all_reduce(x, "tp", dst=R)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "body",
    [
        unreduced,
        reduced_twice,
        asserted_too_early,
    ],
)
def test_a_quick_start_that_forgets_the_sum_is_refused(body: Any, check: Any) -> None:
    mesh = make_mesh((2, 4), AXES, kind="abstract")
    mapped = shard_map(body, mesh=mesh, in_specs=PENDING, out_specs=P(), check=check)
    with told(ShardTypeError):
        check_program(mapped, random((4,), 0).requires_grad_())
