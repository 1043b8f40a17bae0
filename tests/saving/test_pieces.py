"""Checkpoints of what one trains: parameters with several parts, and the state of an optimizer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard as Strided

from shardmap_torch import RowwiseParallel, parallelize
from shardmap_torch.parallel import PackedColwiseParallel
from shardmap_torch.saving import load, save
from shardmap_torch.saving.pieces import own_ranges
from tests.programs.support.harness import global_value, random, worker_mesh
from tests.support.pool import Gloo

X = random((4, 4), 0)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 24), nn.Linear(8, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.inner(x).unflatten(-1, (3, -1)).unbind(-2)
        y: torch.Tensor = self.outer(a * b + c)
        return y


class Trained:
    """A module and an optimizer, on ranks of which each has rows of each of three parts."""

    def __init__(self, shape: tuple[int, ...], seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        plan = {"inner": PackedColwiseParallel(parts=3), "outer": RowwiseParallel()}
        mesh = worker_mesh(shape, ("dp", "tp")[-len(shape) :])
        self.x = X.chunk(2)[mesh.rank // 2] if options else X
        self.model = parallelize(Packed(), mesh, plan, axis="tp", **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> Any:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def set(self, state: Any) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def parameters(self) -> list[torch.Tensor]:
        return [global_value(x).clone() for x in self.model.parameters()]


def train_and_save(shape: tuple[int, ...], folder: Path) -> Any:
    """Saves in two ways after a step; returns the parameters after another."""
    trained = Trained(shape, 0)
    weight = trained.model.inner.weight
    assert isinstance(weight, DTensor)
    assert isinstance(weight.placements[0], Strided)
    trained.step()
    save(trained.state(), folder / "saving", 1)
    state_dict_saver.save(trained.state(), checkpoint_id=folder / "torch")
    trained.step()
    return trained.parameters()


def resume(shape: tuple[int, ...], options: Any, folder: Path) -> Any:
    """Loads both into others; returns the parameters of each after a step."""
    others = [Trained(shape, seed, **options) for seed in (1, 2)]
    others[0].set(load(others[0].state(), folder / "saving"))
    state = others[1].state()
    state_dict_loader.load(state, checkpoint_id=folder / "torch")
    others[1].set(state)
    for other in others:
        other.step()
    return [other.parameters() for other in others]


RESUMED: Any = {
    "the same mesh": ((2,), {}),
    "four ranks": ((4,), {}),
    "one rank": ((1,), {}),
    "shards of rows too": ((2, 2), {"fsdp": "dp"}),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_goes_on_from_parameters_with_parts_on_another_mesh(
    case: str, gloo: Gloo, tmp_path: Path
) -> None:
    shape, options = RESUMED[case]
    expected = gloo(2).run(train_and_save, (2,), tmp_path)[0]
    for found in gloo(torch.Size(shape).numel()).run(resume, shape, options, tmp_path):
        torch.testing.assert_close(found, [expected, expected], rtol=1e-12, atol=1e-12)


def broadcast() -> None:
    trained, whole = Trained((2,), 1), Packed()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(trained.model, whole.state_dict(), options=options)
    for name, value in trained.model.named_parameters():
        assert torch.equal(global_value(value), whole.get_parameter(name)), name


def test_a_whole_state_is_cut_into_the_pieces_of_each_rank(gloo: Gloo) -> None:
    gloo(2).run(broadcast)


PLACED: Any = [
    (Shard(0), Replicate()),
    (Shard(0), Shard(0)),
    (Strided(0, split_factor=3), Replicate()),
    (Strided(0, split_factor=2), Shard(0)),
    (Shard(0), Strided(0, split_factor=3)),
    (Strided(0, split_factor=3), Strided(0, split_factor=2)),
    (Shard(1), Strided(0, split_factor=3)),
]


def ranges_are_torchs() -> None:
    mesh = worker_mesh((2, 2), ("dp", "tp")).device_mesh
    for size in (24, 12, 16, 13, 7, 5, 3):
        x = torch.arange(size * 4).view(size, 4)
        for placements in PLACED:
            value: DTensor = distribute_tensor(x, mesh, placements, src_data_rank=None)
            rows, columns = ([i for each in dim for i in each] for dim in own_ranges(value))
            assert torch.equal(x[rows][:, columns], value.to_local()), (size, placements)


def test_the_pieces_of_a_rank_are_those_that_torch_gives_it(gloo: Gloo) -> None:
    gloo(4).run(ranges_are_torchs)
