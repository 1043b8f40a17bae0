"""torch's rules for DTensors that docs/dtensor_rules.md calls wrong are wrong in this torch."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from shardmap_torch import Mesh
from tests.programs.support.everywhere import run_on
from tests.support.pool import Gloo

PAGE: Final = Path(__file__).parents[1] / "docs" / "dtensor_rules.md"
CLASSES: Final = torch.tensor([0, -100, 1, 1])
UNEVEN: Final = torch.tensor([1.0, 1, 2])
FLIPPED: Final = torch.tensor([[1, 0]] * 4)


def gradient(f: Callable[[Any], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns the gradient of a number, by torch's autograd."""

    def taken(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        f(leaf * 1).backward()
        assert leaf.grad is not None
        return leaf.grad

    return taken


def written(write: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def after(x: Tensor) -> Tensor:
        y = x.clone()
        write(y)
        return y

    return after


def _loss(loss: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    return loss(x, x.detach() * 2)


def _like(target: Tensor, x: Any, *placements: Any) -> Tensor:
    is_shared = isinstance(x, DTensor)
    return (
        distribute_tensor(target, x.device_mesh, placements or x.placements)
        if is_shared
        else target
    )


def _convolved(x: Tensor) -> Tensor:
    """Convolves along the sharded dim."""
    return functional.conv1d(
        x.T[None], _like(torch.ones(2, 2, 3).double(), x, Replicate()), padding=1
    )


def _scattered(x: Tensor) -> Tensor:
    """Scatters into the rows of a tensor that has more of them."""
    rows, columns = _like(torch.arange(16.0).double().reshape(8, 2), x), _like(FLIPPED, x)
    return (torch.zeros_like(rows).scatter_add(1, columns, x) * rows).sum()


LOSSES: Final = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")
RULES: Final[dict[str, Callable[[Tensor], Any]]] = {
    **{name: gradient(partial(_loss, getattr(functional, name))) for name in LOSSES},
    "binary_cross_entropy": gradient(
        lambda x: functional.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid() / 2)
    ),
    "cross_entropy": lambda x: functional.cross_entropy(x, _like(CLASSES, x)),
    "nll_loss": lambda x: functional.nll_loss(x.log_softmax(1), _like(CLASSES, x)),
    "amax": gradient(lambda x: x.amax()),
    "amin": gradient(lambda x: x.amin()),
    "norm(inf)": gradient(lambda x: x.norm(torch.inf)),
    "norm(-inf)": gradient(lambda x: x.norm(-torch.inf)),
    "mse_loss, 3 rows on 2 ranks": lambda x: functional.mse_loss(
        _like(UNEVEN, x), _like(UNEVEN * 0, x)
    ),
    "conv1d": _convolved,
    "cosine_embedding_loss": lambda x: functional.cosine_embedding_loss(
        x.T, x.T, _like(torch.ones(2), x, Replicate())
    ),
    "fill_": lambda x: torch.empty_like(x.sum(0)).fill_(1.0),
    "gather": lambda x: _like(torch.arange(16.0).reshape(8, 2), x).gather(1, _like(FLIPPED, x)),
    "scatter_add": gradient(_scattered),
    "any": lambda x: (x > -9).any() * 1.0,
    "item": lambda x: torch.tensor(x.sum().item()),
    "x[0].zero_()": written(lambda x: x[0].zero_()),
    "x.diagonal().zero_()": written(lambda x: x.diagonal().zero_()),
    "x.flatten()[1:3].zero_()": written(lambda x: x.flatten()[1:3].zero_()),
    "x[0] = x[3]": written(lambda x: x.__setitem__(0, x[3])),
}


def are_wrong(mesh: Mesh) -> None:
    x = torch.tensor([[1.0, 5.0], [2.0, 0.5], [3.0, 0.25], [-4.0, 7.0]]).double()
    for name, rule in RULES.items():
        assert mesh.device_mesh is not None
        found = rule(distribute_tensor(x, mesh.device_mesh, [Shard(0)]))
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        right = rule(x).to(whole.dtype)
        mended = whole.shape == right.shape and torch.allclose(whole, right)
        # On all ranks: what one of them gives may be right by chance.
        flag = torch.tensor(float(mended))
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN)
        assert not flag, f"torch mended {name}: drop the row"


def test_each_rule_that_the_page_calls_wrong_is_wrong_in_this_torch(gloo: Gloo) -> None:
    run_on("gloo", are_wrong, gloo, (2,), ("of_torch_alone",))  # no module is on that mesh


def test_the_page_names_the_rules_that_are_tried() -> None:
    table = PAGE.read_text().partition("## Rules of torch that were found wrong")[2]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall("`([^`]*)`", " ".join(rows))) == sorted(RULES)
