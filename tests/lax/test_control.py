"""Dynamic slices, loops and branches of `lax`, in bodies and against plain torch."""

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardmap_torch import (
    CollectiveError,
    Mesh,
    P,
    ShardTypeError,
    TransformError,
    lax,
    make_mesh,
    shard_map,
)
from tests.programs.support.everywhere import ON_EVERY_MESH, run_on, same
from tests.programs.support.harness import random
from tests.support.golden import told
from tests.support.pool import Gloo


def ring(mesh: Mesh) -> None:
    """A ring sum in a fori_loop and in a scan, with each rank's own slice written and read."""
    n = mesh.size
    pairs = [(r, (r + 1) % n) for r in range(n)]

    def body(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def add(step: int, carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            total, moving = carry
            return total + moving, lax.ppermute(moving, "i", pairs)

        total, _ = lax.fori_loop(0, n, add, (torch.zeros_like(x), x))
        (again, _), seen = lax.scan(
            lambda carry, s: (add(0, carry), carry[1] * s),
            (torch.zeros_like(x), x),
            torch.ones(n, dtype=x.dtype),
        )
        rank = lax.axis_index("i")
        own = lax.dynamic_slice_in_dim(w, rank * 2, 2) * x
        placed = lax.dynamic_update_slice_in_dim(torch.zeros_like(w), own, rank * 2, 0)
        return total * seen.sum(0), again * x, lax.psum(placed, "i")

    def alone(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = x.reshape(n, 2, 3).sum(0).repeat(n, 1)
        return total * total, total * x, w * x

    x, w = (random((2 * n, 3), seed).requires_grad_() for seed in (0, 1))
    f: Any = shard_map(body, mesh=mesh, in_specs=(P("i"), P()), out_specs=(P("i"), P("i"), P()))
    ys, wanted = f(x, w), alone(x, w)
    same(ys, wanted)
    total = sum((y.full_tensor() if hasattr(y, "full_tensor") else y).square().sum() for y in ys)
    cast(Any, total).backward()
    given_: Any = sum(y.square().sum() for y in wanted)
    same((x.grad, w.grad), torch.autograd.grad(given_, (x, w)))


@ON_EVERY_MESH
def test_loops_and_slices_of_ranks_are_those_of_one_device(kind: str, gloo: Gloo) -> None:
    run_on(kind, ring, gloo, (3,), ("i",))


MESH = make_mesh((2,), ("i",), kind="simulated")


def test_cond_runs_one_branch_that_all_ranks_choose() -> None:
    def body(x: Tensor, pred: Tensor) -> Any:
        return lax.cond(pred, lambda x: lax.psum(x, "i"), lambda x: lax.pmax(x, "i"), x)

    f = shard_map(body, mesh=MESH, in_specs=(P("i"), P()), out_specs=P())
    x = torch.tensor([1.0, 2.0])
    assert f(x, torch.tensor(True)).item() == 3.0
    assert f(x, torch.tensor(False)).item() == 2.0
    differing = shard_map(
        lambda x: lax.cond(x.sum() > 1, lambda x: {"y": -x}, lambda x: {"y": lax.psum(x, "i")}, x),
        mesh=MESH,
        in_specs=P("i"),
        out_specs=P("i"),
    )
    assert differing(x)["y"].tolist() == [3.0, -2.0]
    other = shard_map(
        lambda x: lax.cond(x.sum() > 1, lambda x: {"y": x}, lambda x: [x], x),
        mesh=MESH,
        in_specs=P("i"),
        out_specs=P("i"),
    )
    with pytest.raises(TransformError, match=r"cond: the branches return .*must return equal tree"):
        other(x)


@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
def test_a_loop_ends_on_all_ranks_alike_within_a_bound(simulate: Any) -> None:
    mesh = make_mesh((2,), ("i",), kind="simulated", simulate=simulate)

    def halved(x: Tensor, steps: int, axis: str | None) -> Tensor:
        def goes_on(carry: tuple[int, Tensor]) -> bool | Tensor:
            k, x = carry
            size = x.sum() if axis is None else lax.psum(x.sum(), axis)
            return k < steps and size > 1

        return lax.while_loop(goes_on, lambda c: (c[0] + 1, c[1] / 2), (0, x))[1]

    def run(steps: int, axis: str | None) -> Any:
        f = shard_map(
            lambda x: halved(x, steps, axis), mesh=mesh, in_specs=P("i"), out_specs=P("i")
        )
        return f(torch.tensor([1.0, 6.0])).tolist()

    assert run(5, "i") == [1 / 8, 6 / 8]
    assert run(2, "i") == [1 / 4, 6 / 4]
    with pytest.raises(ShardTypeError, match="taking a Python value over axis 'i' of V"):
        run(5, None)
    with pytest.raises(ShardTypeError, match="more than 64 paths"):
        run(100, "i")


@given(
    start=st.integers(-9, 9), size=st.integers(0, 5), as_tensor=st.booleans(), dim=st.integers(0, 1)
)
def test_a_slice_is_clamped_and_an_update_is_its_inverse(
    start: int, size: int, as_tensor: bool, dim: int
) -> None:
    x = torch.arange(30.0).reshape(5, 6)
    length = x.shape[dim]
    first = min(max(start + length if start < 0 else start, 0), length - size)
    at: Any = torch.tensor(start) if as_tensor else start
    found = lax.dynamic_slice_in_dim(x, at, size, dim)
    assert torch.equal(found, x.narrow(dim, first, size))
    updated = lax.dynamic_update_slice_in_dim(x, -found, at, dim)
    wanted = x.clone()
    wanted.narrow(dim, first, size).neg_()
    assert torch.equal(updated, wanted)
    row = lax.dynamic_index_in_dim(x, at, dim, keepdims=False)
    index = min(max(start + length if start < 0 else start, 0), length - 1)
    assert torch.equal(row, x.select(dim, index))
    again = lax.dynamic_update_index_in_dim(torch.zeros_like(x), row, at, dim)
    assert torch.equal(again.select(dim, index), row)
    assert again.count_nonzero() == row.count_nonzero()


def test_a_scan_goes_backwards_and_through_trees() -> None:
    xs = {"a": torch.arange(3.0), "b": (torch.ones(3, 2), None)}
    carry, ys = lax.scan(
        lambda c, x: (c * 2 + x["a"], (c, {"s": x["b"][0].sum()})), torch.tensor(1.0), xs,
        reverse=True,
    )  # fmt: skip
    assert carry.item() == ((1 * 2 + 2) * 2 + 1) * 2 + 0
    assert ys[0].tolist() == [9.0, 4.0, 1.0]
    assert ys[1]["s"].tolist() == [2.0] * 3
    assert lax.scan(lambda c, x: (c + 1, x), 0, length=4) == (4, None)
    assert lax.scan(lambda c, x: (c, x), 0, torch.ones(0)) == (0, None)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-6, 6)), min_size=2, max_size=2))
