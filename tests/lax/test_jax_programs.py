"""Programs written for JAX run as they are, and give JAX's values and gradients."""

import json
import math
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmap_torch import (
    OneDeviceWarning,
    P,
    ShardTypeError,
    checkpoint,
    lax,
    make_mesh,
    shard_map,
    value_and_grad,
)
from shardmap_torch.core.tree import flatten
from tests.lax.support.jax_programs import PROGRAMS, STEPS
from tests.support.fuzzing import FUZZ, sampled
from tests.support.pool import Gloo

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own
GOLDEN: Final[dict[str, dict[str, Any]]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "jax_programs.json").read_text()
)
ON_ONE_DEVICE: Final = """blocked_matmul scattered_matmul gathered_matmul batch_parallel_loss
    fully_sharded_loss fully_sharded_loss_with_checkpoint tensor_parallel_with_scattered_features
    fully_sharded_and_tensor_parallel gradient_of_a_cast_parameter_in_the_body
    gradient_of_each_rank_that_is_summed_in_the_body
    gradient_of_each_rank_that_is_averaged_in_the_body
    gradient_through_gathered_parameters_in_the_body closed_over_parameters
    closed_over_parameters_in_a_nested_function layers_by_scan softmax_over_a_sharded_dim
    layer_norm_over_a_sharded_dim sharded_transpose sum_over_two_axes sums_over_each_of_two_axes
    trees_of_specs mapped_under_vmap per_example_gradients_inside gradient_of_a_gradient
    a_gathered_invariant_that_meets_what_varies normalized_layers_in_a_scan
    a_loop_while_a_counter_is_small rows_by_map
    collective_matmul ring_reduce_scatter halo_exchange running_sums_over_shards
    a_recurrence_over_shards tensor_parallel_layers power_iteration""".split()
"""Programs that mean the same on one device; global strictness refuses the others."""

NOT_IN_THREADS: Final = ["mapped_under_vmap", "tangents_through_a_map", "gradient_of_a_gradient"]
"""Programs whose transforms need a batched body."""

QUICK: Final = [
    "softmax_over_a_sharded_dim",
    "loss_with_layers_that_normalize",
    "a_sum_over_two_axes_that_meets_what_varies",
    "closed_over_parameters",
    "a_branch_for_each_rank",
]


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sine(shape: Sequence[int], start: int) -> Tensor:
    return torch.sin(start + torch.arange(math.prod(shape), dtype=torch.float64)).reshape(
        tuple(shape)
    )


def namespace(check: Any, simulate: Any) -> SimpleNamespace:
    """The names of `jax_programs`; without `simulate` on processes."""
    kind: Any = {} if simulate is None else {"kind": "simulated", "simulate": simulate}
    return SimpleNamespace(
        shard_map=partial(shard_map, check=check),
        P=P,
        lax=lax,
        grad=torch.func.grad,
        value_and_grad=value_and_grad,
        vmap=torch.func.vmap,
        jvp=torch.func.jvp,
        checkpoint=lambda f: partial(checkpoint, f),
        xp=torch,
        max=torch.amax,
        mesh=lambda shape, names: make_mesh(shape, names, **kind),
    )


def check_program(name: str, check: Any, simulate: Any) -> None:
    case = GOLDEN[name]
    f, shapes = PROGRAMS[name](namespace(check, simulate))
    args = [sine(shape, 1 + k).requires_grad_(name not in STEPS) for k, shape in enumerate(shapes)]
    found = [y.full_tensor() if isinstance(y, DTensor) else y for y in flatten(f(*args))[0]]
    close(found, case["y"])
    if name not in STEPS:
        loss: Any = sum((y * sine(y.shape, 2)).sum() for y in found)
        close(torch.autograd.grad(loss, args, materialize_grads=True), case["gradients"])


def close(found: Sequence[Tensor], wanted: Sequence[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.detach(), tensor(other), rtol=1e-10, atol=1e-10)


def test_the_golden_values_are_of_these_programs() -> None:
    assert GOLDEN.keys() == PROGRAMS.keys()
    assert {*ON_ONE_DEVICE, *NOT_IN_THREADS, *QUICK} <= PROGRAMS.keys()


@pytest.mark.sample(18)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_jax_has_its_value_and_gradients(name: str) -> None:
    check_program(name, True, "vmap")


@pytest.mark.parametrize(
    "name", sampled([name for name in PROGRAMS if name not in NOT_IN_THREADS], *QUICK)
)
def test_a_program_of_jax_has_its_value_and_gradients_on_ranks(name: str) -> None:
    check_program(name, True, "ranks")


@pytest.mark.parametrize("name", sampled(PROGRAMS, *QUICK))
def test_the_default_tells_of_no_program_that_means_the_same_on_one_device(name: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", OneDeviceWarning)
        check_program(name, None, "vmap")
    about = [each for each in told if each.category is OneDeviceWarning]
    assert name not in ON_ONE_DEVICE or about == []


@pytest.mark.parametrize("name", sampled(PROGRAMS, *QUICK))
def test_a_program_that_means_the_same_on_one_device_is_accepted_globally(name: str) -> None:
    if name in ON_ONE_DEVICE:
        check_program(name, "global", "vmap")
        return
    with pytest.raises(ShardTypeError, match="check='global'"):
        check_program(name, "global", "vmap")


def on_process() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")
        for name in PROGRAMS if FUZZ else QUICK:
            check_program(name, True, None)


def test_programs_of_jax_have_their_values_and_gradients_on_processes(gloo: Gloo) -> None:
    gloo(4).run(on_process, timeout=240)
