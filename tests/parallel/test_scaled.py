"""A loss, or gradients, that a caller of a parallelized module scales by the number of ranks."""

import linecache
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardmap_torch import make_mesh, parallelize

TOLD = """\
the loss of a parallelized module, and its gradients, are those of one device, where a mean is \
over the rows of all ranks: scaled by the number of ranks they are wrong by that factor.
Fix: leave the factor out."""

WRONG = {
    "at once": "(model(x, y) / mesh.size).backward()  # told",
    "after the microbatches": "loss = model(x, y) / STEPS / (mesh.size if x.ndim else 1)  # told",
    "in place": "loss = model(x, y)\n    loss /= dist.get_world_size()  # told",
    "in place, by a method": "loss = model(x, y)\n    loss.div_(mesh.shape['dp'])  # told",
    "by a function of torch": "loss = model(x, y)\n    torch.div(loss, n)  # told",
    "a product": "loss = model(x, y)\n    scaled = dist.get_world_size() * loss  # told",
    "a reciprocal": "loss = model(x, y)\n    loss = loss * (1 / mesh.size)  # told",
    "with the microbatches": "loss = model(x, y)\n    loss = loss / (accumulate * n)  # told",
    "two names later": "out = model(x, y)\n    loss = out + 0.1 * x.mean()\n    loss / n  # told",
    "of a pair": "loss, _ = model(x, y), 0\n    loss = loss / mesh.size  # told",
    "in a helper": "def own():\n        return model(x, y)\n    loss = own() / mesh.size  # told",
    "gradients": (
        "model(x, y).backward()\n"
        "    for p in model.parameters():\n"
        "        p.grad /= mesh.size  # told"
    ),
    "of the environment": (
        "world = int(os.environ.get('WORLD_SIZE', 1))\n    loss = model(x, y) / world  # told"
    ),
    "of an argument": "loss = model(x, y) / args.world_size  # told",
    "of a loss outside": "loss = F.mse_loss(model(x, y), y.mean()) / mesh.size  # told",
}
RIGHT = {
    "microbatches, as many as ranks": "(model(x, y) / STEPS).backward()",
    "microbatches by a name": "loss = model(x, y)\n    loss = loss / accumulate",
    "a number for a log": "loss = model(x, y)\n    print(loss.item() / mesh.size)",
    "ranks' numbers added up": (
        "loss = model(x, y)\n    dist.all_reduce(loss)\n    loss = loss / dist.get_world_size()"
    ),
    "a log of its own": "loss = model(x, y)\n    log = loss.detach().clone()\n    log /= n",
    "a sum by rows of each rank": "loss = model(x, y) / x.shape[0] / mesh.size",
    "a sum by all rows": "loss = model(x, y) / (len(x) * mesh.size)",
    "a learning rate": "loss = model(x, y)\n    rate = 0.1 * mesh.size",
    "another loss": "loss = model(x, y)\n    other = x.mean() / mesh.size",
    "without gradients": "with torch.no_grad():\n        loss = model(x, y) / mesh.size",
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.layer(x), y)


MESH = make_mesh((2,), ("dp",), kind="simulated")


@pytest.fixture(scope="module")
def model() -> Model:
    return parallelize(Model(), MESH, {}, dp="dp")


def step_of(body: str, folder: Path) -> Callable[..., Any]:
    """Writes a step to a file, and returns it."""
    path = folder / "train.py"
    path.write_text(f"n = mesh.size\n\n\ndef step(model, x, y):\n    {body}\n")
    names: dict[str, Any] = {"F": functional, "torch": torch, "os": os, "mesh": MESH, "STEPS": 2}
    dist = SimpleNamespace(get_world_size=lambda: 2, all_reduce=lambda x: None)
    names |= {"accumulate": 2, "dist": dist, "args": SimpleNamespace(world_size=2)}
    linecache.checkcache()
    exec(compile(path.read_text(), path, "exec"), names)
    step: Callable[..., Any] = names["step"]
    return step


def told_by(step: Callable[..., Any], model: Model) -> list[tuple[str, str]]:
    x = torch.ones(4, 4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            step(model, x, x)
    return [(f"{each.message}", linecache.getline(each.filename, each.lineno)) for each in found]


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_scaled_by_the_number_of_ranks_is_told_once_at_its_line(
    name: str, tmp_path: Path, model: Model
) -> None:
    ((message, line),) = told_by(step_of(WRONG[name], tmp_path), model)
    assert message == TOLD
    assert line.endswith("# told\n")


@pytest.mark.parametrize("name", RIGHT)
def test_other_factors_and_numbers_for_logs_are_not_told_of(
    name: str, tmp_path: Path, model: Model
) -> None:
    assert told_by(step_of(RIGHT[name], tmp_path), model) == []


def test_on_one_rank_there_is_nothing_to_tell(tmp_path: Path) -> None:
    alone = parallelize(Model(), make_mesh((1,), ("dp",), kind="simulated"), {}, dp="dp")
    assert told_by(step_of(WRONG["at once"], tmp_path), alone) == []