def test_a_box_is_clamped_and_an_update_is_its_inverse(dims: list[tuple[int, int]]) -> None:
    x = torch.arange(20.0).reshape(4, 5)
    sizes, starts = zip(*dims, strict=True)
    firsts = [
        min(max(at + n if at < 0 else at, 0), n - size)
        for at, n, size in zip(starts, x.shape, sizes, strict=True)
    ]
    box = tuple(slice(at, at + size) for at, size in zip(firsts, sizes, strict=True))
    for given_ in (starts, torch.tensor(starts)):
        assert torch.equal(lax.dynamic_slice(x, given_, sizes), x[box])
        wanted = x.clone()
        wanted[box] *= -1
        assert torch.equal(lax.dynamic_update_slice(x, -x[box], given_), wanted)


@pytest.mark.parametrize("length", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_of_a_function_that_does_not_commute(length: int, reverse: bool) -> None:
    xs = torch.arange(4.0 * length).reshape(2, length, 2).sin()

    def affine(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    found = lax.associative_scan(affine, (xs[..., 0], xs[..., 1]), reverse, axis=1)
    order = range(length)[::-1] if reverse else range(length)
    carry: Any = (torch.ones(2), torch.zeros(2))
    for at in order:
        carry = affine(carry, (xs[:, at, 0], xs[:, at, 1]))
        torch.testing.assert_close(tuple(x[:, at] for x in found), carry)


WRONG: list[Any] = [
    lambda: lax.while_loop(lambda x: x, lambda x: x, torch.ones(2)),
    lambda: lax.switch(0.5, [abs], -1),  # type: ignore[arg-type]
    lambda: lax.switch(0, [], -1),
    lambda: lax.associative_scan(torch.add, (torch.ones(2), torch.ones(3))),  # type: ignore[arg-type]
    lambda: lax.associative_scan(lambda x, y: (x, y), torch.ones(2)),  # type: ignore[arg-type,return-value]
    lambda: lax.dynamic_slice(torch.ones(2, 2), (0,), (1, 1)),
    lambda: lax.dynamic_update_slice(torch.ones(2), torch.ones(2).double(), (0,)),
    lambda: lax.fori_loop(cast(Any, torch.tensor(0)), 2, lambda i, x: x, 0),
    lambda: lax.scan(lambda c, x: (c, x), 0, (torch.ones(2), torch.ones(3))),
    lambda: lax.scan(lambda c, x: (c, x), 0),
    lambda: lax.dynamic_slice_in_dim(torch.ones(2), 0, 3),
    lambda: lax.dynamic_slice_in_dim(torch.ones(2), 0, 1, 1),
    lambda: lax.dynamic_update_slice_in_dim(torch.ones(2), torch.ones(3), 0, 0),
]


@pytest.mark.parametrize("call", WRONG)
def test_wrong_arguments_are_explained(call: Any) -> None:
    with told((CollectiveError, TransformError)):
        call()
