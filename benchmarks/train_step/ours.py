"""The step of examples/gpt, checked, as its users write it."""

import torch
from torch import Tensor

from benchmarks.train_step.setting import STEPS, WARMUP, Setting, Step
from examples.gpt import model
from examples.gpt.optim import make_optimizer
from examples.gpt.step import sharded_step
from shardmap_torch import Mesh, P, device_put, make_mesh

AXES = "dp", "tp"


def make(setting: Setting, compiles: bool = False, replay: bool = False) -> Step:
    """Makes it for the process group, with tensor parallelism."""
    return on(make_mesh((1, torch.distributed.get_world_size()), AXES), setting, compiles, replay)


def on(mesh: Mesh, setting: Setting, compiles: bool = False, replay: bool = False) -> Step:
    """Parameters and state lie on the mesh before the first step, as in the example."""
    specs = model.specs(setting.config)
    params = setting.params()
    optimizer = make_optimizer(setting.config, STEPS, WARMUP)
    state = device_put(optimizer.init(params), mesh, optimizer.specs(specs))
    params = device_put(params, mesh, specs)
    batch = device_put(setting.batch(), mesh, P("dp"))
    step = sharded_step(mesh, setting.config, optimizer, replay=replay)
    if compiles:
        step = torch.compile(step, fullgraph=True, dynamic=False)

    def run() -> Tensor:
        nonlocal params, state
        params, state, loss = step(params, state, batch)
        return loss

    return run
