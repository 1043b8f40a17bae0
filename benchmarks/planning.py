"""Compares estimates of training steps with published figures, none of which was used to make them.

    .venv/bin/python -m benchmarks.planning

A Llama over "fsdp" and "tp": float32 shards gathered a layer ahead in bfloat16, every layer
recomputed, positions sharded between the layers where "tp" has several ranks, AdamW and clipping.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import optree
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import Mesh, P, R, S, ShapeDtype, make_mesh, nn, shard_map, value_and_grad
from shardmap_torch.optim import adamw, clip_by_global_norm, sync_gradients
from shardmap_torch.planning import A100, H100, Estimate, Hardware, estimate

Params = Any


@dataclass(frozen=True)
class Llama:
    """Sizes of a Llama."""

    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int

    def shapes(self) -> Params:
        d, k = self.width, self.width // self.heads
        layer = {
            "attention_norm": (d,),
            "q": (d, self.heads, k),
            "kv": (d, self.key_heads, 2, k),
            "out": (self.heads, k, d),
            "mlp_norm": (d,),
            "gate_up": (d, self.hidden, 2),
            "down": (self.hidden, d),
        }
        return {
            "embedding": (self.vocabulary, d),
            "layers": [layer] * self.layers,
            "norm": (d,),
            "unembedding": (d, self.vocabulary),
        }


LAYER: Final = {
    "attention_norm": P("fsdp", replicate="tp"),
    "q": P("fsdp", "tp"),
    "kv": P("fsdp", "tp"),
    "out": P("tp", None, "fsdp"),
    "mlp_norm": P("fsdp", replicate="tp"),
    "gate_up": P("fsdp", "tp"),
    "down": P("tp", "fsdp"),
}


def specs_of(llama: Llama) -> Params:
    return {
        "embedding": P("tp", "fsdp"),
        "layers": [LAYER] * llama.layers,
        "norm": P("fsdp", replicate="tp"),
        "unembedding": P("fsdp", "tp"),
    }


def block(w: Params, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """x [b, t/tp, d] -> the same."""
    h = nn.rms_norm(x, w["attention_norm"], "tp", weight_type=R)
    q, kv = nn.column_linear(h, [w["q"], w["kv"]], "tp", src=S(1), overlap="off")
    key, value = kv.unbind(-2)
    made = nn.attention(nn.rotary(q, tables), nn.rotary(key, tables), value, causal=True)
    x = x + nn.row_linear(made, w["out"], "tp", dst=S(1), overlap="off")
    h = nn.rms_norm(x, w["mlp_norm"], "tp", weight_type=R)
    gate, up = nn.column_linear(h, w["gate_up"], "tp", src=S(1), overlap="off").unbind(-1)
    return x + nn.row_linear(functional.silu(gate) * up, w["down"], "tp", dst=S(1), overlap="off")


def loss_of(params: Params, batch: Tensor, llama: Llama) -> Tensor:
    """Batch [b, t + 1] -> mean nats a token."""
    params = optree.tree_map(lambda p: p.bfloat16(), params)
    tokens, targets = batch[:, :-1], batch[:, 1:]
    specs = specs_of(llama)
    first = nn.fsdp_gather(params["embedding"], specs["embedding"], "fsdp")
    x = nn.vocab_parallel_embedding(tokens, first, "tp", dst=S(1))
    at = nn.positions(tokens.shape[1])
    tables = nn.rotary_tables(at, llama.width // llama.heads, dtype=torch.bfloat16)
    x = nn.fsdp_layers(block, params["layers"], x, tables, specs=LAYER, axis="fsdp")
    names = ("norm", "unembedding")
    last = nn.fsdp_gather({n: params[n] for n in names}, {n: specs[n] for n in names}, "fsdp")
    x = nn.rms_norm(x, last["norm"], "tp", weight_type=R)
    logits = nn.column_linear(x, last["unembedding"], "tp", src=S(1), overlap="off")
    return nn.vocab_parallel_cross_entropy(
        logits.float(), targets, "tp", batch_axis="fsdp", ignore_index=None
    )


def build(mesh: Mesh, llama: Llama, batch: int, length: int) -> tuple[Callable[..., Any], Any]:
    """Returns a step, and the shapes of its arguments; `batch` is that of a rank of "fsdp"."""
    specs, optimizer = specs_of(llama), adamw(1e-4, weight_decay=0.1)
    state_specs = optimizer.specs(specs)

    def step(params: Params, state: Any, tokens: Tensor) -> tuple[Params, Any, Tensor]:
        value, grads = value_and_grad(loss_of)(params, tokens, llama)
        grads = sync_gradients(grads, specs)
        grads, _ = clip_by_global_norm(grads, specs, 1.0)
        return *optimizer.update(params, grads, state), value

    in_specs, out_specs = (specs, state_specs, P("fsdp")), (specs, state_specs, P())
    mapped = shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    params = optree.tree_map(ShapeDtype, llama.shapes(), is_leaf=lambda x: isinstance(x, tuple))
    state = {"step": ShapeDtype((), torch.int64), "exp_avg": params, "exp_avg_sq": params}
    tokens = ShapeDtype((batch * mesh.shape["fsdp"], length + 1), torch.int64)
    return mapped, (params, state, tokens)


LLAMA_3_8B: Final = Llama(4096, 32, 32, 8, 14336, 128256)
LLAMA_3_70B: Final = Llama(8192, 80, 64, 8, 28672, 128256)
LLAMA_2_70B: Final = Llama(8192, 80, 64, 8, 28672, 32000)
LLAMA_3_405B: Final = Llama(16384, 126, 128, 8, 53248, 128256)

META: Final = replace(H100, name="H100 96 GB HBM2e", memory=96 * 10**9, bandwidth=2.4e12)
"""Meta's Grand Teton, as torchtitan describes it; its limit of 500 W is not in the figures."""


