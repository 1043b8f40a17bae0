"""The meshes of a number of ranks are ranked by time; those that cannot be are listed with why."""

from itertools import product
from typing import Any

import pytest
import torch
from optree import tree_flatten
from torch import Tensor
from torch.nn.functional import dropout

from shardmap_torch import (
    I,
    Mesh,
    P,
    ShapeDtype,
    SpecError,
    all_reduce,
    assert_type,
    axis_index,
    nn,
    shard_map,
)
from shardmap_torch.checkpoint import checkpoint
from shardmap_torch.planning import H100, Hardware, best_mesh, estimate
from shardmap_torch.planning.meshes import Build
from tests.support.golden import hold_own, told

TINY = Hardware("tiny", {torch.float32: 1e12}, 1000, 1e12)


def build(mesh: Mesh) -> tuple[Any, tuple[ShapeDtype, ...]]:
    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return all_reduce((x @ up).relu() @ down, "tp", dst=I)

    specs = P("dp"), P(None, "tp"), P("tp")
    step = shard_map(mlp, mesh=mesh, in_specs=specs, out_specs=P("dp"))
    shapes = (1024, 4096), (4096, 16384), (16384, 4096)
    return step, tuple(ShapeDtype(shape, torch.bfloat16) for shape in shapes)


def test_every_factorization_is_tried_and_the_fastest_comes_first() -> None:
    ranking = best_mesh(build, 8, axes=("dp", "tp"), hardware=H100)
    assert {c.mesh.axis_sizes for c in ranking.candidates} == {(1, 8), (2, 4), (4, 2), (8, 1)}
    assert [*ranking.candidates] == sorted(ranking.candidates, key=lambda c: c.seconds)
    assert ranking.best is ranking.candidates[0]
    alone = next(c for c in ranking.candidates if c.mesh.axis_sizes == (8, 1)).estimate
    assert alone is not None
    assert alone.sent == {}  # where the batch alone is sharded


def sends_more_on_many(mesh: Mesh) -> tuple[Any, tuple[ShapeDtype, ...]]:
    def body(x: Tensor) -> Tensor:
        total = all_reduce(x.sum(), ("dp", "tp"), dst=I)
        return total + all_reduce(x.sum(), ("dp", "tp"), dst=I) if mesh.shape["dp"] > 2 else total

    step = shard_map(body, mesh=mesh, in_specs=P(("dp", "tp")), out_specs=P())
    return step, (ShapeDtype((1024,)),)


@pytest.mark.parametrize("build", [build, sends_more_on_many])
def test_figures_are_those_of_each_step_alone_on_one_process_and_on_two(build: Build) -> None:
    alone = best_mesh(build, 8, axes=("dp", "tp"), hardware=H100)
    assert len(alone.candidates) == 4
    for candidate in alone.candidates:
        step, args = build(candidate.mesh)
        assert candidate.figures == estimate(step, *args, hardware=H100).to_json()
    together = best_mesh(build, 8, axes=("dp", "tp"), hardware=H100, processes=2)
    assert together.to_json() == alone.to_json()


AXES = ("dp", "tp")


def fills(x: Tensor, total: Tensor, odd: bool) -> Tensor:
    """Writes to all of what differs by rank, or to half of it."""
    y = torch.ones(8 if odd else 4) * axis_index(AXES)
    y.narrow(0, 0, 4).copy_(total)
    return y


def rows(x: Tensor, total: Tensor, odd: bool) -> Tensor:
    """Takes a rank's own rows of a table, or others, which global strictness sees."""
    at = axis_index("dp") * (60 if odd else x.shape[0]) + torch.arange(x.shape[0])
    return all_reduce((x * torch.arange(1024.0)[at]).sum(), "dp", dst=I)


