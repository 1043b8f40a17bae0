"""torch's optimizers on the parameters of a parallelized module, with accumulated gradients."""

import copy
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from shardmap_torch import (
    CollectiveMismatchError,
    ColwiseParallel,
    Mesh,
    OptimizerError,
    P,
    RowwiseParallel,
    ShardTypeError,
    device_put,
    full,
    parallelize,
)
from tests.programs.support.everywhere import run_on
from tests.programs.support.harness import random, worker_mesh
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
    "Adafactor": (optim.Adafactor, "a number is read of a DTensor of which each rank has its own"),
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
            with pytest.raises((RuntimeError, ShardTypeError), match=text):
                trained(module, make, x, y)


def test_optimizers_of_torch_train_shards_as_one_device_or_raise_an_error(gloo: Gloo) -> None:
    run_on("gloo", train_as_one_device, gloo, (2,), ("a",))


PARTS = """\
a number is read of a DTensor of which each rank has its own part so far, as the norm of its \
shard: float64[], PLACEMENTS.
  at SITE
Fix: full(x).item(), which all ranks call; for gradients clip_grad_norm_ of torch.nn.utils, which \
returns their norm; x.to_local().item() for this rank's own."""
READS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a norm": (lambda x: x.norm(), lambda x: x.item()),
    "a norm of squares": (lambda x: x.square().sum(), math.sqrt),
    "the largest": (lambda x: x.abs().max(), float),
    "a mean, as a condition": (lambda x: x.mean(), bool),
}


def read_numbers(mesh: Mesh) -> None:
    one = model()
    module = parallelize(copy.deepcopy(one), mesh, {}, fsdp="a")
    for each, (x, y) in ((module, device_put((X, Y), mesh, P("a"))), (one, (X, Y))):
        functional.mse_loss(each(x), y).backward()
    for shard, whole in zip(module.parameters(), one.parameters(), strict=True):
        pairs: list[Any] = [(shard, whole), (shard.grad, whole.grad)]
        for value, other in pairs:
            for name, (reduced, read) in READS.items():
                with pytest.raises(ShardTypeError) as caught:
                    read(reduced(value))
                text = re.sub(r"at test_optimizers\.py:\d+: .*", "at SITE", f"{caught.value}")
                assert re.sub(r"\(\S*Partial.*\)", "PLACEMENTS", text) == PARTS, name
                right = read(reduced(other))
                assert read(full(reduced(value))) == pytest.approx(right), name
            assert bool((value > 1e3).any().full_tensor()) is False
            assert value.norm().to_local().item() > 0
            assert bool(value.norm() > -1)
            assert value.full_tensor().norm().item() > 0
    norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0, error_if_nonfinite=True)
    expected = nn.utils.clip_grad_norm_(one.parameters(), 1.0)
    assert norm.item() == pytest.approx(expected.item())


def test_a_number_of_a_ranks_own_shard_is_refused(gloo: Gloo) -> None:
    run_on("gloo", read_numbers, gloo, (2,), ("a",))


def test_numbers_of_one_rank_and_on_other_meshes_are_left_to_torch(gloo: Gloo) -> None:
    gloo(2).run(read_of_torch)


def read_of_torch() -> None:
    module = parallelize(model(), worker_mesh((1, 2), ("a", "b")), {}, fsdp="a")
    assert next(module.parameters()).norm().item() > 0
    other = worker_mesh((2,), ("of_torch_alone",)).device_mesh
    assert distribute_tensor(torch.ones(2), other, [Shard(0)]).sum().item() == 1  # of 2


def made_before(mesh: Mesh) -> None:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    early = model()
    optimizer = optim.AdamW(early.parameters())
    with pytest.warns(UserWarning, match=r"its steps would change nothing\.\nFix: make it after"):
        parallelize(early, mesh, plan)
    del optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh, numbers = model(), torch.get_rng_state()
        parallelize(fresh, mesh, plan)
    assert torch.equal(torch.get_rng_state(), numbers)


