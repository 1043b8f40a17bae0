"""The step on simulated meshes, in one process, and that of examples/gpt's model on one device."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import optree
import torch
from torch import Tensor

from benchmarks.train_step import ours
from benchmarks.train_step.setting import (
    BETAS,
    DECAY,
    MAX_NORM,
    PEAK,
    STEPS,
    WARMUP,
    Setting,
    Step,
    rate,
)
from examples.gpt import plain
from shardmap_torch import make_mesh, value_and_grad
from shardmap_torch.optim import adamw, clip_by_global_norm, warmup_cosine


def one_device(setting: Setting, compiles: bool = False) -> Step:
    """Makes the step of torch's own layers and optimizer; `compiles`: the loss and its backward."""
    params = optree.tree_map(Tensor.requires_grad_, setting.params())
    leaves, batch = optree.tree_leaves(params), setting.batch()
    groups = [
        {"params": [p for p in leaves if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in leaves if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, PEAK, BETAS, foreach=True)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: rate(n + 1) / PEAK)
    loss_of = torch.compile(plain.loss, fullgraph=True, dynamic=False) if compiles else plain.loss

    def run() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = loss_of(params, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, MAX_NORM, foreach=True)
        optimizer.step()
        warm.step()
        return loss.detach()

    return run


def with_new_trees(setting: Setting) -> Step:
    """Makes the step of torch's own layers with an optimizer that writes nothing in place."""
    params, batch = setting.params(), setting.batch()
    decays = optree.tree_map(lambda p: p.ndim > 1, params)
    schedule = warmup_cosine(PEAK, steps=STEPS, warmup=WARMUP, final=PEAK / 10)
    optimizer = adamw(schedule, betas=BETAS, weight_decay=DECAY, decays=decays)
    state = optimizer.init(params)

    def run() -> Tensor:
        nonlocal params, state
        loss, grads = value_and_grad(plain.loss)(params, batch)
        clipped, _ = clip_by_global_norm(grads, max_norm=MAX_NORM)
        params, state = optimizer.update(params, clipped, state)
        value: Tensor = loss
        return value

    return run


def on_mesh(
    shape: tuple[int, int], setting: Setting, compiles: bool = False, replay: bool = False
) -> Step:
    """Makes our step on a simulated mesh."""
    return ours.on(make_mesh(shape, ours.AXES, kind="simulated"), setting, compiles, replay)


MADE: Final[Mapping[str, Callable[[Setting], Step]]] = {
    "one device": one_device,
    "one device (new trees)": with_new_trees,
    "simulated 1x1": partial(on_mesh, (1, 1)),
    "simulated 1x1 (replayed)": partial(on_mesh, (1, 1), replay=True),
    "simulated 2x4": partial(on_mesh, (2, 4)),
    "simulated 2x4 (replayed)": partial(on_mesh, (2, 4), replay=True),
    "one device (compiled)": partial(one_device, compiles=True),
    "simulated 2x4 (compiled)": partial(on_mesh, (2, 4), compiles=True),
}
