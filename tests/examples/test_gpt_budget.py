"""Combinations of the example GPT send what the literature says, and no more."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from unittest import mock

import pytest
import torch

from examples.gpt import model, step
from examples.gpt.model import Config
from examples.gpt.optim import make_optimizer
from examples.gpt.parallel import Parallel
from shardmap_torch import make_mesh, shard_map, trace
from tests.support.fuzzing import sampled

CONFIG = Config(vocabulary=32, length=8, width=16, heads=4, hidden=24, layers=2, experts=2)
STAGES = 2  # ranks of every axis


@cache
def all_sent(parallel: str, num_microbatches: int) -> Mapping[str, dict[str, int]]:
    """Counts, by axis and name, a training step's collectives that send something.

    The whole step, optimizer included, is that of one device with its collectives erased.
    """
    config = replace(CONFIG, parallel=Parallel.of(parallel), microbatches=num_microbatches)
    sizes = config.parallel.mesh_sizes([2] * len(config.parallel.axes))
    views = config.parallel.views(sizes, config.experts)
    mesh = make_mesh(sizes, config.parallel.mesh_axes, kind="abstract", views=views)
    optimizer, params = make_optimizer(config, steps=1), model.init(config)
    batch = torch.zeros(8, CONFIG.length + 1, dtype=torch.int64)
    with mock.patch.object(step, "shard_map", partial(shard_map, check="global")):
        train = step.sharded_step(mesh, config, optimizer)
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for equation in trace(train, params, optimizer.init(params), batch).collectives:
        assert equation.collective is not None
        if equation.sent:
            counts["+".join(equation.collective.axes)][equation.collective.name] += 1
    return {axis: dict(names) for axis, names in counts.items()}


def sent(parallel: str, axis: str, num_microbatches: int = 1) -> dict[str, int]:
    return all_sent(parallel, num_microbatches)[axis]


# Weights that are sharded over the same axes share a buffer: norms of layers over pp, their other
# weights over pp and tp, the embedding and the unembedding over tp, the last norm over none.
BUFFERS = 4
# The loss; the squares of the gradients that are sharded over this axis alone, for their norm.
LOSS = SQUARES = 1
# However many microbatches: FSDP gathers once a step and reduce-scatters once, as torchtitan does;
# ZeRO reduce-scatters gradients once and gathers new parameters, the two halves of an all-reduce.
HALVES = {"all_reduce": LOSS + SQUARES, "all_gather": BUFFERS, "reduce_scatter": BUFFERS}
DATA = {"dp+pp": {"all_reduce": LOSS + BUFFERS}, "fsdp+pp": HALVES, "zero+pp": HALVES}


@pytest.mark.parametrize("num_microbatches", sampled([2, 4], 4))
@pytest.mark.parametrize("parallel", sampled(DATA, "fsdp+pp"))
def test_a_pipeline_sums_gradients_once_whatever_its_microbatches(
    parallel: str, num_microbatches: int
) -> None:
    assert sent(parallel, "dp", num_microbatches) == DATA[parallel]


@pytest.mark.parametrize("num_microbatches", sampled([2, 4], 4))
def test_a_pipeline_has_the_collectives_of_a_tensor_parallel_layer_in_each_tick(
    num_microbatches: int,
) -> None:
    """A tick runs one layer forward; another recomputes it, and runs it and the head backward."""
    ticks = num_microbatches + STAGES - 1
    layer, head, embedding = 2, 1, 1  # gathers and as many scatters, forward or backward
    each = ticks * (3 * layer + head) + embedding
    expected = {"all_gather": each, "reduce_scatter": each, "all_reduce": 3 * ticks + SQUARES}
    assert sent("pp+tp+sp", "tp", num_microbatches) == expected
    assert sent("pp+tp+sp", "pp", num_microbatches)["ppermute"] == 2 * ticks


@pytest.mark.parametrize("parallel", sampled(["ep", "fsdp+ep", "zero+ep"], "fsdp+ep"))
def test_experts_exchange_positions_twice_a_layer_and_direction(parallel: str) -> None:
    assert sent(parallel, "dp")["all_to_all"] == 2 * 2 * CONFIG.layers


def test_experts_send_over_tp_what_dense_layers_send() -> None:
    """With "sp" each rank of "tp" routes positions of its own, and gathers what its group got."""
    dense, experts = sent("dp+tp+sp", "tp"), sent("ep+tp+sp", "tp")
    layers, head, embedding, loss = 2 * 2 * CONFIG.layers, 1, 1, 3
    for found in (dense, experts):
        assert found["all_gather"] == found["reduce_scatter"] == layers + head + embedding
        assert found["all_reduce"] == loss + SQUARES
