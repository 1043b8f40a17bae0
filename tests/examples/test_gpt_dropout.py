"""Dropout in the example GPT: the masks of one device, on every mesh."""

from typing import Any, Final

import optree
import pytest
import torch
from torch import Tensor

from examples.gpt import model, plain
from examples.gpt.dropout import Dropout
from examples.gpt.model import Config, Params
from shardmap_torch import P, full, make_mesh, random, shard_map, value_and_grad
from shardmap_torch.optim import sync_gradients
from tests.support.pool import Gloo

CONFIG = Config(vocabulary=16, length=4, width=8, heads=4, hidden=8, layers=1)
AXES = ("dp", "tp")
KEY = random.key(20)
P_DROP = 0.3
# As without dropout: the sharded model adds the same float64 numbers in another order.
EXACT = 1e-10


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(CONFIG.vocabulary, (4, CONFIG.length + 1), generator=generator)


def params() -> Params:
    return model.init(CONFIG, 0, torch.float64)


def leaves(loss: Tensor, grads: Params) -> list[Tensor]:
    return [loss, *optree.tree_leaves(grads)]


def on_one_device() -> list[Tensor]:
    grads, loss = torch.func.grad_and_value(plain.loss)(params(), batch(), Dropout(P_DROP, KEY))
    return leaves(loss, grads)


def on_mesh(sizes: tuple[int, int], strategy: Any = "auto", check: Any = True) -> list[Tensor]:
    """The loss and its gradients; in a worker of the pool on a process-group mesh."""
    mesh, specs = make_mesh(sizes, AXES, simulate=strategy), model.specs(CONFIG)

    def body(key: Tensor, params: Params, batch: Tensor) -> tuple[Tensor, Params]:
        dropout = Dropout(P_DROP, key)
        loss, grads = value_and_grad(model.loss)(params, batch, CONFIG, dropout)
        return loss, sync_gradients(grads, specs, "dp")

    mapped = shard_map(
        body, mesh=mesh, in_specs=(P(), specs, P("dp")), out_specs=(P(), specs), check=check
    )
    return leaves(*full(mapped(KEY, params(), batch())))


SHARDED: Final = (AXES, ("dp",))
"""Axes of the batch and the sequence: sequence-parallel over tp, or equal over tp."""


def masks(sizes: tuple[int, int], strategy: Any = "auto", axes: tuple[str, ...] = AXES) -> Tensor:
    """Returns what dropout leaves of ones, over shards of the batch and the sequence."""
    mesh = make_mesh(sizes, AXES, simulate=strategy)
    mapped = shard_map(
        lambda key, x: Dropout(P_DROP, key).shards(axes)(x),
        mesh=mesh,
        in_specs=(P(), P(*axes)),
        out_specs=P(*axes),
        check="global",
    )
    dropped: Tensor = full(mapped(KEY, torch.ones(4, 8, 6)))
    return dropped


@pytest.mark.parametrize(
    ("sizes", "strategy", "check"),
    [((2, 4), "auto", "global"), ((2, 4), "ranks", "local")],
)
def test_losses_and_gradients_on_simulated_ranks_are_those_of_one_device(
    sizes: tuple[int, int], strategy: str, check: str
) -> None:
    for one, other in zip(on_mesh(sizes, strategy, check), on_one_device(), strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


def test_losses_and_gradients_on_four_processes_are_those_of_one_device(gloo: Gloo) -> None:
    expected = on_one_device()
    for actual in gloo(4).run(on_mesh, (2, 2), timeout=120):
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("axes", SHARDED)
def test_masks_are_bit_equal_everywhere(axes: tuple[str, ...], gloo: Gloo) -> None:
    expected = Dropout(P_DROP, KEY).unsharded()(torch.ones(4, 8, 6))
    assert 0 < (expected == 0).double().mean() < 0.5
    for strategy in ("vmap", "ranks"):
        assert torch.equal(masks((2, 4), strategy, axes), expected)
    assert all(torch.equal(drawn, expected) for drawn in gloo(4).run(masks, (2, 2), "auto", axes))


def test_without_dropout_the_loss_is_another_one() -> None:
    dropped = on_one_device()[0]
    assert abs(dropped - plain.loss(params(), batch())) > 1e-3
