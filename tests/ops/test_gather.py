"""Collectives that move values, and compositions that give back what they took."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    S,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    broadcast,
    convert,
    make_mesh,
    ppermute,
    redistribute,
    reduce_scatter,
    shift,
)
from tests.programs.support.everywhere import ON_EVERY_MESH, SIMULATED, run_on, same
from tests.programs.support.everywhere import unchecked as shard_map
from tests.programs.support.harness import random
from tests.support.pool import Gloo

NAMES = ("a", "b", "c")


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Sizes of one to three axes, and the order in which some of them act as one."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    order = draw(st.permutations(NAMES[: len(sizes)]))
    return tuple(sizes), tuple(order[: draw(st.integers(1, len(order)))])


@SIMULATED
@given(case=meshes(), dim=st.integers(-2, 1), data=st.data())
def test_what_was_cut_over_any_axes_is_gathered_whole(
    case: Any, dim: int, data: st.DataObject, kind: Any
) -> None:
    sizes, axes = case
    mesh = make_mesh(sizes, NAMES[: len(sizes)], kind="simulated", simulate=kind)
    shape = [3, 3]
    shape[dim] = mesh.num_ranks(axes) * data.draw(st.integers(0, 2))
    x = random(shape, 0)
    entries = [None, None]
    entries[dim] = axes
    spec = P(*entries)

    def body(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        whole = all_gather(x, axes, dim=dim, dst=I)
        stacked = all_gather(x, axes, dim=0, dst=I, tiled=False)
        return whole, convert(whole, axes, src=I, dst="V", dim=dim), stacked

    whole, again, stacked = shard_map(body, mesh=mesh, in_specs=spec, out_specs=(P(), spec, P()))(x)
    same((whole, again), (x, x))
    same(stacked, torch.stack(x.chunk(mesh.num_ranks(axes), dim)) if x.numel() else stacked)


@SIMULATED
@given(case=meshes(), first=st.integers(0, 2), second=st.integers(0, 2))
def test_shards_move_between_dims_and_back(case: Any, first: int, second: int, kind: Any) -> None:
    sizes, axes = case
    mesh = make_mesh(sizes, NAMES[: len(sizes)], kind="simulated", simulate=kind)
    n = mesh.num_ranks(axes)
    x = random((n, 2 * n, 3 * n), 0)
    entries = [[None] * dim + [axes] for dim in (first, second)]

    def body(x: Tensor) -> Tensor:
        return redistribute(x, axes, src=S(first), dst=S(second - 3))

    move = shard_map(body, mesh=mesh, in_specs=P(*entries[0]), out_specs=P(*entries[1]))
    same(move(x), x)


@SIMULATED
@given(
    n=st.integers(1, 4),
    perm=st.permutations(range(4)),
    kept=st.integers(0, 4),
    data=st.data(),
)
def test_pairs_carry_values_there_and_gradients_back(
    n: int, perm: list[int], kept: int, data: st.DataObject, kind: Any
) -> None:
    mesh = make_mesh((n,), ("a",), kind="simulated", simulate=kind)
    targets = [target for target in perm if target < n]
    pairs = list(enumerate(targets))[:kept]
    x = random((n, 2), 0).requires_grad_()
    spec = P("a")
    move = shard_map(lambda x: ppermute(x, "a", pairs), mesh=mesh, in_specs=spec, out_specs=spec)
    y = move(x)
    matrix = torch.zeros(n, n, dtype=torch.float64)
    for source, target in pairs:
        matrix[target, source] = 1
    same(y, matrix @ x)
    g = random((n, 2), 1)
    same(torch.autograd.grad(y, x, g), (matrix.t() @ g,))


def shifts(mesh: Mesh) -> None:
    n = mesh.size
    x = random((n, 2), 0)
    for offset in range(-n - 1, n + 2):
        for wrap in (True, False):
            y = shard_map(
                lambda x: shift(x, "tp", offset, wrap=wrap),  # noqa: B023
                mesh=mesh,
                in_specs=P("tp"),
                out_specs=P("tp"),
            )(x)
            expected = x.roll(offset, 0)
            if not wrap:
                rank = torch.arange(n)
                expected = expected * ((rank >= offset) & (rank < n + offset))[:, None]
            same(y, expected)


@ON_EVERY_MESH
def test_a_shift_is_a_roll_over_the_ranks(kind: str, gloo: Gloo) -> None:
    run_on(kind, shifts, gloo, (3,))


def block_transposition(mesh: Mesh) -> None:
    n = mesh.size
    x = random((n, n, 2), 0)

    def exchange(x: Tensor) -> Tensor:
        return all_to_all(x[0], "tp", split_dim=0, concat_dim=0, tiled=False)[None]

    same(shard_map(exchange, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(x), x.transpose(0, 1))


@ON_EVERY_MESH
def test_an_untiled_exchange_transposes_ranks_and_rows(kind: str, gloo: Gloo) -> None:
    run_on(kind, block_transposition, gloo, (3,))


def indices(mesh: Mesh) -> None:
    def body() -> tuple[Tensor, Tensor, Tensor]:
        assert axis_size(("a", "b")) == axis_size("a") * axis_size("b") == 4
        own, turned = axis_index(("a", "b")), axis_index(("b", "a"))
        assert own.shape == ()
        assert own.dtype == torch.int64
        sent = broadcast(own, ("b", "a"), 1, dst=I)  # the rank at b=0, a=1
        return own.reshape(1, 1), turned.reshape(1, 1), sent

    out_specs = (P("a", "b"), P("a", "b"), P())
    own, turned, sent = shard_map(body, mesh=mesh, in_specs=(), out_specs=out_specs)()
    same(own, torch.tensor([[0, 1], [2, 3]]))
    same(turned, torch.tensor([[0, 2], [1, 3]]))
    same(sent, torch.tensor(2))


@ON_EVERY_MESH
def test_positions_over_several_axes_count_the_first_as_major(kind: str, gloo: Gloo) -> None:
    run_on(kind, indices, gloo, (2, 2), ("a", "b"))


def tuple_axes_out_of_order(mesh: Mesh) -> None:
    """Over ("b", "a") shards stand in the order of that tuple, on every kind of mesh."""
    x = random((8, 4), 0)
    spec = P(("b", "a"))

    def body(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        whole = all_gather(x, ("b", "a"), dst=R)
        back = reduce_scatter(whole, ("b", "a")) / 4
        columns = all_to_all(x, ("b", "a"), split_dim=1, concat_dim=0)
        return back, columns, shift(x, ("b", "a"), 1)

    out_specs = (spec, P(None, ("b", "a")), spec)
    back, columns, shifted = shard_map(body, mesh=mesh, in_specs=spec, out_specs=out_specs)(x)
    same((back, columns, shifted), (x, x, x.roll(2, 0)))


@ON_EVERY_MESH
def test_axes_out_of_mesh_order_keep_their_own_order(kind: str, gloo: Gloo) -> None:
    run_on(kind, tuple_axes_out_of_order, gloo, (2, 2), ("a", "b"))


def uneven_round_trip(mesh: Mesh) -> None:
    rows, columns = (2, 0, 3), (1, 2, 1)
    whole = random((sum(rows), sum(columns)), 0)
    padded = torch.cat(
        [torch.nn.functional.pad(p, (0, 0, 0, 3 - len(p))) for p in whole.split(list(rows))]
    )
    poison = padded.clone()
    poison[2:5] = float("nan")  # what stands in the padding must not travel

    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        gathered = all_gather(x, "tp", sizes=rows, dst=I)
        turned = all_to_all(
            x, "tp", split_dim=1, concat_dim=0, split_sizes=columns, concat_sizes=rows
        )
        back = all_to_all(
            turned, "tp", split_dim=0, concat_dim=1, split_sizes=rows, concat_sizes=columns
        )
        return gathered, back

    f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=(P(), P("tp")))
    same(f(poison), (whole, padded))


@ON_EVERY_MESH
def test_uneven_pieces_travel_without_their_padding(kind: str, gloo: Gloo) -> None:
    run_on(kind, uneven_round_trip, gloo, (3,))


@pytest.mark.parametrize("src", [S(0), I, R, "P"])
@pytest.mark.parametrize("dst", [S(1), I, R, "P"])
@SIMULATED
def test_redistribute_keeps_the_value(src: Any, dst: Any, kind: Any) -> None:
    mesh = make_mesh((2,), ("a",), kind="simulated", simulate=kind)
    x = random((2, 4), 0).requires_grad_()
    specs = {S(0): P("a"), S(1): P(None, "a"), I: P(), R: P(replicate="a"), "P": P(partial="a")}
    in_spec = P(invariant="a") if src == I else specs[src]

    def body(x: Tensor) -> Tensor:
        return redistribute(x, "a", src=src, dst=dst)

    y = shard_map(body, mesh=mesh, in_specs=in_spec, out_specs=specs[dst])(x)
    same(y, x)
    g = random((2, 4), 1)
    same(torch.autograd.grad(y, x, g), (g,))
