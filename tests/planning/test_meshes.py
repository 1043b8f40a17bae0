"""The meshes of a number of ranks are ranked by time; those that cannot be are listed with why."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, Mesh, P, ShapeDtype, SpecError, all_reduce, shard_map
from shardmap_torch.planning import H100, Hardware, best_mesh, estimate

TINY = Hardware("tiny", {torch.float32: 1e12}, 1000, 1e12)


def build(mesh: Mesh) -> tuple[Any, tuple[ShapeDtype, ...]]:
    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return all_reduce((x @ up).relu() @ down, "tp", dst=I)

    specs = P("dp"), P(None, "tp"), P("tp")
    step = shard_map(mlp, mesh=mesh, in_specs=specs, out_specs=P("dp"))
    width = 4096
    shapes = (1024, width), (width, 4 * width), (4 * width, width)
    return step, tuple(ShapeDtype(shape, torch.bfloat16) for shape in shapes)


def test_every_factorization_is_tried_and_the_fastest_comes_first() -> None:
    ranking = best_mesh(build, 8, axes=("dp", "tp"), hardware=H100)
    sizes = {candidate.mesh.axis_sizes for candidate in ranking.candidates}
    assert sizes == {(1, 8), (2, 4), (4, 2), (8, 1)}
    times = [candidate.seconds for candidate in ranking.candidates]
    assert times == sorted(times)
    assert ranking.best is ranking.candidates[0]
    alone = next(c for c in ranking.candidates if c.mesh.axis_sizes == (8, 1)).estimate
    assert alone is not None
    assert alone.sent == {}  # where the batch alone is sharded


def test_figures_are_those_of_each_step_alone_on_one_process_and_on_two() -> None:
    alone = best_mesh(build, 8, axes=("dp", "tp"), hardware=H100)
    for candidate in alone.candidates:
        step, args = build(candidate.mesh)
        assert candidate.figures == estimate(step, *args, hardware=H100).to_json()
    together = best_mesh(build, 8, axes=("dp", "tp"), hardware=H100, processes=2)
    assert together.to_json() == alone.to_json()


def sends_more_on_many(mesh: Mesh) -> tuple[Any, tuple[ShapeDtype, ...]]:
    def body(x: Tensor) -> Tensor:
        total = all_reduce(x.sum(), ("dp", "tp"), dst=I)
        return total + all_reduce(x.sum(), ("dp", "tp"), dst=I) if mesh.shape["dp"] > 2 else total

    step = shard_map(body, mesh=mesh, in_specs=P(("dp", "tp")), out_specs=P())
    return step, (ShapeDtype((1024,)),)


def test_a_step_that_sends_something_else_is_checked_and_estimated_by_itself() -> None:
    ranking = best_mesh(sends_more_on_many, 8, axes=("dp", "tp"), hardware=H100)
    assert len(ranking.candidates) == 4
    for candidate in ranking.candidates:
        step, args = sends_more_on_many(candidate.mesh)
        assert candidate.figures == estimate(step, *args, hardware=H100).to_json()


@pytest.mark.parametrize("sends", ["more", "over fewer axes"])
def test_a_step_that_sends_something_else_and_is_wrong_has_no_estimate(sends: str) -> None:
    def wrong(mesh: Mesh) -> tuple[Any, tuple[ShapeDtype, ...]]:
        def body(x: Tensor) -> Tensor:
            is_wrong = mesh.shape["dp"] > 2  # of the meshes that come later
            axes = "tp" if is_wrong and sends != "more" else ("dp", "tp")
            total = all_reduce(x.sum(), axes, dst=I)
            for _ in range(99 * is_wrong):  # the best one is checked in any case
                total = total.neg()
            return all_reduce(total, axes, dst=I) if is_wrong and sends == "more" else total

        step = shard_map(body, mesh=mesh, in_specs=P(("dp", "tp")), out_specs=P())
        return step, (ShapeDtype((1024,)),)

    ranking = best_mesh(wrong, 8, axes=("dp", "tp"), hardware=H100)
    found = {each.mesh.axis_sizes: each.figures is not None for each in ranking.candidates}
    assert found == {(1, 8): True, (2, 4): True, (4, 2): False, (8, 1): False}


BODIES: dict[str, Any] = {
    "another operator": lambda x, total, odd: total + x[0] if odd else total.exp().exp(),
    "another operand": lambda x, total, odd: total + (x[:1].sum() if odd else total),
    "another result": lambda x, total, odd: (total, x.sum())[odd],
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_step_that_is_wrong_on_some_meshes_has_no_estimate_there(body: Any) -> None:
    def build(mesh: Mesh) -> tuple[Any, tuple[ShapeDtype, ...]]:
        def run(x: Tensor) -> Tensor:
            total: Tensor = all_reduce(x.sum(), ("dp", "tp"), dst=I)
            result: Tensor = body(x, total, mesh.shape["dp"] == 4)
            return result

        step = shard_map(run, mesh=mesh, in_specs=P(("dp", "tp")), out_specs=P())
        return step, (ShapeDtype((1024,)),)

    ranking = best_mesh(build, 16, axes=("dp", "tp"), hardware=H100)
    wrong = {each.mesh.axis_sizes: each.why for each in ranking.candidates if each.why}
    assert wrong == {(4, 4): "run: the result does not match out_specs:"}


def test_what_does_not_divide_is_listed_with_its_reason() -> None:
    ranking = best_mesh(build, 3, axes=("dp", "tp"), hardware=H100)
    assert [candidate.why for candidate in ranking.candidates] == [
        f"mlp: the arguments do not match in_specs on the abstract mesh (dp={dp}, tp={tp}):"
        for dp, tp in ((1, 3), (3, 1))
    ]
    with pytest.raises(SpecError) as error:
        ranking.best  # noqa: B018
    assert str(error.value) == f"best_mesh: no mesh has a step that fits.\n{ranking}"


def test_what_does_not_fit_comes_after_what_does() -> None:
    ranking = best_mesh(build, 2, axes=("dp", "tp"), hardware=TINY)
    assert [c.figures is not None and c.figures["fits"] for c in ranking.candidates] == [False] * 2
    assert "(does not fit)" in str(ranking)


def test_a_number_of_ranks_is_positive() -> None:
    with pytest.raises(SpecError) as error:
        best_mesh(build, 0, axes=("dp",), hardware=H100)
    assert str(error.value) == "best_mesh takes a number of ranks and axes, not 0."
    with pytest.raises(SpecError) as error:
        best_mesh(build, 2, axes=("dp",), hardware=H100, processes=0)
    assert str(error.value) == "best_mesh takes a positive number of processes, not 0."
