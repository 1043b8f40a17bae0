"""Three steps of AdamW, and the states of a parallelized module, against one device."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardmap_torch import (
    CollectiveMismatchError,
    Mesh,
    RowwiseParallel,
    SpecError,
    make_mesh,
    parallel,
    parallelize,
)
from tests.parallel import models
from tests.parallel.support.plans import mlp_plan
from tests.parallel.support.training import CASES, both, train
from tests.programs.support.harness import global_value, random, worker_mesh
from tests.support.pool import Gloo


@pytest.mark.parametrize("case", CASES)
def test_three_steps_on_a_simulated_mesh_are_those_of_one_device(case: str) -> None:
    both(case, make_mesh((2,), ("tp",), kind="simulated"))


def on_processes(case: str) -> None:
    both(case, worker_mesh((2,), ("tp",)))


@pytest.mark.parametrize("case", CASES)
def test_three_steps_on_processes_are_those_of_one_device(case: str, gloo: Gloo) -> None:
    gloo(2).run(on_processes, case, timeout=120)


VIEWS = {"edp": 2, "tp": 2}
"""The ranks of "dp", seen in another way."""


@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_the_axis_of_a_plan_may_be_that_of_a_view_or_made_of_several(axis: str) -> None:
    mesh = make_mesh((4,), ("dp",), kind="simulated", views=[VIEWS])
    both("Llama, sequence parallel", mesh, axis)


def over_axes_of_views() -> None:
    mesh = make_mesh((4,), ("dp",), views=[VIEWS])
    for axis in ("tp", "dp"):
        both("MLP", mesh, axis)


def test_on_processes_the_axis_of_a_plan_may_be_that_of_a_view(gloo: Gloo) -> None:
    gloo(4).run(over_axes_of_views, timeout=100)


def places() -> dict[str, tuple[Any, ...]]:
    """Returns how the parameters of an MLP lie, after other ranks started from other values."""
    mesh = worker_mesh((2,), ("tp",))
    torch.manual_seed(dist.get_rank())
    module = models.mlp()
    module.get_parameter("2.bias").requires_grad_(False)
    module.register_buffer("steps", torch.tensor(dist.get_rank() + 5.0))
    parallelize(module, mesh, mlp_plan(parallel))
    assert module.get_buffer("steps").item() == 5.0
    assert not module.get_parameter("2.bias").requires_grad
    values = {name: global_value(value) for name, value in module.named_parameters()}
    expected = models_from_seed(0)
    for name, value in values.items():
        torch.testing.assert_close(value, expected.get_parameter(name), rtol=0, atol=0)
    parameters = module.named_parameters()
    assert all(isinstance(x, nn.Parameter) and isinstance(x, DTensor) for _, x in parameters)
    return {n: x.placements for n, x in module.named_parameters() if isinstance(x, DTensor)}


def models_from_seed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return models.mlp()


def test_parameters_are_those_of_the_first_rank_placed_as_the_plan_says(gloo: Gloo) -> None:
    for found in gloo(2).run(places):
        assert found == {
            "0.weight": (Shard(0),),
            "0.bias": (Shard(0),),
            "2.weight": (Shard(1),),
            "2.bias": (Replicate(),),
        }


def averaged(module: Any) -> list[Tensor]:
    """Outputs of an average of steps, of its parts, of copies of these, and of what was trained."""
    average: Any = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer, x = torch.optim.SGD(module.parameters(), lr=0.1), random((3, 8), 0)
    for _ in range(2):
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
        average.update_parameters(module)
    own, other = average.module, copy.deepcopy(average.module)
    found = [average(x), module(x), own[0](x), copy.deepcopy(own[0])(x)]
    other[2].bias = None  # which its plan has to be made anew for
    for module in (own, other):
        module(x).square().sum().backward()
        found += [module(x), module[0].weight.grad, module[2].weight.grad]
    return [global_value(each) for each in found]


def compare_averages(mesh: Mesh) -> None:
    own = models_from_seed(1)
    ours = parallelize(copy.deepcopy(own), mesh, mlp_plan(parallel))
    first = copy.deepcopy(ours)
    found, expected = averaged(ours), averaged(own)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(averaged(first), expected)  # it has not been trained since


def averages_on_processes() -> None:
    compare_averages(worker_mesh((2,), ("tp",)))


def test_copies_and_averages_of_a_module_are_those_of_one_device(gloo: Gloo) -> None:
    compare_averages(make_mesh((2,), ("tp",), kind="simulated"))
    gloo(2).run(averages_on_processes)


def save_and_load(folder: str) -> None:
    """Saves by torch.distributed.checkpoint from one plan into another, and by torch.save."""
    mesh, x = worker_mesh((2,), ("tp",)), random((3, 8), 0)
    first = parallelize(models_from_seed(1), mesh, mlp_plan(parallel))
    other = {"0": RowwiseParallel(input_layouts=Replicate())}
    second = parallelize(models_from_seed(2), mesh, other)
    train("MLP", first)
    save({"model": first.state_dict()}, checkpoint_id=folder)
    state = {"model": second.state_dict()}
    load(state, checkpoint_id=folder)
    second.load_state_dict(state["model"])
    torch.testing.assert_close(second(x), first(x))
    stream = io.BytesIO()
    torch.save({name: global_value(value) for name, value in first.state_dict().items()}, stream)
    plain = models_from_seed(3)
    plain.load_state_dict(torch.load(io.BytesIO(stream.getvalue())))
    torch.testing.assert_close(plain(x), first(x))


SAME = """\
Sequential: load_state_dict got the same shards on all ranks, as 0.weight, float64[8, 8] on each: \
they are those of one rank, whose state_dict() has no others.
Fix: save by shardmap_torch.saving or torch.distributed.checkpoint; or let all ranks call \
get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)), one save what it \
returns, and all load it by set_model_state_dict with these options. With the states of an \
optimizer, which have the same shards: get_state_dict(module, optimizer, options=...) and \
set_state_dict."""


def load_of_one_rank(folder: str) -> None:
    mesh, x, files = worker_mesh((2,), ("tp",)), random((3, 8), 0), [f"{folder}/0", f"{folder}/1"]
    module = parallelize(models_from_seed(1), mesh, mlp_plan(parallel))
    expected, whole = module(x), StateDictOptions(full_state_dict=True)
    torch.save(module.state_dict(), files[mesh.rank])
    model_state = get_model_state_dict(module, options=whole)
    plain = {key: x.full_tensor() for key, x in module.state_dict().items()}
    for other in (
        copy.deepcopy(module),
        parallelize(models_from_seed(2), mesh, mlp_plan(parallel)),
    ):
        for value in other.parameters():
            nn.init.constant_(value, mesh.rank)
        other.load_state_dict(other.state_dict())  # of one number, as biases at first
        for holder in (other, AveragedModel(other)):
            prefix = "" if holder is other else "module."
            state = torch.load(files[0], weights_only=False)
            with pytest.raises(SpecError) as caught:
                holder.load_state_dict({prefix + key: x for key, x in state.items()}, strict=False)
            assert f"{caught.value}" == SAME
        other.load_state_dict(torch.load(files[mesh.rank], weights_only=False))
        assert torch.equal(other(x), expected)
        nn.init.zeros_(other.get_parameter("0.weight"))
        set_model_state_dict(other, model_state, options=whole)
        assert torch.equal(other(x), expected)
        nn.init.zeros_(other.get_parameter("0.weight"))
        other.load_state_dict(plain)  # as of one device
        assert torch.equal(other(x), expected)
    with pytest.raises(CollectiveMismatchError) as unequal:
        module.load_state_dict({key: x + mesh.rank for key, x in plain.items()})
    told = "Sequential.load_state_dict: processes pass other data. The first difference:\n"
    assert f"{unequal.value}".startswith(f"{told}  rank 0: 0.weight: float64["), unequal.value


def test_shards_of_one_rank_are_not_loaded_by_all(gloo: Gloo, tmp_path: Path) -> None:
    gloo(2).run(load_of_one_rank, str(tmp_path))


def test_a_state_is_saved_and_loaded_into_another_plan(gloo: Gloo, tmp_path: Path) -> None:
    gloo(2).run(save_and_load, str(tmp_path), timeout=60)
