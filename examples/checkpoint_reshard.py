"""Saves training state on one mesh and resumes it on another, of another shape or size.

    torchrun --nproc-per-node 4 examples/checkpoint_reshard.py --mesh 2x2     # trains and saves
    torchrun --nproc-per-node 4 examples/checkpoint_reshard.py --mesh 1x4     # resumes
    python examples/checkpoint_reshard.py --mesh 1x1                          # on one device

Every rank writes the shards that it holds, and reads those that it needs: nothing is gathered.
A kill at any moment leaves a complete checkpoint or none.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, TypeAlias

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from examples.gpt import data, model
from examples.gpt.model import Config
from examples.gpt.optim import make_optimizer
from examples.gpt.step import sharded_step
from shardmap_torch import Mesh, P, device_put, make_mesh
from shardmap_torch.saving import latest, load, save

State: TypeAlias = Any
"""A pytree: parameters, and the optimiser's moments and step."""

CONFIG = Config(length=32, width=32, heads=4, hidden=64, layers=2)
OPTIMIZER = make_optimizer(CONFIG, steps=1000)


def init() -> State:
    """Global values to start from."""
    params = model.init(CONFIG)
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def specs() -> State:
    """Returns how each leaf is sharded, whatever the mesh."""
    params = model.specs(CONFIG)
    return {"params": params, "optimizer": OPTIMIZER.specs(params)}


def train(state: State, mesh: Mesh, steps: int) -> tuple[State, list[float]]:
    """Goes on from the state's step, whose number says which batch comes next."""
    step = sharded_step(mesh, CONFIG, OPTIMIZER)
    text = torch.tensor(list(data.load_text()))
    losses = []
    for _ in range(steps):
        seed = int(state["optimizer"]["step"])
        batch = device_put(data.sample_batch(text, CONFIG.length, 8, seed), mesh, P("dp"))
        params, optimizer, loss = step(state["params"], state["optimizer"], batch)
        state = {"params": params, "optimizer": optimizer}
        losses.append(loss.item())
    return state, losses


def main(arguments: list[str] | None = None) -> None:
    """Trains a few steps, from the checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mesh", default="2x2", help="ranks: data parallel x tensor parallel")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("out/checkpoint"))
    options = parser.parse_args(arguments)
    mesh = make_mesh([int(size) for size in options.mesh.split("x")], ("dp", "tp"))
    start = device_put(init(), mesh, specs())
    first = latest(options.folder) or 0
    if first:
        start = load(start, options.folder, first)
    state, losses = train(start, mesh, options.steps)
    save(state, options.folder, first + options.steps)
    if mesh.rank == 0:
        for number, loss in enumerate(losses, start=first + 1):
            print(f"{mesh} step {number} loss {loss:.6f}")


if __name__ == "__main__":
    main()
