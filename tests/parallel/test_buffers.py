"""Buffers that a forward writes into are state, and batch norms take statistics of all rows."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardmap_torch import Mesh, ShardTypeError, full, make_mesh, parallelize
from tests.programs.support.everywhere import run_on
from tests.programs.support.harness import random
from tests.support.fuzzing import FUZZ
from tests.support.golden import hold
from tests.support.pool import Gloo

ROWS, IMAGES = [random((8, 4), seed) for seed in (0, 1)], [random((8, 3, 4, 4), 2)] * 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.relu(self.norm(self.conv(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Recomputed(nn.Module):
    """A norm that torch's checkpoint runs again in the backward, by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        def normed(x: Tensor) -> Tensor:
            return functional.batch_norm(self.linear(x), None, None, training=True)

        y: Tensor = checkpoint(normed, x, use_reentrant=False)
        return y**3


class Counting(nn.Module):
    """Counts its calls, and sums up what it has been given."""

    sums = False
    reduce: Callable[..., Tensor] = staticmethod(torch.sum)
    calls: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
            if self.sums:
                self.seen.add_(self.reduce(x.detach(), 0))
        y: Tensor = self.linear(x)
        return y


def normed(**options: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, **options))


def frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())


CASES: dict[str, tuple[Callable[[], nn.Module], list[Tensor]]] = {
    "norms of images in layers": (Stack, IMAGES),
    "a norm of rows": (normed, ROWS),
    "one row a rank": (normed, [x[:2] for x in ROWS]),
    "no running statistics": (partial(normed, affine=False, track_running_stats=False), ROWS),
    "a synchronized norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), ROWS),
    "a norm that is recomputed": (Recomputed, ROWS),
    "a frozen norm": (frozen, ROWS),
    "a counter": (Counting, ROWS),
}


def alike(name: str, mesh: Mesh, **data: Any) -> None:
    make, batches = CASES[name]
    torch.manual_seed(0)
    ours = parallelize(make().double(), mesh, check="global", **data)
    torch.manual_seed(0)
    one = (normed if name == "a synchronized norm" else make)().double()  # that needs a GPU
    where = mesh.coordinates(mesh.rank)["a"] if mesh.kind != "simulated" else None
    for x in batches:
        own = x if where is None else x.chunk(mesh.shape["a"])[where]
        for model, rows in ((one, x), (ours, own)):
            model.zero_grad()
            y = full(model(rows))
            (y * torch.linspace(0, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
        for kind in ("named_parameters", "named_buffers"):
            pairs = zip(getattr(ours, kind)(), getattr(one, kind)(), strict=True)
            for (key, found), (_, expected) in pairs:
                assert found.requires_grad == expected.requires_grad
                found, expected = (z if z.grad is None else z.grad for z in (found, expected))
                torch.testing.assert_close(
                    full(found.detach()), expected.detach(), rtol=1e-10, atol=1e-10, msg=key
                )
    ours.eval(), one.eval()
    torch.testing.assert_close(full(ours(own)), one(x))


@pytest.mark.sample(6)
@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
@pytest.mark.parametrize("data", [{"dp": "a"}, {"fsdp": "a"}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_on_simulated_ranks(name: str, data: dict[str, Any], simulate: Any) -> None:
    alike(name, make_mesh((2,), ("a",), kind="simulated", simulate=simulate), **data)


def all_alike(mesh: Mesh) -> None:
    for name in CASES:
        alike(name, mesh, dp="a")
        if FUZZ or name == "norms of images in layers":
            alike(name, mesh, fsdp="a")


@pytest.mark.slow
def test_on_processes(gloo: Gloo) -> None:
    run_on("gloo", all_alike, gloo, (2,), ("a",))


def test_a_sum_of_rows_in_a_buffer_is_that_of_the_batch() -> None:
    one = Counting().double()
    one.sums = True
    ours = parallelize(copy.deepcopy(one), make_mesh((2,), ("a",), kind="simulated"), dp="a")
    for model in (one, ours):
        model(ROWS[0])
    torch.testing.assert_close([*ours.buffers()], [*one.buffers()])


def test_a_maximum_of_each_ranks_rows_in_a_buffer_is_refused() -> None:
    model = Counting().double()
    model.sums, model.reduce = True, torch.amax
    ours = parallelize(model, make_mesh((2,), ("a",), kind="simulated"), dp="a")
    with pytest.raises(ShardTypeError) as error:
        ours(ROWS[0])
    hold("losses_by_hand.txt", "maximum of rows", f"{error.value}")
    assert model.calls == 0, "a call that is refused has written"


@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
def test_in_inference_mode_a_module_in_training_writes_its_buffers_too(simulate: Any) -> None:
    """Tensors of that mode count no writes."""
    one = normed().double()
    mesh = make_mesh((2,), ("a",), kind="simulated", simulate=simulate)
    ours = parallelize(copy.deepcopy(one), mesh, dp="a")
    with torch.inference_mode():
        torch.testing.assert_close(ours(ROWS[0]), one(ROWS[0]))
    torch.testing.assert_close([*ours.buffers()], [*one.buffers()])
