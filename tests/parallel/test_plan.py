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
    assert refused(models.Llama(), plan) == (
        "parallelize: the plan does not match Llama:\n"
        "  'layers.*.attention.wz' matches no module; the modules in 'layers.*.attention' are "
        "'wq', 'wk', 'wv', 'wo'\n"
        "  'layer.0' matches no module; the modules in 'Llama' are 'tok_embeddings', 'layers', "
        "'norm', 'output'\n"
        "  '**.wz' matches no module; the modules in 'Llama' are 'tok_embeddings', 'layers', "
        "'norm', 'output'\n"
        "  'layers.0.norm.weight' matches no module; the modules in 'layers.0' are "
        "'attention_norm', 'attention', 'ffn_norm', 'feed_forward'"
    )


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
    assert refused(module, plan) == (
        "parallelize: the plan does not match Sequential:\n"
        "  '0': ColwiseParallel shards nn.Linear, Conv1D and nn.Embedding, and '0' is a Conv1d\n"
        "  '1': '1' is an Embedding with max_norm, which cannot be sharded\n"
        "  '2': '2' is a LayerNorm without an integer 'normalized_shape', 'heads'"
    )
    assert "the module is a Sequential" in refused(module, ColwiseParallel())


def test_a_module_that_two_names_match_is_an_error() -> None:
    plan = {"0": ColwiseParallel(), "[02]": ColwiseParallel()}
    assert refused(models.mlp(), plan) == (
        "parallelize: the plan does not match Sequential:\n  '0' is matched by '0' and by '[02]'"
    )


def test_parameters_that_do_not_divide_are_listed_with_the_arithmetic() -> None:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    mesh = make_mesh((2, 3), ("dp", "tp"), kind="simulated")
    assert refused(models.mlp(6, 10), plan, mesh=mesh, axis="tp") == (
        "parallelize: these parameters cannot be sharded on the simulated mesh (dp=2, tp=3):\n"
        "  0.weight: dim 0 has size 10, which does not divide over 'tp' = 3 ranks (10 = 3*3 + 1)\n"
        "  0.bias: dim 0 has size 10, which does not divide over 'tp' = 3 ranks (10 = 3*3 + 1)\n"
        "  2.weight: dim 1 has size 10, which does not divide over 'tp' = 3 ranks (10 = 3*3 + 1)\n"
        "Fix: leave '0', '2' out of the plan, with what takes their results or gives them their "
        "inputs as shards: each rank then has all of it."
    )


def test_a_shared_parameter_that_two_modules_shard_differently_is_an_error() -> None:
    module = nn.Module()
    module.embedding, module.output = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    module.output.weight = module.embedding.weight
    plan = {"embedding": ColwiseParallel(), "output": ColwiseParallel()}
    assert refused(module, plan) == (
        "parallelize: modules that share a parameter must shard it alike:\n"
        "  embedding.weight: is shared; 'output' needs it by P('tp'), and 'embedding' by "
        "P(None, 'tp')\n"
        "Fix: {'embedding': 'embedding_rowwise'} in the plan, which shards it alike."
    )
    assert refused(module, {"output": "colwise_gather_output"}) == (
        "parallelize: modules that share a parameter must shard it alike:\n"
        "  embedding.weight: is shared; 'embedding' needs it by P(), and 'output' by P('tp')\n"
        "Fix: {'embedding': 'embedding_rowwise'} in the plan, which shards it alike."
    )
    parallelize(module, MESH, {**plan, "embedding": "embedding_rowwise"})


def test_what_is_no_plan_no_module_no_axis_or_parallel_already_is_an_error() -> None:
    module = models.mlp()
    assert refused(module, [ColwiseParallel()]) == (
        "parallelize takes a plan: a style, or a dict from module names to styles, not a list."
    )
    assert refused(module, {"0": ColwiseParallel(), 1: "tp"}) == (
        "parallelize: a plan has styles by module name, which are ColwiseParallel, "
        "RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput, "
        "PrepareModuleInputOutput, PackedColwiseParallel, ReplicatedParallel, ExpertsParallel, "
        "ExpertsDispatch, LocalAttributes, or words of transformers, which are 'colwise', "
        "'colwise_gather_output', "
        "'colwise_rep', 'rowwise', 'rowwise_split_input', 'rowwise_rep', 'embedding_rowwise', "
        "'embedding_colwise', 'packed_colwise', 'packed_rowwise', 'moe_tp_experts', "
        "'ep_dispatch_experts', 'grouped_gemm', 'moe_identity_expert', 'all_reduce', "
        "'sequence_parallel', 'replicated_with_grad_allreduce', 'mla_kv_a_proj', 'local_params', "
        "'replicate':\n"
        "  1: 'tp'"
    )
    assert refused(models.mlp, {}) == (  # type: ignore[arg-type]
        "parallelize takes a torch.nn.Module, not a function."
    )
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
    assert refused(module, {}, mesh=mesh) == ("parallelize: axis is one of 'dp', 'tp', not None.")
    assert refused(module, {}, check=True) == (
        "parallelize: check is 'local' or 'global', not True."
    )
    parallelize(module, MESH, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert refused(nn.Sequential(module), {}) == (
        "parallelize: '0' is parallelized already. Give one plan for the outermost module, with "
        "names such as 'layers.*.w1'."
    )


LAYOUTS = "a layout is Shard(dim), Replicate() or Partial(), not"

WRONG: list[tuple[ParallelStyle, str]] = [
    (ColwiseParallel(input_layouts="tp"), f"{LAYOUTS} 'tp'"),  # type: ignore[arg-type]
    (RowwiseParallel(output_layouts=Partial("max")), f"{LAYOUTS} Partial(max)"),
    (
        PrepareModuleInput(input_layouts=(None, 3), desired_input_layouts=(None, Shard(0))),  # type: ignore[arg-type]
        f"{LAYOUTS} 3",
    ),
    (
        PrepareModuleInput(input_layouts=(None,), desired_input_layouts=(Shard(0),)),
        "Shard(dim=0) is desired, and nothing says from what; give both layouts, or None",
    ),
    (
        PrepareModuleInput(
            input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"y": Shard(0)}
        ),
        "input_kwarg_layouts and desired_input_kwarg_layouts must both name 'x'",
    ),
]


@pytest.mark.parametrize(("style", "text"), WRONG, ids=lambda x: type(x).__name__)
def test_arguments_that_cannot_be_meant_are_refused(style: ParallelStyle, text: str) -> None:
    message = refused(models.mlp(), {"0": style})
    assert message.splitlines()[:2] == [
        "parallelize: the plan does not match Sequential:",
        f"  '0': {text}",
    ]


def test_the_styles_are_those_of_torch() -> None:
    names = [name for name in parallel.__all__ if name.startswith(("Prepare", "Parallel"))]
    for name in (*names, "ColwiseParallel", "RowwiseParallel", "SequenceParallel"):
        assert getattr(parallel, name) is getattr(torch_parallel, name)
