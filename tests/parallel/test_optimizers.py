"""torch's optimizers on the parameters of a parallelized module, with accumulated gradients."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from shardmap_torch import ColwiseParallel, Mesh, P, RowwiseParallel, device_put, full, parallelize
from tests.programs.support.everywhere import run_on
from tests.programs.support.harness import random
from tests.support.fuzzing import sized
from tests.support.pool import Gloo

X, Y = random((8, 4), 1), random((8, 4), 2)
# Muon iterates in bfloat16, whose products are rounded otherwise where they are added up by shard.
RIGHT: dict[str, tuple[Callable[[Any], optim.Optimizer], float]] = {
    "Adadelta": (optim.Adadelta, 1e-9),
    "Adagrad": (optim.Adagrad, 1e-9),
    "Adam": (optim.Adam, 1e-9),
    "Adamax": (optim.Adamax, 1e-9),
    "AdamW": (optim.AdamW, 1e-9),
    "ASGD": (optim.ASGD, 1e-9),
    "LBFGS": (lambda p: optim.LBFGS(p, lr=0.1), 1e-9),
    "Muon": (lambda p: optim.Muon(p, lr=0.1), 0.05),
    "NAdam": (optim.NAdam, 1e-9),
    "RAdam": (optim.RAdam, 1e-9),
    "RMSprop": (lambda p: optim.RMSprop(p, centered=True), 1e-9),
    "SGD": (lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True), 1e-9),
}
REFUSED: dict[str, tuple[Callable[[Any], optim.Optimizer], str]] = {
    "Adafactor": (optim.Adafactor, r"aten\.pow_\.Scalar: in-place operations that require"),
    "Rprop": (optim.Rprop, r"aten\.index_put_\.default: in-place operations that require"),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)
    return nn.Sequential(*layers).double()


def trained(
    module: nn.Module, make: Callable[[Any], optim.Optimizer], x: Tensor, y: Tensor
) -> list[Tensor]:
    """Takes three steps, each after two backwards."""
    optimizer: Any = make(module.parameters())

    def gradients() -> Tensor:
        optimizer.zero_grad()
        functional.mse_loss(module(x), y).backward()
        loss = functional.mse_loss(module(x), y) / 3
        loss.backward()
        return loss.detach()

    for _ in range(3):
        if not isinstance(optimizer, optim.LBFGS):
            gradients()
        optimizer.step(*[gradients] * isinstance(optimizer, optim.LBFGS))
    return [full(p.detach()) for p in module.parameters()]


def train_as_one_device(mesh: Mesh) -> None:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def parallel() -> list[tuple[nn.Module, Tensor, Tensor]]:
        data = device_put((X, Y), mesh, P("a"))
        return [
            (parallelize(copy.deepcopy(model()), mesh, plan), X, Y),
            (parallelize(copy.deepcopy(model()), mesh, {}, fsdp="a"), *data),
        ]

    few = ["AdamW", "LBFGS", "Muon", "SGD"]  # `make fuzz` all
    for name in sized(few, [*RIGHT]):
        make, tolerance = RIGHT[name]
        expected = trained(model(), make, X, Y)
        for module, x, y in parallel():
            found = trained(module, make, x, y)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=name)
    for make, text in REFUSED.values():
        for module, x, y in parallel():
            with pytest.raises(RuntimeError, match=text):
                trained(module, make, x, y)


def test_optimizers_of_torch_train_shards_as_one_device_or_raise_an_error(gloo: Gloo) -> None:
    run_on("gloo", train_as_one_device, gloo, (2,), ("a",))


def made_before(mesh: Mesh) -> None:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    early = model()
    optimizer = optim.AdamW(early.parameters())
    with pytest.warns(UserWarning, match=r"its steps would change nothing\.\nFix: make it after"):
        parallelize(early, mesh, plan)
    del optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize(model(), mesh, plan)


def test_an_optimizer_that_is_made_before_placing_is_told_of(gloo: Gloo) -> None:
    run_on("gloo", made_before, gloo, (2,), ("a",))


def test_each_optimizer_of_torch_for_dense_gradients_is_tried() -> None:
    names = {name for name in optim.__all__ if isinstance(getattr(optim, name), type)}
    assert names - {"Optimizer", "SparseAdam"} == {*RIGHT, *REFUSED}
