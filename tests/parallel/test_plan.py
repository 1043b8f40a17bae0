"""Plans that do not match a module, and styles with arguments that cannot be meant."""

from typing import Any

import pytest
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.distributed.tensor import Partial, Shard

from shardmap_torch import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    SpecError,
    make_mesh,
    parallel,
    parallelize,
)
from shardmap_torch.parallel import LocalAttributes, parallel_summary
from tests.parallel import models
from tests.support.golden import hold_own

MESH = make_mesh((2,), ("tp",), kind="simulated")


def refused(module: nn.Module, plan: Any, **arguments: Any) -> str:
    mesh = arguments.pop("mesh", MESH)
    with pytest.raises(SpecError) as caught:
        parallelize(module, mesh, plan, **arguments)
    return str(caught.value)


def test_names_that_match_nothing_are_listed_with_those_that_stand_there() -> None:
    plan = {
        "layers.*.attention.wz": ColwiseParallel(),
        "output": ColwiseParallel(),
        "layer.0": SequenceParallel(),
        "**.wz": ColwiseParallel(),
        "layers.0.norm.weight": SequenceParallel(),
    }
    hold_own(refused(models.Llama(), plan))


def test_two_stars_stand_for_any_number_of_parts() -> None:
    summaries = [
        parallel_summary(parallelize(models.Llama(), MESH, {key: ColwiseParallel()}))
        for key in ("layers.*.attention.wq", "layers.**.wq", "**.wq", "**.attention.**.wq")
    ]
    assert summaries == summaries[:1] * 4


def test_modules_that_a_style_cannot_shard_are_listed() -> None:
    module = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Embedding(4, 4, max_norm=1.0), nn.LayerNorm(4))
    plan = {
        "0": ColwiseParallel(),
        "1": RowwiseParallel(),
        "2": LocalAttributes("normalized_shape", "heads"),
    }
    hold_own(refused(module, plan))
    assert "the module is a Sequential" in refused(module, ColwiseParallel())


def test_a_module_that_two_names_match_is_an_error() -> None:
    plan = {"0": ColwiseParallel(), "[02]": ColwiseParallel()}
    hold_own(refused(models.mlp(), plan))


def test_parameters_that_do_not_divide_are_listed_with_the_arithmetic() -> None:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    mesh = make_mesh((2, 3), ("dp", "tp"), kind="simulated")
    hold_own(refused(models.mlp(6, 10), plan, mesh=mesh, axis="tp"))


def test_a_shared_parameter_that_two_modules_shard_differently_is_an_error() -> None:
    module = nn.Module()
    module.embedding, module.output = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    module.output.weight = module.embedding.weight
    plan = {"embedding": ColwiseParallel(), "output": ColwiseParallel()}
    hold_own(refused(module, plan))
    hold_own(refused(module, {"output": "colwise_gather_output"}), 2)
    parallelize(module, MESH, {**plan, "embedding": "embedding_rowwise"})


def test_what_is_no_plan_no_module_no_axis_or_parallel_already_is_an_error() -> None:
    module = models.mlp()
    hold_own(refused(module, [ColwiseParallel()]))
    hold_own(refused(module, {"0": ColwiseParallel(), 1: "tp"}), 2)
    assert refused(models.mlp, {}) == (  # type: ignore[arg-type]
        "parallelize takes a torch.nn.Module, not a function."
    )
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
    assert refused(module, {}, mesh=mesh) == ("parallelize: axis is one of 'dp', 'tp', not None.")
    hold_own(refused(module, {}, check=True), 3)
    parallelize(module, MESH, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    hold_own(refused(nn.Sequential(module), {}), 4)


WRONG: list[ParallelStyle] = [
    ColwiseParallel(input_layouts="tp"),  # type: ignore[arg-type]
    RowwiseParallel(output_layouts=Partial("max")),
    PrepareModuleInput(input_layouts=(None, 3), desired_input_layouts=(None, Shard(0))),  # type: ignore[arg-type]
    PrepareModuleInput(input_layouts=(None,), desired_input_layouts=(Shard(0),)),
    PrepareModuleInput(
        input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"y": Shard(0)}
    ),
]


@pytest.mark.parametrize("style", WRONG, ids=lambda x: type(x).__name__)
def test_arguments_that_cannot_be_meant_are_refused(style: ParallelStyle) -> None:
    hold_own(refused(models.mlp(), {"0": style}))


def test_the_styles_are_those_of_torch() -> None:
    names = [name for name in parallel.__all__ if name.startswith(("Prepare", "Parallel"))]
    for name in (*names, "ColwiseParallel", "RowwiseParallel", "SequenceParallel"):
        assert getattr(parallel, name) is getattr(torch_parallel, name)


def test_a_class_of_a_style_is_to_be_called() -> None:
    hold_own(refused(nn.Sequential(nn.Linear(2, 2)), {"0": ColwiseParallel}))
