"""Ranks of data axes that all get the same rows are told so; others are not."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardmap_torch import ColwiseParallel, P, RowwiseParallel, from_local, parallelize
from tests.programs.support.harness import worker_mesh
from tests.support.pool import Gloo

SAME = """\
Sequential: all 2 ranks of dp got the same rows, as input, float32[4, 8]: each row of the batch \
counts 2 times.
Fix: give each rank rows of its own, as by DistributedSampler(data, num_replicas=2, rank=...) \
with its position along dp; or, where each rank reads the whole batch, device_put(batch, mesh, \
P('dp'))."""


def made() -> Any:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    mesh = worker_mesh((2, 2), ("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return mesh, parallelize(mlp, mesh, plan, axis="tp", dp="dp")


def told(model: Any, *batches: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for batch in batches:
            model(batch)
    return [f"{each.message}" for each in found if __file__ == each.filename]


def compare_rows() -> None:
    torch.manual_seed(1)
    data = torch.randn(8, 8)
    mesh, model = made()
    own = data[4 * mesh.coordinates(mesh.rank)["dp"] :][:4]
    warned = [SAME] if dist.get_rank() == 0 else []
    assert told(model, data[:4], data[:4], own) == warned
    for batches in [
        (own, data[:4]),  # the first call decides
        (torch.ones(4, 8),),  # a first trial, of one number
        (from_local(data[:4], mesh, P("dp")),),  # made by the user
    ]:
        _, model = made()
        assert told(model, *batches) == []
    assert isinstance(model(own), DTensor)


def test_equal_rows_of_all_ranks_are_told_once_by_one_rank(gloo: Gloo) -> None:
    gloo(4).run(compare_rows)
