"""The finest axes of several grids, and what does not go together."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmap_torch import Mesh, MeshError, make_mesh
from tests.support.golden import told

FACTORS = st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=4)


@st.composite
def grids(draw: st.DrawFn) -> Mesh:
    """A mesh of which two views put neighbouring factors together, each in its own way."""
    factors = draw(FACTORS)

    def grouped(prefix: str) -> dict[str, int]:
        ends = sorted(draw(st.sets(st.integers(1, len(factors)))) | {len(factors)})
        starts = [0, *ends[:-1]]
        return {
            f"{prefix}{number}": prod(factors[start:end])
            for number, (start, end) in enumerate(zip(starts, ends, strict=True))
        }

    first = grouped("a")
    sizes, names = tuple(first.values()), tuple(first)
    return make_mesh(sizes, names, kind="abstract", views=[grouped("b"), grouped("c")])


@given(grids())
def test_every_rank_stands_at_its_row_major_place_in_every_view(mesh: Mesh) -> None:
    for prefix in "abc":
        names = [name for name in sorted(mesh.shape) if name.startswith(prefix) and "&" not in name]
        assert prod(mesh.shape[name] for name in names) == mesh.size
        for rank in range(mesh.size):
            place, left = mesh.coordinates(rank), rank
            for name in reversed(names):
                left, expected = divmod(left, mesh.shape[name])
                assert mesh.index([name], place) == expected


def test_axes_of_one_rank_are_axes_too() -> None:
    mesh = make_mesh((1, 4), ("dp", "cp"), kind="abstract", views=[{"edp": 2, "ep": 2, "tp": 1}])
    assert str(mesh) == "abstract mesh (edp=2, ep=2, dp=1, cp=4, tp=1)"


def test_a_flattened_axis_is_a_view() -> None:
    mesh = make_mesh((2, 3, 2), ("dp", "cp", "tp"), kind="abstract", views=[{"batch": 6, "tp": 2}])
    assert mesh.axis_names == ("dp", "cp", "tp")
    assert mesh.finest(["batch"]) == ("dp", "cp")
    place = mesh.coordinates(0)
    assert mesh.peers(["batch"], place) == mesh.peers(["dp", "cp"], place)


@pytest.mark.parametrize(
    "views",
    [
        {"a": 8},
        [8],
        [{"a": 0}],
        [{"a": 4}],
        [{"a": 6, "tp": 2}],
        [{"a": 6, "b": 2}],
    ],
)
def test_views_that_do_not_match_are_refused(views: object) -> None:
    with told(MeshError):
        make_mesh((4, 3), ("dp", "tp"), kind="abstract", views=views)  # type: ignore[arg-type]
