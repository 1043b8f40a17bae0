"""Every name that docs/porting.md tells people to write exists; every style of torch is there."""

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel as torch_parallel

import shardmap_torch

PAGE = (Path(__file__).parent.parent / "docs" / "porting.md").read_text()
ROWS = [
    (line, [cell.strip() for cell in line.strip("|").split(" | ")])
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("|---")
]
CODE = re.compile(r"`([^`]+)`")
NAME = re.compile(r"[A-Za-z_][\w.]*")
NOT_OURS = {"report"}  # a method, told after the function that has it


def names_in(cell: str) -> set[str]:
    """The dotted names that code in the cell begins with, and the types that it passes."""
    found = set()
    for code in CODE.findall(cell):
        first = NAME.match(code)
        assert first is not None, code
        found.add(first[0])
        found.update(re.findall(r"(?:src|dst)=(\w+)", code))
    return found - NOT_OURS


NAMES = sorted({name for _, cells in ROWS if cells[-1] != "here" for name in names_in(cells[-1])})


def resolve(name: str) -> Any:
    value: Any = shardmap_torch
    for part in name.split("."):
        if isinstance(value, ModuleType) and not hasattr(value, part):
            importlib.import_module(f"{value.__name__}.{part}")
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", NAMES)
def test_a_name_to_write_exists_and_is_public(name: str) -> None:
    assert resolve(name) is not None
    module, _, last = name.rpartition(".")
    exported = resolve(module).__all__ if module else shardmap_torch.__all__
    assert last in exported


def test_the_page_has_names_of_every_module() -> None:
    assert len(NAMES) > 60
    assert {name.split(".")[0] for name in NAMES} >= {"nn", "optim", "lax", "random", "saving"}


@pytest.mark.parametrize("name", torch_parallel.__all__)
def test_every_entry_of_torchs_parallel_has_a_row(name: str) -> None:
    assert any(name in "".join(CODE.findall(cells[0])) for _, cells in ROWS)


PUBLIC = {
    "torch.distributed.tensor.parallel": torch_parallel.__all__,
    "DTensor, DDP, FSDP, ZeRO": [
        *(name for name in torch.distributed.tensor.__all__ if name != "Placement"),
        *torch.distributed.tensor.experimental.__all__,
    ],
    "PyTorch/XLA SPMD": """XLAShard XLAShardedTensor Mesh HybridMesh ShardingType ShardingSpec
        XLAPatchedLinear mark_sharding mark_sharding_with_gradients clear_sharding get_1d_mesh
        wrap_if_sharded xla_patched_nn_linear_forward set_global_mesh get_global_mesh
        enable_manual_sharding disable_manual_sharding apply_backward_optimization_barrier shard_as
        annotate_custom_sharding xla_distribute_tensor xla_distribute_module auto_policy
        """.split(),
    "Megatron-LM": """copy_to_tensor_model_parallel_region
        reduce_from_tensor_model_parallel_region scatter_to_tensor_model_parallel_region
        gather_from_tensor_model_parallel_region scatter_to_sequence_parallel_region
        gather_from_sequence_parallel_region reduce_scatter_to_sequence_parallel_region
        all_gather_last_dim_from_tensor_parallel_region all_to_all all_to_all_sp2hp all_to_all_hp2sp
        reduce_scatter_last_dim_to_tensor_parallel_region vocab_parallel_cross_entropy
        broadcast_data ColumnParallelLinear RowParallelLinear VocabParallelEmbedding
        set_tensor_model_parallel_attributes copy_tensor_model_parallel_attributes
        param_is_not_tensor_parallel_duplicate linear_with_grad_accumulation_and_async_allreduce
        checkpoint get_cuda_rng_tracker model_parallel_cuda_manual_seed split_tensor_along_last_dim
        split_tensor_into_1d_equal_chunks gather_split_1d_tensor""".split(),
    "spmd_types": """register_local_backward_hook all_reduce shard unshard redistribute reinterpret
        convert set_dist dtensor_placement_to_spmd_type spmd_redistribute invariant_to_replicate
        spmd_type_to_dtensor_placement set_current_mesh MeshAxis reinterpret_mesh Scalar
        current_mesh is_type_checking no_typecheck traceback_filtering get_axis_local_type
        get_local_type maybe_get_axis_local_type assert_local_type assert_type assert_type_like
        Infer local local_map mutate_type register_autograd_function trace DimSharding
        register_local_autograd_function PartitionSpec TensorSharding SpmdTypeError
        I Invariant LocalSpmdType P Partial PerMeshAxisLocalSpmdType PerMeshAxisSpmdType
        PerMeshAxisSpmdTypes R Replicate S Shard SpmdType TYPE_CHECKING V Varying all_gather
        all_to_all assert_local_type_like current_mesh_all_names current_mesh_names
        get_partition_spec has_local_type merge_types normalize_axis normalize_mesh
        normalize_partition_spec reduce_scatter register_decomposition register_no_typecheck
        reinterpret_no_grad rules rulecheck typecheck""".split(),
    "JAX": """shard_map psum pmean pmax pmin all_gather psum_scatter all_to_all ppermute pshuffle
        pswapaxes pcast pvary pbroadcast ragged_all_to_all axis_index axis_size make_mesh Mesh
        PartitionSpec with_sharding_constraint device_put reshard fori_loop scan cond typeof
        while_loop map switch associative_scan dynamic_slice dynamic_update_slice""".split(),
}
"""The public names of each library: of torch those of the installed release."""


@pytest.mark.parametrize("section", PUBLIC)
def test_every_public_name_of_a_library_has_a_row(section: str) -> None:
    _, _, rest = PAGE.partition(f"\n## {section}\n")
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    left = " ".join(code for line in lines for code in CODE.findall(line.split(" | ")[0]))
    assert set(PUBLIC[section]) - set(re.findall(r"\w+", left)) == set()


def test_a_wrong_name_would_be_seen() -> None:
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        resolve("nn.column_linaer")
