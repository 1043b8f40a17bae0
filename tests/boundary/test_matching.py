"""Arguments of sizes not seen before are matched as those of a signature seen before, and refused.

`Match.resized` looks at sizes alone; whatever else `check_inputs` refuses is another kind.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardmap_torch import P, SpecError, make_mesh, shard_map
from shardmap_torch.boundary.matching import Match, kinds_of

MESH = make_mesh((2, 2), ("dp", "tp"), kind="simulated")


def mapped() -> Callable[[Any], Tensor]:
    @shard_map(mesh=MESH, in_specs=P("tp"), out_specs=P("tp"), check=False)
    def double(x: Tensor) -> Tensor:
        return x * 2

    return double


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(8, 1)


def nested() -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # of a prototype
        return torch.nested.nested_tensor([torch.ones(2)])


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(3, 1), lambda: torch.ones(8, 1).to_sparse(), fake, nested]
)
def test_an_argument_is_refused_as_if_none_had_come_before(make: Callable[[], Tensor]) -> None:
    f, fresh = mapped(), mapped()
    for length in (2, 4):
        assert torch.equal(f(torch.ones(length, 1)), torch.full((length, 1), 2.0))
    with pytest.raises(SpecError) as later:
        f(make())
    with pytest.raises(SpecError) as first:
        fresh(make())
    assert str(later.value) == str(first.value)


def test_a_size_is_matched_without_the_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    f = mapped()
    f(torch.ones(2))
    made: list[object] = []

    def of(placed: Any) -> Match:
        made.append(placed)
        raise AssertionError

    monkeypatch.setattr(Match, "of", of)
    assert torch.equal(f(torch.ones(6)), torch.full((6,), 2.0))
    assert not made


def test_a_match_of_other_sizes_is_another_object() -> None:
    match = Match(("x",), (P("tp"),), (0,))
    one = match.resized([torch.ones(4)], MESH)
    assert one is not None
    assert one is not match
    assert one.specs == match.specs
    assert match.resized([torch.ones(5)], MESH) is None


@pytest.mark.parametrize("wrap", [torch.func.vmap, torch.func.grad])
def test_under_a_transform_there_are_no_kinds(wrap: Callable[..., Any]) -> None:
    found: list[object] = []

    def note(x: Tensor) -> Tensor:
        found.append(kinds_of([x]))
        return x.sum()

    wrap(note)(torch.ones(2, 2) if wrap is torch.func.vmap else torch.ones(2))
    assert found == [None]


def test_kinds_tell_apart_what_is_refused_or_typed_otherwise() -> None:
    x = torch.ones(2)
    leaves = [x, x.double(), torch.ones(2, 2), x.clone().requires_grad_(), torch.nn.Parameter(x), 3]
    kinds = [kinds_of([leaf]) for leaf in leaves]
    assert len(set(kinds)) == len(leaves)
    assert kinds[0] == kinds_of([torch.ones(7)])
    assert kinds_of([fake()]) is None
    assert kinds_of([fake()], runs=False) is not None
    assert kinds_of([nested()]) is None
