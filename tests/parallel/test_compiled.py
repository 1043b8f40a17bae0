"""torch.compile around a parallelized module compiles what is around it, and says so."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported

from shardmap_torch import ColwiseParallel, Mesh, RowwiseParallel, full, parallelize
from tests.parallel import models
from tests.programs.support.everywhere import run_on
from tests.support.pool import Gloo

X = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def around(model: Any) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor) -> Tensor:
        y: Tensor = model(x.sin()) * 2
        return y.square().mean()

    return loss


def as_one_device(mesh: Mesh) -> None:
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # in a worker
    one = models.mlp()
    ours = parallelize(copy.deepcopy(one), mesh, PLAN, axis="tp")
    around(one)(X).backward()
    compiled: list[Callable[[], Callable[[Tensor], Tensor]]] = [
        lambda: torch.compile(around(ours), backend="eager"),
        lambda: around(torch.compile(ours, backend="eager")),
    ]
    for compile in compiled:
        ours.zero_grad()
        loss = compile()(X)
        loss.backward()
        torch.testing.assert_close(loss, around(one)(X))
        for p, q in zip(ours.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad)
    torch.compiler.reset()  # or it calls what it has compiled
    with pytest.raises(Unsupported, match="a module that parallelize has changed runs uncompiled"):
        torch.compile(around(ours), backend="eager", fullgraph=True)(X)


# torch asks for `.grad` of what it goes on with, and warns of that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("kind", ["auto", pytest.param("gloo", marks=pytest.mark.fuzz)])
def test_code_around_a_module_is_compiled_and_the_module_is_not(kind: str, gloo: Gloo) -> None:
    run_on(kind, as_one_device, gloo)
