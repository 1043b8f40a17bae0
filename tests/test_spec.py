"""P as a value, and how it says that it does not fit."""

import copy
import pickle
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmap_torch import I, P, Partial, R, S, SpecError
from shardmap_torch.core.tree import flatten
from shardmap_torch.spec import mismatches
from tests.support.golden import told

AXES = ("a", "b", "c", "d")


@st.composite
def specs(draw: st.DrawFn) -> P:
    """Each axis stands in at most one place: an entry or a keyword."""
    places = draw(st.lists(st.integers(-4, 3), min_size=4, max_size=4))
    order = draw(st.permutations(AXES))
    where = dict(zip(AXES, places, strict=True))
    entries: list[Any] = []
    for dim in range(draw(st.integers(0, 4))):
        axes = tuple(axis for axis in order if where[axis] == dim)
        entries.append(axes[0] if len(axes) == 1 and draw(st.booleans()) else axes or None)
    typed = {
        word: {axis for axis in AXES if where[axis] == place}
        for word, place in [("replicate", -1), ("invariant", -2), ("partial", -3)]
    }
    return P(*entries, **typed)


@given(specs())
def test_a_spec_prints_as_it_is_written(spec: P) -> None:
    assert eval(repr(spec), {"P": P}) == spec


@given(specs(), specs())
def test_equal_specs_are_those_that_print_the_same(a: P, b: P) -> None:
    assert (a == b) == (repr(a) == repr(b))
    if a == b:
        assert hash(a) == hash(b)


@given(specs())
def test_a_spec_survives_pickling_and_copying(spec: P) -> None:
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert copy.deepcopy(spec) == copy.copy(spec) == spec


@given(specs())
def test_every_named_axis_has_one_type(spec: P) -> None:
    assert set(spec.types) == spec.named
    assert set(spec.mentioned) == {axis for axis, kind in spec.types.items() if kind.kind == "S"}


def test_types_follow_from_the_place_of_an_axis() -> None:
    spec = P(None, ("a", "b"), replicate="c", invariant="d", partial="e")
    assert spec.types == {"a": S(1), "b": S(1), "c": R, "d": I, "e": Partial}


def test_a_spec_is_one_leaf_of_a_pytree() -> None:
    assert flatten({"w": P("a"), "b": P()})[0] == [P(), P("a")]


def test_a_spec_cannot_be_changed() -> None:
    spec = P("a")
    with pytest.raises(AttributeError) as caught:
        spec.entries = ()  # type: ignore[misc]
    assert str(caught.value) == "P is immutable; entries cannot be set."
    assert P("a") != "a"


@pytest.mark.parametrize(
    "make",
    [
        lambda: P(cast(Any, 3)),
        lambda: P(cast(Any, ("a", 3))),
        lambda: P(replicate=cast(Any, [1])),
        lambda: P(partial=cast(Any, 3)),
        lambda: P("a", "a"),
        lambda: P(("b", "b")),
        lambda: P(("a", "b"), replicate="b", partial="a"),
    ],
)
def test_what_is_no_spec_is_refused(make: Any) -> None:
    with told(SpecError):
        make()


def test_misfits_show_the_arithmetic_of_every_dim() -> None:
    sizes = {"a": 2, "b": 3}
    assert mismatches(P("a", None, "b"), (5, 1, 7), sizes) == [
        "dim 0 has size 5, which does not divide over 'a' = 2 ranks (5 = 2*2 + 1)",
        "dim 2 has size 7, which does not divide over 'b' = 3 ranks (7 = 2*3 + 1)",
    ]
    assert mismatches(P(("a", "b")), (10,), sizes) == [
        "dim 0 has size 10, which does not divide over ('a', 'b') = 2*3 = 6 ranks (10 = 1*6 + 4)"
    ]
    assert mismatches(P("a", None), (2,), sizes) == [
        "P('a', None) has 2 entries, but the value has 1 dim"
    ]
    assert mismatches(P(("a", "b")), (0, 5), sizes) == []


def test_a_spec_iterates_over_its_entries_and_an_empty_tuple_shards_nothing() -> None:
    spec = P("dp", (), ("fsdp", "tp"), [])
    assert list(spec) == ["dp", None, ("fsdp", "tp"), None]
    assert [*P(*spec, replicate={"pp"})] == [*spec]
    assert P(()) == P(None)
    assert hash(P(())) == hash(P(None))
    assert P()  # it has no length
