"""Junk arguments raise errors of this package, and leave nothing behind."""

import os

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardmap_torch import (
    CollectiveError,
    I,
    P,
    ShardMapError,
    SpecError,
    all_gather,
    all_reduce,
    current_mesh,
    full,
    make_mesh,
    shard_map,
)
from shardmap_torch.collectives.scope import current_scope
from tests.support.bad_input import internal_errors
from tests.support.fuzzing import sized

NUM_SEEDS = sized(150, 5_000)
FIRST = int(os.environ.get("SHARDMAP_FUZZ_SEED", "0"))


def test_junk_is_refused_by_name_and_leaves_nothing_behind() -> None:
    found = list(internal_errors(range(FIRST, FIRST + NUM_SEEDS)))
    assert not found, "\n".join(found)
    assert current_scope() is None
    assert current_mesh() is None
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert not _get_current_dispatch_mode_stack()
    assert not _get_current_function_mode_stack()


GRID = make_mesh((2, 2), ("a", "b"), kind="simulated", simulate="ranks")


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_tensor_that_cannot_be_sharded_is_refused_under_transforms_too() -> None:
    mapped = shard_map(double, mesh=GRID, in_specs=P(), out_specs=P())
    quantized = torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8)
    with pytest.raises(SpecError, match=r"x: is a quantized tensor; pass x\.dequantize\(\)"):
        torch.func.vmap(mapped)(quantized)
    with FakeTensorMode():
        fake = torch.ones(4)
    with pytest.raises(SpecError, match=r"x: is a fake tensor whose FakeTensorMode has ended"):
        mapped(fake)


def test_a_tree_too_deep_to_place_and_a_nested_tensor_given_twice_are_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(SpecError, match=r"A list contains itself, or is nested too deep"):
        full(endless)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    mapped = shard_map(lambda *xs: xs, mesh=GRID, in_specs=None, out_specs=P())
    for _ in range(3):
        with pytest.raises(ShardMapError):
            mapped(nested, 3)


def test_half_precision_crosses_the_boundary_under_autocast_of_bfloat16() -> None:
    mapped = shard_map(double, mesh=GRID, in_specs=P("a"), out_specs=P("a"))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mapped(torch.ones(4, dtype=torch.float16)), torch.full((4,), 2.0).half())


def test_a_tensor_of_inference_mode_has_gradients_on_ranks() -> None:
    with torch.inference_mode():
        x = torch.ones(4)
    mapped = shard_map(double, mesh=GRID, in_specs=P("a", invariant="b"), out_specs=P("a"))
    assert torch.equal(torch.func.grad(lambda x: mapped(x).sum())(x), torch.full((4,), 2.0))


def test_tiled_is_true_or_false() -> None:
    mapped = shard_map(
        lambda x: all_gather(x, "a", dst=I, tiled=[1]),  # type: ignore[arg-type]
        mesh=GRID,
        in_specs=P("a"),
        out_specs=P(),
    )
    with pytest.raises(CollectiveError) as told:
        mapped(torch.ones(4))
    assert str(told.value) == "all_gather: tiled=[1] is neither True nor False."


@pytest.mark.parametrize("dtype", [torch.uint64, torch.float8_e5m2])
def test_a_dtype_that_torch_cannot_add_is_an_error_and_no_hang(dtype: torch.dtype) -> None:
    mapped = shard_map(
        lambda x: all_reduce(x, "a", dst=I), mesh=GRID, in_specs=P("a"), out_specs=P()
    )
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(CollectiveError) as told:
        mapped(torch.ones(4).to(dtype))
    assert str(told.value) == (
        f"all_reduce('a', Partial -> I): torch cannot reduce {name} on cpu; convert the operand."
    )
