"""Saves training state on one mesh and resumes it on another, of another shape or size.

    torchrun --nproc-per-node 4 examples/checkpoint_reshard.py --mesh 2x2     # trains and saves
    torchrun --nproc-per-node 4 examples/checkpoint_reshard.py --mesh 1x4     # resumes
    python examples/checkpoint_reshard.py --mesh 1x1                          # on one device

Every rank writes the pieces that it holds, and reads those that it needs: nothing is gathered.
"""

import argparse
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from examples.gpt import data, model
from examples.gpt.model import Config
from examples.gpt.optim import AdamW
from examples.gpt.step import sharded_step
from shardmap_torch import Mesh, P, device_put, make_mesh

State: TypeAlias = Any
"""A pytree: parameters, and the optimiser's moments and step."""

CONFIG = Config(length=32, width=32, heads=4, hidden=64, layers=2)
OPTIMIZER = AdamW(steps=1000)


def init() -> State:
    """Global values to start from."""
    params = model.init(CONFIG)
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def specs() -> State:
    """How they are cut, whatever the mesh."""
    params = model.specs(CONFIG)
    return {"params": params, "optimizer": OPTIMIZER.specs(params)}


def save(state: State, folder: Path) -> None:
    """Writes every leaf under its path; each piece by one of the ranks that hold it."""
    with _one_process_is_fine():
        state_dict_saver.save(_by_path(state), checkpoint_id=folder)


def load(folder: Path, mesh: Mesh, like: State) -> State:
    """Reads a state of the shapes of `like`, cut for `mesh`."""
    empty = optree.tree_map(torch.empty_like, like)
    state = device_put(empty, mesh, specs())
    # Filling memory that nothing else refers to: from outside this is a pure function.
    with _one_process_is_fine():
        state_dict_loader.load(_by_path(state), checkpoint_id=folder)
    return state


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _by_path(state: State) -> dict[str, Tensor]:
    paths, leaves = optree.tree_paths(state), optree.tree_leaves(state)
    named = zip(paths, leaves, strict=True)
    return {".".join(map(str, path)): leaf for path, leaf in named}


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
    latest = max(options.folder.glob("step-*"), default=None)
    start = load(latest, mesh, init()) if latest else device_put(init(), mesh, specs())
    first = int(start["optimizer"]["step"])
    state, losses = train(start, mesh, options.steps)
    save(state, options.folder / f"step-{first + options.steps:06}")
    if mesh.rank == 0:
        for number, loss in enumerate(losses, start=first + 1):
            print(f"{mesh} step {number} loss {loss:.6f}")


if __name__ == "__main__":
    main()
