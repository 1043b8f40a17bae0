"""Checks the GPT per rank as it is: `python -m examples.megatron_style.check`.

The only lines about sharding are the specs of parameters and data. Under `check="global"` the ranks
together compute, gradients included, what one device computes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from examples.megatron_style.model import GPT, Config
from shardmap_torch import Mesh, P, axis_group, make_mesh, shard_map

COLUMNS = ("qkv.weight", "qkv.bias", "up.weight", "up.bias")
ROWS = ("proj.weight", "down.weight")


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all parameters."""
    width = config.width
    found: dict[str, tuple[int, ...]] = {
        "words": (config.vocabulary, width),
        "positions": (config.length, width),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    for layer in range(config.layers):
        rows = {"qkv": (3 * width, width), "proj": (width, width)}
        rows |= {"up": (4 * width, width), "down": (width, 4 * width)}
        for name, shape in rows.items():
            found |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            found[f"{layer}.{name}"] = (width,)
    return found


def specs(config: Config) -> dict[str, P]:
    """Returns how parameters are sharded over "tp"; over "dp" each rank has all of them.

    With sequence parallelism norms and biases work on the rank's tokens, so that their gradients
    are summed over "tp" too.
    """

    def spec(name: str) -> P:
        if name == "words" or name.endswith(COLUMNS):
            return P("tp", replicate={"dp"})
        if name.endswith(ROWS):
            return P(None, "tp", replicate={"dp"})
        is_whole = name == "positions" or not config.sequence_parallel
        return P(replicate={"dp"} if is_whole else {"dp", "tp"})

    return {name: spec(name) for name in shapes(config)}


def parameters(config: Config) -> dict[str, Tensor]:
    """Returns random parameters in 64 bits."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3
        for name, shape in shapes(config).items()
    }


def loss_on(mesh: Mesh, config: Config, check: Any = "global") -> Callable[..., Tensor]:
    """Returns the loss as a function of global parameters, tokens and targets."""
    model = GPT(config, axis_group(mesh, "tp"), axis_group(mesh, "dp"))
    in_specs = (specs(config), P(None, "dp"), P(None, "dp"))
    mapped: Callable[..., Tensor] = shard_map(
        model.loss, mesh=mesh, in_specs=in_specs, out_specs=P(), check=check
    )
    return mapped


def main() -> None:
    """Checks the model, and compares its gradients with those of one rank."""
    for sequence_parallel in (False, True):
        config = Config(16, 8, 2, 1, 4, sequence_parallel)
        tokens = torch.arange(16).view(4, 4) * 5 % 16
        found = []
        for shape in ((2, 2), (1, 1)):
            mesh = make_mesh(shape, ("dp", "tp"), kind="simulated")
            params = {name: x.requires_grad_() for name, x in parameters(config).items()}
            loss = loss_on(mesh, config)(params, tokens, (tokens + 1) % 16)
            found.append((loss, *torch.autograd.grad(loss, list(params.values()))))
        apart = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
        print(f"sequence_parallel={sequence_parallel}: loss {float(found[0][0]):.6f},", end=" ")
        print(f"4 ranks and one device differ by {apart:.0e}")


if __name__ == "__main__":
    main()
