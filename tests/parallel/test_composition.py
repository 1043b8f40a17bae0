"""Parallelized modules in torch's other tools: FSDP2, checkpoints, counters of collectives."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

from shardmap_torch import (
    ColwiseParallel,
    Mesh,
    RowwiseParallel,
    ShardMapError,
    ShardTypeError,
    SpecError,
    full,
    make_mesh,
    parallel,
    parallelize,
)
from shardmap_torch.control.messages import note_of_mixed
from tests.parallel import models
from tests.parallel.support.plans import R, llama_plan, mlp_plan, sequence_plan
from tests.programs.support.harness import global_value, random, worker_mesh
from tests.support.fuzzing import sampled, sized
from tests.support.golden import hold, told
from tests.support.pool import Gloo

Step = tuple[Tensor, Tensor, dict[str, Tensor]]
"""The loss of a step, the norm of its gradients, and these."""


def llama() -> Any:
    torch.manual_seed(0)
    return models.Llama(num_layers=2)


def whole(plan: Callable[[Any], Any]) -> Callable[[DeviceMesh, DeviceMesh], nn.Module]:
    """The order of torchtitan, with the model as one unit."""

    def make(dp: DeviceMesh, tp: DeviceMesh) -> nn.Module:
        model: nn.Module = parallelize(llama(), tp, plan(parallel))
        fully_shard(model, mesh=dp)
        return model

    return make


def by_layer(dp: DeviceMesh, tp: DeviceMesh) -> nn.Module:
    """Each layer is a program and a unit of its own, whose parameters are gathered when it runs."""
    model, prefix = llama(), "layers.*."
    plan = {k.removeprefix(prefix): v for k, v in llama_plan(parallel).items() if prefix in k}
    parallelize(model.tok_embeddings, tp, RowwiseParallel(input_layouts=R))
    parallelize(model.norm, tp, {})
    parallelize(model.output, tp, ColwiseParallel(output_layouts=R))
    for layer in model.layers.values():
        fully_shard(parallelize(layer, tp, plan), mesh=dp)
    fully_shard(model, mesh=dp)
    return model  # type: ignore[no-any-return]  # a Llama


UNITS = {
    "a whole model": whole(llama_plan),
    "its sequence sharded": whole(sequence_plan),
    "layer by layer": by_layer,
}


def grid(*sizes: int) -> DeviceMesh:
    names = ("dp", "tp") if len(sizes) == 2 else ("replicate", "shard", "tp")
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def train(module: nn.Module, part: slice, mean: Callable[[Tensor], Tensor]) -> list[Step]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    steps = []
    for step in range(sized(2, 3)):
        tokens = torch.randint(12, (4, 5), generator=torch.Generator().manual_seed(step))[part]
        optimizer.zero_grad()
        logits = module(tokens[:, :-1]).transpose(1, 2)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:])
        loss.backward()
        grads = {name: _grad(value) for name, value in module.named_parameters()}
        # On three axes torch takes seconds for a list of DTensors, of each shape anew.
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5, foreach=False)
        optimizer.step()
        steps.append((mean(loss.detach()), global_value(norm), grads))
    return steps


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return global_value(parameter.grad).clone()


def assert_trains_as_one_device(module: nn.Module, replicas: DeviceMesh) -> None:
    """Trains on this process' half of each batch; losses, norms and gradients are those of all."""
    at = replicas.get_local_rank()

    def mean(loss: Tensor) -> Tensor:
        dist.all_reduce(loss, group=replicas.get_group())
        return loss / replicas.size()

    found = train(module, slice(2 * at, 2 * at + 2), mean)
    expected = train(llama(), slice(None), lambda loss: loss)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def with_fsdp(case: str) -> None:
    mesh = grid(2, 2)
    assert_trains_as_one_device(UNITS[case](mesh["dp"], mesh["tp"]), mesh["dp"])


@pytest.mark.parametrize("case", sampled(UNITS, "layer by layer"))
def test_fsdp2_around_tensor_parallelism_trains_as_one_device(case: str, gloo: Gloo) -> None:
    gloo(4).run(with_fsdp, case, timeout=120)


