"""Sums and extrema against torch on the stacked values of all ranks."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from shardmap_torch import I, Mesh, P, R, all_reduce, make_mesh, reduce_scatter
from tests.programs.support.everywhere import ON_EVERY_MESH, ON_REAL_RANKS, SIMULATED, run_on, same
from tests.programs.support.everywhere import unchecked as shard_map
from tests.programs.support.harness import global_value, random
from tests.support.pool import Gloo

INF = math.inf


def over_ranks(mesh: Mesh, f: Any, out: P | None = None) -> Any:
    """Each rank sees its row of `[ranks, *local]`."""
    spec = out or P()
    return shard_map(lambda x: f(x[0]), mesh=mesh, in_specs=P("tp"), out_specs=spec)


def trees(mesh: Mesh) -> None:
    x = torch.arange(mesh.size * 2).reshape(mesh.size, 2)

    def body(x: Tensor) -> Any:
        return all_reduce({"a": x.double(), "b": (x, [x > 1])}, "tp", dst=I)

    y = over_ranks(mesh, body)(x)
    same(y["a"], x.double().sum(0))
    same((y["b"][0], y["b"][1][0]), (x.sum(0), (x > 1).sum(0)))
    assert y["b"][1][0].dtype == torch.int64


@ON_EVERY_MESH
def test_a_tree_is_summed_leaf_by_leaf_and_booleans_are_counted(kind: str, gloo: Gloo) -> None:
    run_on(kind, trees, gloo, (3,))


def extremum_and_gradient(mesh: Mesh, rows: Tensor, op: Any) -> None:
    """Ties share the cotangent evenly; so does torch's amax."""
    x = rows.double().requires_grad_()
    y = over_ranks(mesh, lambda x: all_reduce(x, "tp", dst=I, op=op))(x)
    reference = x.amax(0) if op == "max" else x.amin(0)
    same(y, reference)
    cotangent = random(y.shape, 5)
    expected = torch.autograd.grad(reference, x, cotangent)
    same(torch.autograd.grad(y, x, cotangent), expected)
    z = over_ranks(mesh, lambda x: all_reduce(x, "tp", dst=R, op=op), P(replicate="tp"))(x)
    same(z, reference)
    same(torch.autograd.grad(z, x, cotangent), expected)


ROWS = st.integers(1, 4).flatmap(
    lambda n: st.integers(0, 3).flatmap(
        lambda k: st.lists(
            st.lists(st.sampled_from([-INF, -1.0, 0.0, 1.0, INF]), min_size=k, max_size=k),
            min_size=n,
            max_size=n,
        )
    )
)


@SIMULATED
@pytest.mark.parametrize("op", ["max", "min"])
@given(rows=ROWS)
@example(rows=[[-INF], [-INF]])
@example(rows=[[1.0, 2.0], [1.0, 3.0], [0.0, 3.0]])
def test_extrema_and_their_gradients_are_those_of_torch(
    op: str, kind: Any, rows: list[list[float]]
) -> None:
    mesh = make_mesh((len(rows),), ("tp",), kind="simulated", simulate=kind)
    extremum_and_gradient(mesh, torch.tensor(rows).reshape(len(rows), -1), op)


def extrema(mesh: Mesh) -> None:
    rows = torch.tensor([[1.0, 2.0, -INF, 0.0], [1.0, 3.0, -INF, -INF]])
    for op in ("max", "min"):
        extremum_and_gradient(mesh, rows, op)


def test_extrema_on_processes(gloo: Gloo) -> None:
    run_on("gloo", extrema, gloo)


def nan(mesh: Mesh) -> None:
    x = torch.tensor([[math.nan, 1.0], [2.0, 3.0]], requires_grad=True)
    y = over_ranks(mesh, lambda x: all_reduce(x, "tp", dst=I, op="max"))(x)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad[:, 1].tolist() == [0.0, 1.0]


@ON_EVERY_MESH
def test_a_nan_spoils_the_gradient_of_no_other_element(kind: str, gloo: Gloo) -> None:
    run_on(kind, nan, gloo)


def precision(mesh: Mesh) -> None:
    """Both directions travel in the precision that is named, and in no other."""
    n = mesh.size
    x = (1 + random((n, 8), 0) / 8).requires_grad_()
    y = over_ranks(
        mesh,
        lambda x: all_reduce(
            x, "tp", dst=R, comm_dtype=torch.float16, grad_comm_dtype=torch.bfloat16
        ),
        P(replicate="tp"),
    )(x)
    assert y.dtype == torch.float64
    # Halves round operands and partial sums: unit roundoff 2**-11, n of them, sums below 2n.
    torch.testing.assert_close(y.detach(), x.detach().sum(0), rtol=0, atol=2 * n * n * 2**-11)
    assert not torch.equal(y.detach(), x.detach().sum(0))
    exact = 1 + 2.0**-12  # lost in bfloat16
    (gradient,) = torch.autograd.grad(y, x, torch.full((8,), exact, dtype=torch.float64))
    assert torch.equal(gradient, torch.ones_like(gradient))
    z = over_ranks(mesh, lambda x: all_reduce(x, "tp", dst=I, comm_dtype=torch.float16))(
        torch.full((n, 2), 2**20 + 1)
    )
    assert z.tolist() == [n * (2**20 + 1)] * 2  # integers do not travel in halves
    w = over_ranks(mesh, lambda x: all_reduce(x, "tp", dst=I, comm_dtype=torch.float16))(
        torch.full((n, 2), 1 + 2j)
    )
    assert w.tolist() == [n * (1 + 2j)] * 2


@ON_REAL_RANKS
def test_values_and_cotangents_travel_in_the_dtypes_that_are_named(kind: str, gloo: Gloo) -> None:
    run_on(kind, precision, gloo)


def uneven(mesh: Mesh) -> None:
    sizes = tuple(range(mesh.size))  # one of them empty
    x = random((mesh.size, sum(sizes), 2), 0)
    y = over_ranks(mesh, lambda x: reduce_scatter(x, "tp", sizes=sizes), P("tp"))(x)
    chunks = torch.stack(global_value(y).chunk(mesh.size))
    total = x.sum(0)
    for rank, size in enumerate(sizes):
        start = sum(sizes[:rank])
        same(chunks[rank][:size], total[start : start + size])
        assert not chunks[rank][size:].any()


@ON_EVERY_MESH
def test_uneven_pieces_are_padded_with_zeros_to_the_longest(kind: str, gloo: Gloo) -> None:
    run_on(kind, uneven, gloo, (3,))