@dataclass(frozen=True)
class Published:
    """One figure: tokens a second and device, all of them torchtitan's, with full recomputation."""

    model: str
    llama: Llama
    hardware: Hardware
    ranks: tuple[int, int]
    batch: int
    length: int
    tokens: float
    source: str


ROWS: Final = (
    Published("Llama 3 70B", LLAMA_3_70B, A100, (64, 1), 1, 8192, 331, "performance.md, A100"),
    Published("Llama 2 70B", LLAMA_2_70B, A100, (64, 1), 2, 4096, 353, "performance.md, A100"),
    Published("Llama 3.1 405B", LLAMA_3_405B, META, (16, 8), 2, 8192, 109, "performance.md, H100"),
    Published(
        "Llama 3 70B, compiled", LLAMA_3_70B, META, (32, 8), 16, 8192, 597.3,
        "benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md",
    ),
)  # fmt: skip


def main() -> None:
    """Prints a line for each figure."""
    print(f"{'model':24} {'fsdp x tp':>9} {'tokens/s':>9} {'published':>9} {'ratio':>6}  memory")
    for row in ROWS:
        start = time.perf_counter()
        found = estimate_of(row)
        tokens = row.batch * row.length / row.ranks[1] / found.seconds
        sizes = "x".join(map(str, row.ranks))
        print(
            f"{row.model:24} {sizes:>9} {tokens:9.0f} {row.tokens:9.0f} "
            f"{tokens / row.tokens:6.2f}  {found.peak / 2**30:.1f} GiB, "
            f"{found.utilization:.0%}, in {time.perf_counter() - start:.1f} s"
        )


def estimate_of(row: Published) -> Estimate:
    """Estimates the step of a row."""
    mesh = make_mesh(row.ranks, ("fsdp", "tp"), kind="abstract")
    step, args = build(mesh, row.llama, row.batch, row.length)
    return estimate(step, *args, hardware=row.hardware)


if __name__ == "__main__":
    main()