def with_replicas(folder: str) -> None:
    """Trains on replicas of one shard, as DDP does; a checkpoint goes to tensor-parallel ranks."""
    mesh = grid(2, 1, 2)
    model = parallelize(llama(), mesh["tp"], llama_plan(parallel))
    fully_shard(model, mesh=mesh["replicate", "shard"])
    assert_trains_as_one_device(model, mesh["replicate"])
    save({"model": model.state_dict()}, checkpoint_id=folder)
    other = parallelize(llama(), grid(1, 4)["tp"], sequence_plan(parallel))
    state = {"model": other.state_dict()}
    load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    tokens = torch.randint(12, (4, 4), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(other(tokens), model(tokens))


def test_replicas_train_as_one_device_and_their_checkpoint_loads_into_another_plan(
    gloo: Gloo, tmp_path: Path
) -> None:
    gloo(4).run(with_replicas, str(tmp_path), timeout=120)


def units_within_a_program() -> str:
    mesh = grid(2, 2)
    model: Any = parallelize(llama(), mesh["tp"], llama_plan(parallel))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    with pytest.raises(ShardMapError) as found:
        model(torch.zeros(2, 4, dtype=torch.int64))
    return str(found.value)


def test_units_of_fsdp2_within_one_program_are_rejected(gloo: Gloo) -> None:
    for text in gloo(4).run(units_within_a_program):
        assert text == (
            "Llama: 'layers.0' is a unit of fully_shard within a parallelized module, which runs "
            "as one program on parameters that it gathers before.\n"
            "Fix: parallelize 'layers.0' by itself, and not Llama; or fully_shard only Llama."
        )


def between_modules() -> None:
    """A DTensor that one parallelized module returns goes through torch's code into another."""
    mesh = worker_mesh((2,), ("tp",))
    torch.manual_seed(0)
    up, down = nn.Linear(8, 16).double(), nn.Linear(16, 8).double()
    x = random((4, 8), 0)
    expected = down(nn.functional.gelu(up(x)))
    expected.square().mean().backward()
    grads = [_grad(value) for value in (*up.parameters(), *down.parameters())]
    for each in (up, down):
        each.zero_grad()
    parallelize(up, mesh, ColwiseParallel(use_local_output=False))
    parallelize(down, mesh, RowwiseParallel())
    hidden = up(x)
    assert isinstance(hidden, DTensor)
    assert hidden.placements == (Shard(1),)
    actual = down(nn.functional.gelu(hidden))
    actual.square().mean().backward()
    torch.testing.assert_close(actual, expected)
    found = [_grad(value) for value in (*up.parameters(), *down.parameters())]
    torch.testing.assert_close(found, grads)


def test_dtensors_go_from_module_to_module(gloo: Gloo) -> None:
    gloo(2).run(between_modules)


def gradients_are_summed_once() -> list[str]:
    module = parallelize(nn.Linear(2, 2).double(), worker_mesh((2,), ("dp",)), dp="dp")
    with pytest.raises(SpecError) as of_ddp:
        nn.parallel.DistributedDataParallel(module)
    module(torch.ones(1, 2).double()).sum().backward()
    assert isinstance(module.weight.grad, DTensor)
    with pytest.raises(NotImplementedError) as of_torch:  # which we explain as the process ends
        dist.all_reduce(module.weight.grad)
    torch.testing.assert_close(_grad(module.weight), torch.full((2, 2), 2.0).double())
    return [str(of_ddp.value), str(of_torch.value)]


def test_what_would_sum_gradients_once_more_is_refused(gloo: Gloo) -> None:
    for of_ddp, of_torch in gloo(2).run(gradients_are_summed_once):
        assert of_ddp == (
            "DistributedDataParallel: the module is parallelized already. parallelize(module, "
            "mesh, dp='dp') gives each rank its rows and sums gradients, as DDP does.\n"
            "Fix: leave DDP out, and name the axis of the rows in dp= or fsdp=."
        )
        assert "Operator c10d." in of_torch


def mixtures() -> list[str]:
    """Uses a module of one device beside a parallelized one; returns what is told at the end."""
    one, ones = nn.Linear(2, 2).double(), torch.ones(2, 2).double()
    before, mesh = copy.deepcopy(one), worker_mesh((2,), ("tp",))
    module = parallelize(one, mesh, {"": parallel.ColwiseParallel()})
    notes = []
    average = before.weight.data
    with pytest.raises(RuntimeError) as caught:
        average.lerp_(module.weight, 0.1)
    notes.append(note_of_mixed(caught.value))
    with pytest.raises(RuntimeError) as caught:
        before.load_state_dict(module.state_dict())
    notes.append(note_of_mixed(caught.value))
    before.load_state_dict(full(module.state_dict()))  # as it says
    after: Any = copy.deepcopy(module)
    with torch.no_grad():
        after.weight.lerp_(module.weight, 0.1)
        weight = after.weight
        weight += distribute_tensor(ones, weight.device_mesh, weight.placements)
    assert torch.allclose(full(after.weight), average + 1)
    return [*notes, note_of_mixed(RuntimeError("shapes"))]


def test_a_plain_tensor_beside_a_dtensor_is_told_what_to_do(gloo: Gloo) -> None:
    for averaged, loaded, other in gloo(2).run(mixtures):
        hold("processes.txt", "averages_a_copy_made_before", averaged)
        hold("processes.txt", "loads_shards_into_one_device", loaded)
        assert not other


def observed() -> tuple[dict[str, int], list[str]]:
    """Counts the collectives of a step by CommDebugMode, and reads their events of a profile."""
    mlp = parallelize(models.mlp(), worker_mesh((2,), ("tp",)), mlp_plan(parallel))
    x = random((4, 8), 0).requires_grad_()
    mlp(x).sum().backward()
    with CommDebugMode() as counter:
        mlp(x).sum().backward()
    counts = {str(name): count for name, count in counter.get_comm_counts().items()}
    with profile(activities=[ProfilerActivity.CPU]) as events:
        mlp(x).sum().backward()
    return counts, sorted(event.key for event in events.key_averages() if " -> " in event.key)


def test_collectives_are_counted_by_torch_and_named_in_a_profile(gloo: Gloo) -> None:
    for counts, events in gloo(2).run(observed):
        assert counts == {"c10d.allreduce_": 2}
        assert len(events) == 2
        for event in events:  # the call of the module, and that of its backward
            name, _, place = event.partition(" at ")
            assert name == "all_reduce('tp', Partial -> I)"
            assert place.startswith("test_composition.py:")


def test_a_counter_of_collectives_sees_none_on_simulated_ranks() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    mlp = parallelize(models.mlp(), mesh, mlp_plan(parallel))
    x = random((4, 8), 0).requires_grad_()
    with CommDebugMode() as counter:
        mlp(x).sum().backward()
    assert counter.get_total_counts() == 0


def logits_plan(**of_head: Any) -> dict[str, Any]:
    """The plan of torchtitan with loss_parallel: the last module leaves the logits sharded."""
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), **of_head)
    return {**sequence_plan(parallel), "output": head}


