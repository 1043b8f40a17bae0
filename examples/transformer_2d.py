"""A transformer layer on three mesh axes: 2-D weights, with attention and MLP in parallel.

The realistic layer of the design document of JAX's shard_map (JEP 14273), after Pope et al. 2022,
"Efficiently Scaling " "Transformer " "Inference", section 3.2: weights are sharded over two dims,
activations are gathered and scattered around the matmuls, and no rank ever holds a full weight.
The layer is PaLM's: one key and value head for all heads, SwiGLU, and both branches fused into two
matmuls.

    b batch   t time   e embed   h heads   q width of a query   f hidden width of a head

Run: python examples/transformer_2d.py
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from shardmap_torch import (
    Mesh,
    P,
    R,
    all_gather,
    all_reduce,
    full,
    make_mesh,
    reduce_scatter,
    shard_map,
    value_and_grad,
    visualize_sharding,
)
from shardmap_torch.nn import attention, positions, rotary

Params: TypeAlias = dict[str, Tensor]
AXES: Final = ("x", "y", "z")


@dataclass(frozen=True)
class Sizes:
    """x*y*z divides heads, x*y divides embed, z divides batch."""

    batch: int = 4
    time: int = 6
    embed: int = 16
    heads: int = 8
    query: int = 4
    hidden: int = 6


SPECS: Final = {
    "q_wi": P(("y", "z"), "x"),  # [h/yz, e/x, q + 2f]
    "kv": P("x"),  # [e/x, 2q], the same on all of y and z
    "o_wo": P(("y", "z"), None, "x"),  # [h/yz, q + f, e/x]
}
RESIDUAL: Final = P("z", None, ("x", "y"))  # [b/z, t, e/xy]
CACHE: Final = P(replicate=AXES)  # [b, t, q]


def init(sizes: Sizes, seed: int = 0) -> Params:
    """Global weights, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, inputs: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn / math.sqrt(inputs)

    e, h, q, f = sizes.embed, sizes.heads, sizes.query, sizes.hidden
    return {
        "q_wi": normal(h, e, q + 2 * f, inputs=e),
        "kv": normal(e, 2 * q, inputs=e),
        "o_wo": normal(h, q + f, e, inputs=h * (q + f)),
    }


def layer(params: Params, x: Tensor, embed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [b/z, t, e/xy] -> the same shape, and keys and values [b, t, q] for a cache."""
    normed = x * torch.rsqrt(all_reduce(x.square().sum(-1, True), ("x", "y"), dst=R) / embed)
    normed = all_gather(all_gather(normed, "z", dim=0, dst=R), "y", dim=2, dst=R)  # [b, t, e/x]

    q_wi = torch.einsum("bte,hed->bthd", normed, params["q_wi"])  # [b, t, h/yz, d], part of a sum
    q_wi = reduce_scatter(q_wi, "x", dim=2)  # [b, t, h/yzx, d]
    kv = all_reduce(torch.einsum("bte,ed->btd", normed, params["kv"]), "x", dst=R)
    fused, k, v = attend_and_activate(q_wi, kv)

    fused = all_gather(fused, "x", dim=2, dst=R)  # [b, t, h/yz, q + f]
    y = torch.einsum("bthd,hde->bte", fused, params["o_wo"])  # [b, t, e/x], part of a sum
    y = reduce_scatter(reduce_scatter(y, "y", dim=2), "z", dim=0)  # [b/z, t, e/xy]
    return x + y, k, v


def plain_layer(params: Params, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the layer on one device: x [b, t, e]."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True))
    q_wi = torch.einsum("bte,hed->bthd", normed, params["q_wi"])
    fused, k, v = attend_and_activate(q_wi, normed @ params["kv"])
    return x + torch.einsum("bthd,hde->bte", fused, params["o_wo"]), k, v


def attend_and_activate(q_wi: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Attention and SwiGLU of some heads: [b, t, h, q + 2f] and [b, t, 2q] -> [b, t, h, q + f]."""
    k, v = kv.chunk(2, -1)
    at = positions(kv.shape[1], device=kv.device)
    k = rotary(k.unsqueeze(2), at).squeeze(2)
    query, hidden = k.shape[-1], (q_wi.shape[-1] - k.shape[-1]) // 2
    q, gate, up = q_wi.split([query, hidden, hidden], -1)
    one_head = k.unsqueeze(2), v.unsqueeze(2)  # keys and values that all query heads share
    attended = attention(rotary(q, at), *one_head, causal=True)
    return torch.cat([attended, functional.silu(gate) * up], -1), k, v


def outputs_and_grads(
    params: Params, x: Tensor, mesh: Mesh | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, and gradients of a function of all of them; on one device without a mesh."""
    sharded = shard_map(
        layer, mesh=mesh, in_specs=(SPECS, RESIDUAL, None), out_specs=(RESIDUAL, CACHE, CACHE)
    )

    def total(params: Params, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        if mesh is None:
            outputs = plain_layer(params, x)
        else:
            outputs = full(sharded(params, x, x.shape[-1]))
        return torch.stack([y.square().sum() for y in outputs]).sum(), outputs

    (_, outputs), (grads, x_grad) = value_and_grad(total, (0, 1), has_aux=True)(params, x)
    return dict(zip(("out", "keys", "values"), outputs, strict=True)), {**grads, "x": x_grad}


def example(sizes: Sizes, seed: int = 0) -> tuple[Params, Tensor]:
    """Weights and an input."""
    generator = torch.Generator().manual_seed(seed + 1)
    shape = sizes.batch, sizes.time, sizes.embed
    return init(sizes, seed), torch.randn(shape, generator=generator, dtype=torch.float64)


def main() -> None:
    """Shows how the layer is sharded, and that it equals the plain one."""
    console = Console()
    mesh = make_mesh((2, 2, 2), AXES, kind="simulated")
    params, x = example(Sizes())
    console.print("q_wi [heads, embed, q + 2f]", style="bold", markup=False, highlight=False)
    visualize_sharding(params["q_wi"], mesh=mesh, spec=SPECS["q_wi"], console=console)
    console.print("\nresidual [batch, time, embed]", style="bold", markup=False, highlight=False)
    visualize_sharding(x, mesh=mesh, spec=RESIDUAL, console=console)
    for what, sharded, plain in zip(
        ("output", "gradient of"),
        outputs_and_grads(params, x, mesh),
        outputs_and_grads(params, x, None),
        strict=True,
    ):
        for name, value in plain.items():
            error = (sharded[name] - value).abs().max().item()
            torch.testing.assert_close(sharded[name], value, rtol=1e-10, atol=1e-10)
            console.print(f"{what} {name} equals one device's up to {error:.0e}")


if __name__ == "__main__":
    main()
