"""torchtitan's Llama block: tensor and sequence parallel by its plan, with FSDP over "dp".

Source: `apply_tp` of torchtitan/models/llama3/infra/parallelize.py, whose plan shards the sequence
at the norms (SequenceParallel), gathers it before the projections (PrepareModuleInput) and scatters
the sums behind them (RowwiseParallel(output_layouts=Shard(1))); `fully_shard` of each block.
"""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import I, Mesh, P, R, V, all_gather, all_reduce, convert, reduce_scatter
from tests.programs.support.everywhere import run_on
from tests.programs.support.harness import random
from tests.programs.support.ported import Params, compare
from tests.support.pool import Gloo

Move = Callable[[Tensor], Tensor]

BATCH, LENGTH, WIDTH, HEADS, GROUPS, HIDDEN = 4, 4, 16, 4, 2, 8
HEAD: Final = WIDTH // HEADS
SHAPES: Final[dict[str, tuple[int, ...]]] = {
    **{"wq": (WIDTH, WIDTH), "wk": (GROUPS * HEAD, WIDTH), "wv": (GROUPS * HEAD, WIDTH)},
    **{"wo": (WIDTH, WIDTH), "w1": (HIDDEN, WIDTH), "w3": (HIDDEN, WIDTH), "w2": (WIDTH, HIDDEN)},
    **{"attention_norm": (WIDTH,), "ffn_norm": (WIDTH,)},
}
COLUMNS: Final = P(("tp", "dp"))
SPECS: Final = {
    **dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), COLUMNS),
    **dict.fromkeys(("wo", "w2"), P("dp", "tp")),
    **dict.fromkeys(("attention_norm", "ffn_norm"), P("dp")),
}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def rotated(x: Tensor) -> Tensor:
    """Rotates pairs of x [b, t, h, d] by their positions."""
    rates = 10000.0 ** -(torch.arange(0, HEAD, 2, dtype=x.dtype) / HEAD)
    angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), rates)[:, None]
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def attention(x: Tensor, p: Params) -> Tensor:
    projected = [functional.linear(x, p[name]) for name in ("wq", "wk", "wv")]
    q, k, v = (each.unflatten(-1, (-1, HEAD)) for each in projected)
    q, k, v = (each.transpose(1, 2) for each in (rotated(q), rotated(k), v))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return functional.linear(y.transpose(1, 2).flatten(-2), p["wo"])


def block(p: Params, x: Tensor, enter: Move, leave: Move) -> Tensor:
    x = x + leave(attention(enter(norm(x, p["attention_norm"])), p))
    h = enter(norm(x, p["ffn_norm"]))
    gate = functional.silu(functional.linear(h, p["w1"]))
    return x + leave(functional.linear(gate * functional.linear(h, p["w3"]), p["w2"]))


def original(p: Params, x: Tensor, y: Tensor) -> Tensor:
    return (block(p, x, lambda h: h, lambda h: h) - y).square().mean()


def parallel(p: Params, x: Tensor, y: Tensor) -> Tensor:
    def gathered(name: str) -> Tensor:
        weight = all_gather(p[name], "dp", dim=0, dst=R)
        # The norms see a part of the sequence, so that each rank has an addend of their gradient.
        return convert(weight, "tp", src=I, dst=R) if name.endswith("norm") else weight

    def enter(h: Tensor) -> Tensor:
        return all_gather(h, "tp", dim=1, dst=R)

    def leave(h: Tensor) -> Tensor:
        return reduce_scatter(h, "tp", dim=1)

    x, y = convert((x, y), "tp", src=I, dst=V, dim=1)
    out = block({name: gathered(name) for name in p}, x, enter, leave)
    return all_reduce((out - y).square().mean(), ("dp", "tp"), op="mean", dst=I)


def everything(mesh: Mesh) -> None:
    params = {name: random(shape, len(name)) / 4 for name, shape in SHAPES.items()}
    data = random((BATCH, LENGTH, WIDTH), 1), random((BATCH, LENGTH, WIDTH), 2)
    in_specs: Any = (SPECS, P("dp"), P("dp"))
    for check in (True, "global"):
        compare(mesh, parallel, original, params, data, in_specs, check)


@pytest.mark.parametrize("kind", ["ranks", "gloo"])
def test_the_block_is_that_of_one_device_in_both_modes(kind: str, gloo: Gloo) -> None:
    run_on(kind, everything, gloo, (2, 2), ("dp", "tp"))
