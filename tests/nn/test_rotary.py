"""Rotary positions are global, whatever part of the sequence a rank holds."""

from functools import partial

import pytest
import torch
from torch import Tensor

from shardmap_torch import LayerError, P, SpecError, make_mesh, shard_map
from shardmap_torch.nn import positions, rotary, rotary_tables
from tests.nn.support.cases import Case, budget, random
from tests.support.golden import told

X = random(4, 6, 4, 8)


def own(x: Tensor, axis: str | None) -> Tensor:
    return rotary(x, positions(6, axis, offset=3))


def by_tables(x: Tensor) -> Tensor:
    tables = rotary_tables(positions(6, "tp", offset=3), 8, base=100.0, dtype=x.dtype)
    return rotary(x, tables, interleaved=True)


def complex_product(x: Tensor, interleaved: bool = False, base: float = 10_000.0) -> Tensor:
    """Each pair, as a complex number, times exp(i * position * frequency)."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.outer(torch.arange(3.0, 9.0, dtype=x.dtype), frequencies).unsqueeze(1)
    turn = torch.polar(torch.ones_like(angles), angles)
    if interleaved:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(
            -2
        )
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], -1)


CASES = {
    "sharded heads": Case(
        partial(own, axis=None), complex_product, (P("dp", None, "tp"),), P("dp", None, "tp"), (X,)
    ),
    "a sharded sequence": Case(
        partial(own, axis="tp"), complex_product, (P("dp", "tp"),), P("dp", "tp"), (X,)
    ),
    "neighbouring pairs": Case(
        by_tables,
        partial(complex_product, interleaved=True, base=100.0),
        (P("dp", "tp"),),
        P("dp", "tp"),
        (X,),
    ),
}


def test_nothing_is_sent() -> None:
    assert budget(CASES["a sharded sequence"]) == ({}, {})


def test_scaled_frequencies_take_the_place_of_the_base() -> None:
    frequencies = 10_000.0 ** (-torch.arange(4, dtype=X.dtype) / 4)
    found = rotary(X, rotary_tables(torch.arange(6), 8, frequencies=frequencies / 2, dtype=X.dtype))
    torch.testing.assert_close(found[:, 2], rotary(X[:, 2:3], torch.tensor([1]))[:, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tables_computed_once_turn_bit_for_bit_as_the_positions_do(dtype: torch.dtype) -> None:
    x, at = X.to(dtype), torch.arange(3, 9)
    tables = rotary_tables(at, 8, dtype=torch.promote_types(dtype, torch.float32))
    assert rotary(x, tables).equal(rotary(x, at))


def test_positions_of_a_part_keep_their_promise() -> None:
    mesh = make_mesh((3,), ("cp",), kind="simulated")
    f = shard_map(partial(positions, 6, "cp", offset=2), mesh=mesh, in_specs=(), out_specs=P("cp"))
    assert f().tolist() == [2, 3, 4, 5, 6, 7]


def test_half_precision_turns_by_angles_of_float32() -> None:
    x, far = random(1, 1, 8).to(torch.bfloat16), torch.tensor([30_001])
    exact = rotary(x.double(), far)
    found = rotary(x, far).double()
    # One rounding of values of at most 8; bfloat16 angles would be off by up to 64 radians.
    torch.testing.assert_close(found, exact, rtol=2**-8, atol=2**-8 * 4)


@pytest.mark.parametrize(
    ("x", "at"),
    [
        ((6, 4, 8), 5),
        ((6, 4, 7), 6),
        ((), 6),
    ],
)
def test_shapes_that_do_not_match_are_refused(x: tuple[int, ...], at: int) -> None:
    with told(LayerError):
        rotary(torch.ones(x), torch.arange(at))


def test_a_length_that_does_not_divide_is_refused() -> None:
    mesh = make_mesh((4,), ("cp",), kind="simulated")
    f = shard_map(partial(positions, 6, "cp"), mesh=mesh, in_specs=(), out_specs=P("cp"))
    with pytest.raises(SpecError, match=r"does not divide over 'cp' = 4 ranks \(6 = 1\*4 \+ 2\)"):
        f()
