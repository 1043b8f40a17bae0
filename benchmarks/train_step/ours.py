"""The step of examples/gpt, checked, as its users write it."""

import torch
from torch import Tensor

from benchmarks.train_step.setting import OPTIMIZER, Setting, Step
from examples.gpt import model
from examples.gpt.step import sharded_step
from shardmap_torch import P, device_put, make_mesh


def make(setting: Setting) -> Step:
    """Parameters and state lie on the mesh before the first step, as in the example."""
    num_ranks = torch.distributed.get_world_size()
    mesh = make_mesh((1, num_ranks), ("dp", "tp"))
    cuts = model.specs(setting.config)
    params = setting.params()
    state = device_put(OPTIMIZER.init(params), mesh, OPTIMIZER.specs(cuts))
    params = device_put(params, mesh, cuts)
    batch = device_put(setting.batch(), mesh, P("dp"))
    step = sharded_step(mesh, setting.config, OPTIMIZER)

    def run() -> Tensor:
        nonlocal params, state
        params, state, loss = step(params, state, batch)
        return loss

    return run
