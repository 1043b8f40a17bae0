"""Three steps of AdamW of a parallelized module and of the same on one device."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardmap_torch import Mesh, parallel, parallelize
from tests.parallel import models
from tests.parallel.support.plans import llama_plan, mlp_plan, sequence_plan
from tests.programs.support.harness import global_value, random

NUM_STEPS = 3

CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "MLP": (models.mlp, mlp_plan(parallel)),
    "Llama": (models.Llama, llama_plan(parallel)),
    "Llama, sequence parallel": (models.Llama, sequence_plan(parallel)),
}


def batches(case: str) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(NUM_STEPS):
        if case == "MLP":
            yield random((4, 8), step), random((4, 8), 10 + step)
        else:
            tokens = torch.randint(12, (2, 5), generator=torch.Generator().manual_seed(step))
            yield tokens[:, :-1], tokens[:, 1:]


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    if target.is_floating_point():
        return functional.mse_loss(out, target)
    return functional.cross_entropy(out.transpose(1, 2), target)


def train(case: str, module: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and norms of three steps, and the parameters after them."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    numbers = []
    for x, target in batches(case):
        optimizer.zero_grad()
        loss = loss_of(module(x), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        numbers += [loss.item(), global_value(norm).item()]
    return numbers, {name: global_value(value) for name, value in module.named_parameters()}


def both(case: str, mesh: Mesh, axis: str | None = None, **data: Any) -> None:
    make, plan = CASES[case]
    torch.manual_seed(0)
    own = make()
    ours = parallelize(copy.deepcopy(own), mesh, plan, axis=axis, **data)
    torch.testing.assert_close(train(case, ours), train(case, own), rtol=1e-9, atol=1e-9)
