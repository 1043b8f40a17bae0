"""Spreading prefix trees of specs over values."""

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils._pytree import GetAttrKey

from shardmap_torch import P
from shardmap_torch.boundary.matching import is_spec
from shardmap_torch.core.tree import (
    Mismatch,
    broadcast_prefix,
    flatten,
    flatten_like,
    map_leaves,
    unflatten,
)

Point = namedtuple("Point", ["x", "y"])


def found(prefix: Any, tree: Any) -> list[Any]:
    return list(broadcast_prefix(prefix, tree, "t", is_spec))


def test_a_spec_covers_all_leaves_below_it() -> None:
    leaves = found({"a": P("x"), "b": None}, {"b": 1, "a": [2, (3, None)]})
    assert [(leaf.path, leaf.value, leaf.spec) for leaf in leaves] == [
        ("t['a'][0]", 2, P("x")),
        ("t['a'][1][0]", 3, P("x")),
        ("t['b']", 1, None),
    ]


def test_leaves_come_in_the_order_of_flatten() -> None:
    tree = {"z": (1, {"k": 2}), "a": OrderedDict(q=3, b=4), "m": Point(5, [6])}
    leaves, structure = flatten(tree)
    assert [leaf.value for leaf in found(P(), tree)] == leaves
    assert unflatten(structure, leaves) == tree
    assert map_leaves(lambda leaf: -leaf, tree)["m"] == Point(-5, [-6])


def test_named_tuples_are_told_by_their_fields() -> None:
    assert [leaf.path for leaf in found(Point(P("x"), None), Point(1, 2))] == ["t.x", "t.y"]


@pytest.mark.parametrize(
    ("prefix", "tree", "texts"),
    [
        ((P(), P()), (1,), ["t: the specs have 2 items here, the value has 1: int"]),
        ([P()], (1,), ["t: the specs have a list here, the value is a tuple"]),
        ({"a": P()}, 3, ["t: the specs have a dict here, the value is a int"]),
        ({"a": P()}, {"b": 1}, ["t: no spec for ['b']; specs for absent ['a']"]),
        ({"a": P(), "b": P()}, {"b": 1}, ["t: specs for absent ['a']"]),
        ((P(), "tp"), (1, [2]), ["t[1]: 'tp' is no spec; use P(...), or None for a static value"]),
        (
            ({"a": P()}, (P(), P())),
            ({"a": 1, "c": 2}, (1,)),
            ["t[0]: no spec for ['c']", "t[1]: the specs have 2 items here, the value has 1: int"],
        ),
    ],
)
def test_every_place_where_the_trees_part_is_told(prefix: Any, tree: Any, texts: list[str]) -> None:
    problems = [str(leaf) for leaf in found(prefix, tree) if isinstance(leaf, Mismatch)]
    assert problems == texts


def test_a_tree_is_flattened_alike_whatever_structure_it_should_have() -> None:
    one, two = torch.ones(1), torch.ones(2)
    _, expected = flatten({"a": one, "b": [two]})
    trees: list[Any] = [
        *({"b": [one], "a": two}, {"a": one, "b": (two,)}, {"a": one}, {"a": [one], "b": [two]}),
        *({"a": None, "b": [two]}, {"a": one, "b": [3]}, one, None),
    ]
    for tree in trees:
        leaves, structure = flatten(tree)
        likewise, same = flatten_like(expected, tree)
        assert all(a is b for a, b in zip(likewise, leaves, strict=True))
        assert same == structure


class Pair:
    """A node that torch alone knows, with a context that has no hash."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


def test_a_node_that_torch_knows_is_one_here_with_the_names_that_it_gives() -> None:
    torch.utils._pytree.register_pytree_node(
        Pair,
        lambda pair: ([pair.first, pair.second], ["first", "second"]),
        lambda values, names: Pair(**dict(zip(names, values, strict=True))),
        serialized_type_name="shardmap_torch.tests.Pair",
        flatten_with_keys_fn=lambda pair: (
            [(GetAttrKey(name), getattr(pair, name)) for name in ("first", "second")],
            ["first", "second"],
        ),
    )
    leaves, structure = flatten([Pair(1, (2, 3))])
    assert leaves == [1, 2, 3]
    assert structure == flatten([Pair(4, (5, 6))])[1]
    assert hash(structure) == hash(flatten([Pair(4, (5, 6))])[1])
    [pair] = unflatten(structure, [4, 5, 6])
    assert (type(pair), pair.first, pair.second) == (Pair, 4, (5, 6))
    paths = [leaf.path for leaf in found([P("x")], [Pair(1, (2, 3))])]
    assert paths == ["t[0].first", "t[0].second[0]", "t[0].second[1]"]
