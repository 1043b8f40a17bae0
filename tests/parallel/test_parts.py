"""Modules with sizes that depend on data run as they are, and each of their parts as a program."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmap_torch import Mesh, ShardTypeError, make_mesh, parallelize
from tests.parallel import models
from tests.programs.support.harness import global_value, random, worker_mesh
from tests.support.pool import Gloo

SIMULATED = make_mesh((2,), ("tp",), kind="simulated")


class Tower(nn.Module):
    """Attends within images of lengths that are data, as those of Qwen2-VL and Pixtral do."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(4, 8))
        self.embed, self.block = nn.Linear(6, 8), models.mlp()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        images = x.split(lengths.tolist())
        rows = torch.cat([self.embed(each) + self.places[: len(each)] for each in images])
        y: Tensor = self.block(rows)
        return y


class Seeing(nn.Module):
    """Text among which images stand; features are normalized between two sharded matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.words = Tower(), nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 12)
        self.double()

    def forward(self, ids: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
        images = self.tower(x, lengths)
        rows = self.words(ids).masked_scatter((ids == 0).unsqueeze(-1), images)
        h = self.up(rows)
        h = h / h.square().mean(-1, keepdim=True).sqrt()
        y: Tensor = self.down(h)
        return y


PLAN = {"words": "embedding_rowwise", "up": "colwise", "down": "rowwise"}
INPUTS = (torch.tensor([[5, 0, 0, 0, 7, 0, 3]]), random((4, 6), 0), torch.tensor([3, 1]))


def quietly(module: Any, *args: Any) -> tuple[Any, list[str]]:
    """Calls a module; returns also the lines of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return module(*args), [str(each.message).splitlines()[0] for each in caught]


def seeing_alike(mesh: Mesh) -> list[str]:
    """Trains for a step with images and with others; returns what was told."""
    torch.manual_seed(0)
    one = Seeing()
    ours = parallelize(copy.deepcopy(one), mesh, PLAN)
    told = []
    for lengths in (INPUTS[2], torch.tensor([2, 2])):
        inputs = (*INPUTS[:2], lengths)
        found, lines = quietly(ours, *inputs)
        told += lines
        expected = one(*inputs)
        torch.testing.assert_close(global_value(found), expected.detach())
        for out in (found, expected):
            out.square().mean().backward()
    for name, value in one.named_parameters():
        grad = ours.get_parameter(name).grad
        assert grad is not None, name
        torch.testing.assert_close(global_value(grad), value.grad, msg=name)
    norms = (nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (ours, one))
    torch.testing.assert_close(*map(global_value, norms))
    return told


WHY = "split gets a number that is taken from a tensor, and may depend on its value."
TOLD = [
    f"{name} runs as it is, and each of its parts as a program: {name}: {WHY}"
    for name in ("Seeing", "Tower")
]


def test_a_model_with_a_tower_of_data_dependent_sizes_is_that_of_one_device() -> None:
    assert seeing_alike(SIMULATED) == TOLD


def on_processes() -> list[str]:
    return seeing_alike(worker_mesh((2,), ("tp",)))


def test_such_a_model_is_that_of_one_device_on_processes(gloo: Gloo) -> None:
    assert gloo(2).run(on_processes) == [TOLD, TOLD]


def test_a_wrong_plan_for_a_part_is_refused_all_the_same() -> None:
    ours = parallelize(Seeing(), SIMULATED, {"tower.block.2": "rowwise"})
    with pytest.raises(ShardTypeError, match="the plan says Shard"):
        quietly(ours, *INPUTS)


def test_rows_of_a_batch_do_not_come_apart() -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
    ours = parallelize(Seeing(), mesh, PLAN, dp="dp")
    with pytest.raises(ShardTypeError, match="split"):
        ours(INPUTS[0].expand(2, -1), *INPUTS[1:])