def sharded_logits_are_torchs() -> None:
    """A result as that of parallelize_module, whose loss has the gradients of one device."""
    mesh, own = worker_mesh((2,), ("tp",)), llama()
    ours = parallelize(llama(), mesh, logits_plan(use_local_output=False))
    found, expected = ours(TOKENS), own(TOKENS)
    assert isinstance(found, DTensor)
    assert found.placements == (Shard(2),)
    torch.testing.assert_close(global_value(found), expected.detach())
    for logits in (found, expected):
        logits.square().mean().backward()
    for name, value in own.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(_grad(ours.get_parameter(name)), value.grad, msg=name)


def test_a_plan_may_leave_logits_sharded(gloo: Gloo) -> None:
    gloo(2).run(sharded_logits_are_torchs)
    simulated = make_mesh((2,), ("tp",), kind="simulated")
    ours = parallelize(llama(), simulated, logits_plan(use_local_output=False))
    torch.testing.assert_close(ours(TOKENS), llama()(TOKENS))


@pytest.mark.parametrize("check", ["local", "global"])
def test_logits_that_are_left_sharded_by_mistake_are_told_by_the_entry_of_the_plan(
    check: Any,
) -> None:
    simulated = make_mesh((2,), ("tp",), kind="simulated")
    ours = parallelize(llama(), simulated, {"output": "colwise"}, check=check)
    with told(SpecError):
        ours(TOKENS)


class Wrapped(nn.Module):
    """A wrapper that others than its forward ask for what is in it, as peft's `generate`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.Llama()
        self.words = self.model.tok_embeddings  # one module, two names

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)
        return logits

    def parts(self, tokens: Tensor) -> dict[str, Tensor]:
        """Calls the model, and an embedding, a norm and a head alone."""
        rows = self.model.tok_embeddings(tokens)
        norm = self.model.norm(rows)
        found = {"model": self.model(tokens), "rows": rows, "norm": norm}
        return found | {"head": self.model.output(norm)}


TOKENS = torch.tensor([[0, 7, 11, 3], [5, 5, 6, 1]])


def parts_alike(mesh: Mesh, **options: Any) -> None:
    torch.manual_seed(0)
    own = Wrapped()
    plan = {f"model.{name}": style for name, style in llama_plan(parallel).items()}
    ours = parallelize(copy.deepcopy(own), mesh, plan, axis="tp", **options)
    found, expected = ours.parts(TOKENS), own.parts(TOKENS)
    for name, value in found.items():
        torch.testing.assert_close(global_value(value), expected[name].detach(), msg=name)
    for parts in (found, expected):
        torch.stack([each.square().mean() for each in parts.values()]).sum().backward()
    for name, value in own.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(_grad(ours.get_parameter(name)), value.grad, msg=name)


@pytest.mark.parametrize("options", [{}, {"dp": "dp"}, {"fsdp": "dp"}])
def test_modules_below_are_programs_where_they_are_called_from_outside(options: Any) -> None:
    parts_alike(make_mesh((2, 2), ("dp", "tp"), kind="simulated"), **options)


def parts_on_processes() -> None:
    parts_alike(worker_mesh((2,), ("tp",)))


def test_on_processes_too(gloo: Gloo) -> None:
    gloo(2).run(parts_on_processes)


def test_a_wrong_plan_is_refused_where_only_a_part_is_called() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    ours = parallelize(Wrapped(), mesh, {"model.output": "rowwise"})
    with told(ShardTypeError):
        ours.parts(TOKENS)
