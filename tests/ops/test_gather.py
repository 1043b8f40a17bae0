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
    convert,
    make_mesh,
    redistribute,
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
