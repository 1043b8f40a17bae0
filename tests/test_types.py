"""Shard types as values."""

import pytest

from shardmap_torch import I, Partial, R, S, ShardTypeError, V
from shardmap_torch.types import AxisType, as_type
from tests.support.golden import told


@pytest.mark.parametrize(
    ("axis_type", "text"), [(I, "I"), (R, "R"), (V, "V"), (Partial, "Partial"), (S(1), "S(1)")]
)
def test_a_type_prints_as_it_is_written(axis_type: AxisType, text: str) -> None:
    assert repr(axis_type) == text


def test_strings_stand_for_the_types_without_a_dim() -> None:
    assert [as_type(name) for name in "IRVP"] == [I, R, V, Partial]
    assert as_type(S(0)) == S(0)


def test_only_types_whose_ranks_may_differ_vary() -> None:
    assert [each.varies for each in (I, R, V, S(0), Partial)] == [False, False, True, True, True]


@pytest.mark.parametrize("value", ["S(0)", "K", "", 3, None])
def test_what_is_no_type_is_refused_with_the_list_of_types(value: object) -> None:
    with told(ShardTypeError):
        as_type(value)  # type: ignore[arg-type]
