"""`typeof` and `assert_type` at run time and about inputs whose type their gradient decides."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    CollectiveError,
    I,
    Mesh,
    P,
    Partial,
    R,
    ShardTypeError,
    V,
    all_reduce,
    assert_type,
    assume_constant,
    lax,
    make_mesh,
    shard_map,
    typeof,
)
from shardmap_torch.types import K
from tests.programs.support.everywhere import ON_EVERY_MESH, run_on, same
from tests.support.golden import hold_own, told
from tests.support.pool import Gloo

MESH = make_mesh((2,), ("tp",), kind="simulated")
GRID = make_mesh((2, 2), ("dp", "tp"), kind="simulated")


def asking(mesh: Mesh) -> None:
    """A run finds what the check has found, on every call."""
    found: list[Any] = assume_constant([])  # else a check would leave it as it was

    def body(x: Tensor) -> Tensor:
        total = lax.psum(x, "tp")
        found.append((typeof(x), typeof(total)))
        return total

    f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P())
    x = torch.arange(2.0 * mesh.size)
    for _ in range(2):
        same(f(x), x.reshape(mesh.size, 2).sum(0))
    assert len(found) >= 3  # one check and two runs
    assert all(pair == ({"tp": V}, {"tp": K}) for pair in found)


@ON_EVERY_MESH
def test_typeof_finds_in_a_run_what_the_checker_found(kind: str, gloo: Gloo) -> None:
    run_on(kind, asking, gloo)


def test_typeof_outside_of_what_is_checked_says_so() -> None:
    with told(ShardTypeError, 2):
        typeof(torch.ones(2))
    f = shard_map(
        lambda x: (typeof(x), x)[1], mesh=MESH, in_specs=P("tp"), out_specs=P("tp"), check=False
    )
    with told(ShardTypeError):
        f(torch.ones(2))


def test_typeof_that_differs_between_paths_is_refused() -> None:
    def body(x: Tensor, s: Tensor) -> Tensor:
        y = x if s.item() > 0 else lax.psum(x, "tp")
        typeof(y)
        return lax.psum(x, "tp")

    def unlike(x: Tensor, s: Tensor) -> Tensor:
        y = x if s.item() > 0 else s
        typeof(y)
        return lax.psum(x, "tp")

    args = torch.ones(2), torch.ones(())
    specs: Any = {"mesh": MESH, "in_specs": (P("tp"), P()), "out_specs": P()}
    shard_map(body, **specs)(*args)  # the sum on one of them tells the paths apart
    with pytest.raises(ShardTypeError) as caught:
        shard_map(unlike, **specs)(*args)
    hold_own(str(caught.value))


def test_one_type_is_asserted_along_all_bound_axes() -> None:
    def body(x: Tensor) -> Tensor:
        assert_type(x, V)
        return assert_type(all_reduce(x, ("dp", "tp"), dst=R), "R")

    specs: Any = {"in_specs": P(("dp", "tp")), "out_specs": P(replicate={"dp", "tp"})}
    f = shard_map(body, mesh=GRID, **specs)
    y = f(torch.ones(4, requires_grad=True))
    assert y.tolist() == [4.0]
    with pytest.raises(ShardTypeError, match="expects V over 'dp', but the value is R"):
        shard_map(lambda x: assert_type(body(x), V), mesh=GRID, **specs)(
            torch.ones(4, requires_grad=True)
        )
    with told(CollectiveError):
        shard_map(lambda x: assert_type(x, 3), mesh=MESH, in_specs=P("tp"), out_specs=P("tp"))(  # type: ignore[arg-type]
            torch.ones(2)
        )


def step(expected: Any, w_is_used_alike: bool) -> Any:
    def body(w: Tensor, x: Tensor) -> Tensor:
        assert_type(w.t(), {"tp": expected})
        if w_is_used_alike:
            return all_reduce(x.sum(), "tp", dst=I) * w.sum()
        return all_reduce((x @ w).sum(), "tp", dst=I)

    return shard_map(body, mesh=MESH, in_specs=(P(), P("tp")), out_specs=P())


@pytest.mark.parametrize(("alike", "final", "other"), [(False, R, I), (True, I, R)])
def test_an_assertion_on_an_input_is_held_against_the_type_that_it_gets(
    alike: bool, final: Any, other: Any
) -> None:
    w, x = torch.ones(2, 2, requires_grad=True), torch.ones(4, 2, requires_grad=True)
    step(final, alike)(w, x).backward()
    assert w.grad is not None
    assert w.grad.tolist() == [[8.0 if alike else 4.0] * 2] * 2
    with told(ShardTypeError):
        step(other, alike)(w, x)
    step(other, alike)(w.detach(), x)  # without a gradient it is neither


def test_partial_is_asserted_by_its_name() -> None:
    def body(x: Tensor) -> Tensor:
        return assert_type(lax.pcast(x, "tp", to="unreduced"), Partial)

    f = shard_map(body, mesh=MESH, in_specs=P("tp"), out_specs=P(partial={"tp"}))
    assert f(torch.ones(2)).tolist() == [2.0]
