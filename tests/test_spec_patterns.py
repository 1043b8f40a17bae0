"""Patterns give every leaf one spec, and all that do not match are named."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardmap_torch import P, ShapeDtype, SpecError, match_specs
from shardmap_torch.spec_patterns import leaf_paths
from tests.support.golden import told

TREE = {
    "layers": [{"wq": torch.ones(4, 4), "norm": {"scale": torch.ones(4)}} for _ in range(2)],
    "head": ShapeDtype((4, 8)),
}


def names_of(pattern: str) -> list[str]:
    """The leaves that a pattern matches."""
    specs = match_specs(TREE, {pattern: P("x")}, default=P())
    found = zip(leaf_paths(TREE), _leaves(specs), strict=True)
    return [path for path, spec in found if spec == P("x")]


def _leaves(specs: Any) -> list[P]:
    return [
        specs["head"],
        *(spec for each in specs["layers"] for spec in (each["norm"]["scale"], each["wq"])),
    ]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("head", ["head"]),
        ("h*", ["head"]),
        ("hea?", ["head"]),
        ("layers.0.wq", ["layers.0.wq"]),
        ("layers.*.wq", ["layers.0.wq", "layers.1.wq"]),
        ("layers.[!0].wq", ["layers.1.wq"]),
        ("layers.[1-9].w*", ["layers.1.wq"]),
        ("**.wq", ["layers.0.wq", "layers.1.wq"]),
        ("**.scale", ["layers.0.norm.scale", "layers.1.norm.scale"]),
        ("layers.**.scale", ["layers.0.norm.scale", "layers.1.norm.scale"]),
        ("layers.1.**", ["layers.1.norm.scale", "layers.1.wq"]),
        ("**", ["head", *(f"layers.{i}.{n}" for i in (0, 1) for n in ("norm.scale", "wq"))]),
        ("**.head", ["head"]),
    ],
)
def test_a_pattern_matches_names(pattern: str, expected: list[str]) -> None:
    assert sorted(names_of(pattern)) == sorted(expected)


NAMES = st.lists(st.text("ab.*[]!?", min_size=1, max_size=5), min_size=1, max_size=5, unique=True)


@given(NAMES)
def test_every_path_without_special_characters_matches_itself_alone(names: list[str]) -> None:
    plain = [name for name in names if not set(name) & set(".*[]!?")]
    tree = {name: torch.ones(1) for name in plain}
    specs = {name: P(name) for name in plain}
    assert match_specs(tree, specs) == specs


def test_keys_that_have_dots_are_paths_too() -> None:
    """Keys may have dots, as in the state dicts of modules."""
    specs = match_specs({"layers.0.wq": torch.ones(1)}, {"layers.*.wq": P("tp")})
    assert specs == {"layers.0.wq": P("tp")}


def test_every_offender_is_named() -> None:
    patterns: Mapping[str, P] = {
        "layers.*.wq": P(None, "tp"),
        "**.wq": P("tp"),
        "layers.*.wk": P("tp"),
        "**.scale": P(None, "tp"),
    }
    with told(SpecError):
        match_specs(TREE, patterns)


def test_no_leaf_is_near_to_a_pattern_for_an_empty_tree() -> None:
    with pytest.raises(SpecError) as caught:
        match_specs({}, {"a": P()})
    text = "match_specs: patterns and leaves do not match:\n  pattern 'a': matches no leaf"
    assert str(caught.value) == text


def test_a_pattern_is_a_string() -> None:
    with pytest.raises(SpecError) as caught:
        match_specs({"a": torch.ones(1)}, {0: P()})  # type: ignore[dict-item]
    assert str(caught.value) == "match_specs: a pattern is a string, not 0."