BODIES: dict[str, Any] = {
    "another message": lambda x, total, odd: all_reduce(total, AXES, dst=I) if odd else total,
    "fewer axes": lambda x, total, odd: all_reduce(x.sum(), "tp" if odd else AXES, dst=I),
    "another operator": lambda x, total, odd: total + x[0] if odd else total.exp().exp(),
    "another operand": lambda x, total, odd: total + (x[:1].sum() if odd else total),
    "another result": lambda x, total, odd: (total, x.sum())[odd],
    "a part of a buffer": fills,
    "another index": rows,
    "a draw": lambda x, total, odd: (
        total + (dropout(x) if odd else all_reduce(checkpoint(dropout, x), AXES, dst=I)).sum()
    ),
    "rows of equal ranks": lambda x, total, odd: (
        total + all_reduce(torch.ones(2 if odd else 1), AXES, dst=I).sum()
    ),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_step_that_is_wrong_on_some_meshes_has_no_estimate_there(body: Any) -> None:
    def build(mesh: Mesh) -> tuple[Any, tuple[ShapeDtype, ...]]:
        odd, axes = mesh.shape["dp"] == 4, "dp" if body is rows else AXES

        def run(x: Tensor) -> Any:
            return body(x, all_reduce(x.sum(), axes, dst=I), odd)

        check: Any = "global" if body is rows else "local"
        step = shard_map(run, mesh=mesh, in_specs=P(axes), out_specs=P(), check=check)
        return step, (ShapeDtype((1024,)),)

    ranking = best_mesh(build, 16, axes=AXES, hardware=H100)
    assert [each.mesh.axis_sizes for each in ranking.candidates if each.why] == [(4, 4)]


def deep(mesh: Mesh, layers: int, recompute: bool, wrong: int = 0) -> Any:
    """Makes a step of equal layers, of which each rank of "pp" has as many."""

    def layer(x: Tensor, w: tuple[Tensor, Tensor]) -> Tensor:
        return x + nn.row_linear(nn.column_linear(x, w[0], "tp").relu(), w[1], "tp")

    def loss(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        for w in zip(up, down, strict=True):
            x = checkpoint(layer, x, w) if recompute else layer(x, w)
        total = x.float().square().sum()
        return total if layers == wrong else all_reduce(total, "pp", dst=I)

    specs = P(replicate="pp"), P("pp", None, "tp"), P("pp", "tp")
    step = shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
    shapes = (2**14, 256), (layers, 256, 1024), (layers, 1024, 256)
    return step, tuple(ShapeDtype(shape, torch.bfloat16, requires_grad=True) for shape in shapes)


DEEP: Any = {"axes": ("pp", "tp"), "hardware": H100, "layers": 16}
CHOICES = {"recompute": (True, False)}


def test_figures_of_few_layers_are_carried_on_to_all_of_them() -> None:
    ranking = best_mesh(deep, 4, **DEEP, choices=CHOICES)
    found = {(c.mesh.axis_sizes, c.options["recompute"]): c for c in ranking.candidates}
    assert found.keys() == {*product([(1, 4), (2, 2), (4, 1)], (True, False))}
    assert [c.extended for c in ranking.candidates] == [False] + 5 * [True]
    for (_, recompute), candidate in found.items():
        step, args = deep(candidate.mesh, 16, recompute)
        alone: Any = estimate(step, *args, hardware=H100).to_json()
        carried: Any = candidate.figures
        assert tree_flatten(carried)[0] == pytest.approx(tree_flatten(alone)[0])
    again = best_mesh(deep, 4, **DEEP, choices=CHOICES, processes=2)
    assert again.to_json() == ranking.to_json()
    assert str(ranking).splitlines()[2].endswith("; recompute=False, layers=16")
    assert [line[14:].lstrip()[0] for line in str(ranking).splitlines()[3:]] == 5 * ["~"]


def test_the_best_step_is_checked_with_all_of_its_layers() -> None:
    ranking = best_mesh(deep, 4, **DEEP, choices={"recompute": (False,), "wrong": (16,)})
    assert [c.figures for c in ranking.candidates] == 3 * [None]
    (why,) = {c.why for c in ranking.candidates}
    hold_own(why)


def test_other_options_are_checked_by_themselves() -> None:
    def build(mesh: Mesh, expected: str) -> Any:
        def body(x: Tensor) -> Tensor:
            return assert_type(x * 2, {"dp": expected})

        step = shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
        return step, (ShapeDtype((8,)),)

    found = best_mesh(build, 2, axes=("dp",), hardware=H100, choices={"expected": ["V", "I"]})
    assert [each.why for each in found.candidates] == [
        "",
        "body: assert_type expects I over 'dp', but the value is V.",
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"choices": {"recompute": True}},
        {"choices": {"recompute": ()}},
        {"layers": 0},
        {"layers": 2, "choices": {"layers": [1]}},
    ],
)
def test_choices_are_lists_and_layers_a_number(given: Any) -> None:
    with told(SpecError):
        best_mesh(build, 2, axes=("dp", "tp"), hardware=H100, **given)


_UP = "up: dim 1 has size 16384, which does not divide over 'tp' = 3 ranks (16384 = 5461*3 + 1)"
_X = "x: dim 0 has size 1024, which does not divide over 'dp' = 3 ranks (1024 = 341*3 + 1)"


def test_what_does_not_divide_is_listed_with_its_reason() -> None:
    ranking = best_mesh(build, 3, axes=("dp", "tp"), hardware=H100)
    assert [candidate.why for candidate in ranking.candidates] == [
        f"mlp: the arguments do not match in_specs on the abstract mesh (dp={dp}, tp={tp}): {first}"
        for dp, tp, first in ((1, 3, _UP), (3, 1, _X))
    ]
    with pytest.raises(SpecError) as error:
        ranking.best  # noqa: B018
    assert str(error.value) == f"best_mesh: no mesh has a step that fits.\n{ranking}"


def test_what_does_not_fit_comes_after_what_does() -> None:
    ranking = best_mesh(build, 2, axes=("dp", "tp"), hardware=TINY)
    assert [c.figures is not None and c.figures["fits"] for c in ranking.candidates] == [False] * 2
    assert "(does not fit)" in str(ranking)


def test_a_number_of_ranks_is_positive() -> None:
    for wrong in (0, 10**18):
        with pytest.raises(SpecError) as error:
            best_mesh(build, wrong, axes=("dp",), hardware=H100)
        assert str(error.value) == f"best_mesh takes 1 to 1,048,576 ranks, not {wrong}."
    with pytest.raises(SpecError) as error:
        best_mesh(build, 2, axes=("dp",), hardware=H100, processes=0)
    assert str(error.value) == "best_mesh takes a positive number of processes, not 0."