@pytest.mark.parametrize("kind", ["vmap", "gloo"])
def test_an_optimizer_that_is_made_before_placing_is_told_of(kind: Any, gloo: Gloo) -> None:
    run_on(kind, made_before, gloo, (2,), ("a",))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = model(), nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return self.scale * out


PLAN = {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()}
OTHER = """\
AdamW.load_state_dict: plain states are not of whole parameters:
  layers.0.weight: exp_avg is float64[4, 4], and the parameter float64[8, 4]
  layers.0.weight: exp_avg_sq is float64[4, 4], and the parameter float64[8, 4]
Fix: load states of one device, whole on each process; of another mesh let all ranks call \
get_state_dict, and load by set_state_dict(module, optimizer, model_state_dict=..., \
optim_state_dict=..., options=StateDictOptions(full_state_dict=True))."""


def step(module: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    functional.mse_loss(module(X), Y).backward()
    optimizer.step()


def load_states(mesh: Mesh) -> None:
    for name in ("AdamW", "Adagrad", "ASGD", "NAdam", "SGD"):
        one = Scaled()
        make = RIGHT[name][0]
        its: Any = make(one.parameters())
        step(one, its)
        module = parallelize(copy.deepcopy(one), mesh, PLAN)
        optimizer: Any = make(module.parameters())
        optimizer.load_state_dict(copy.deepcopy(its.state_dict()))
        for _ in range(2):
            step(one, its)
            step(module, optimizer)
        torch.testing.assert_close(full(list(module.parameters())), list(one.parameters()))
        moments = [x for x in optimizer.state[module.layers[0].weight].values() if x.ndim == 2]
        assert {x.placements for x in moments} == {(Shard(0),)}, name
        assert {x.to_local().shape for x in moments} == {(4, 4)}, name


def load_other_states(mesh: Mesh) -> None:
    one = Scaled()
    its: Any = optim.AdamW(one.parameters())
    step(one, its)
    module = parallelize(copy.deepcopy(one), mesh, PLAN)
    cases: tuple[tuple[Callable[[Tensor], Tensor], type[Exception], str], ...] = (
        (lambda x: x[:4] if x.shape == (8, 4) else x, OptimizerError, OTHER),
        (lambda x: x + mesh.rank, CollectiveMismatchError, "  rank 1: scale, exp_avg: float64[]"),
    )
    for change, kind, text in cases:
        state = copy.deepcopy(its.state_dict())
        for moments in state["state"].values():
            moments |= {key: change(x) for key, x in moments.items() if key != "step"}
        optimizer: Any = optim.AdamW(module.parameters())
        optimizer.load_state_dict(state)
        with pytest.raises(kind) as caught:
            step(module, optimizer)
        assert text in f"{caught.value}", caught.value


class Own(optim.SGD):
    """Keeps a plain tensor of the shape of the parameter, which stays its own."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("average", torch.zeros(p.shape)).add_(1)


def keep_own_states(mesh: Mesh) -> None:
    module = parallelize(Scaled(), mesh, PLAN)
    optimizer: Any = Own(module.parameters())
    for _ in range(2):
        step(module, optimizer)
    assert {type(state["average"]) for state in optimizer.state.values()} == {Tensor}


@pytest.mark.parametrize("load", [load_states, load_other_states, keep_own_states])
def test_a_state_of_one_device_is_placed_as_the_parameters_are_or_refused(
    load: Callable[[Mesh], None], gloo: Gloo
) -> None:
    run_on("gloo", load, gloo, (2,), ("a",))


def test_each_optimizer_of_torch_for_dense_gradients_is_tried() -> None:
    names = {name for name in optim.__all__ if isinstance(getattr(optim, name), type)}
    assert names - {"Optimizer", "SparseAdam"} == {*RIGHT, *REFUSED}
