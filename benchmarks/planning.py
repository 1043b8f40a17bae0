"""Compares estimates of training steps with published figures, none of which was used to make them.

    .venv/bin/python -m benchmarks.planning
    .venv/bin/python -m benchmarks.planning torchtitan  # rows of this source alone
    .venv/bin/python -m benchmarks.planning meshes      # best_mesh beside what authors chose
    .venv/bin/python -m benchmarks.planning times       # seconds of estimates and of a search

A Llama, or a GPT, over "fsdp" and "tp", and "dp" and "cp" if the mesh has them: float32 shards
gathered a layer ahead in bfloat16, layers recomputed as the row says, positions sharded between the
layers where "tp" has several ranks, AdamW and clipping. Steps that accumulate gradients are
estimated for one microbatch.
"""

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import optree
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    S,
    ShapeDtype,
    SpecError,
    all_gather,
    all_reduce,
    axis_size,
    make_mesh,
    nn,
    save_results,
    shard_map,
    value_and_grad,
)
from shardmap_torch.optim import adamw, clip_by_global_norm, sync_gradients
from shardmap_torch.planning import A100, H100, Estimate, Hardware, best_mesh, estimate
from shardmap_torch.planning.dry_run import Block, DryRun

Params = Any


@dataclass(frozen=True)
class Llama:
    """Sizes of a decoder: a Llama, or a GPT whose MLP has no gate and whose positions are free.

    Attention is `fused`, or writes its scores to memory, as it was before FlashAttention.
    """

    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    gated: bool = True
    fused: bool = True

    def shapes(self) -> Params:
        d, k = self.width, self.width // self.heads
        layer = {
            "attention_norm": (d,),
            "q": (d, self.heads, k),
            "k": (d, self.key_heads, k),
            "v": (d, self.key_heads, k),
            "out": (self.heads, k, d),
            "mlp_norm": (d,),
            "down": (self.hidden, d),
        }
        layer |= dict.fromkeys(("gate", "up") if self.gated else ("up",), (d, self.hidden))
        return {
            "embedding": (self.vocabulary, d),
            "layers": [layer] * self.layers,
            "norm": (d,),
            "unembedding": (d, self.vocabulary),
        }


Recompute: TypeAlias = Literal["full", "op", "compiled op", "half", "none"]
"""Layers that a backward computes again: all; of each all but attention and every second matmul,
as torchtitan's selective recomputation "op" does; every second layer; nothing. A compiler saves no
last matmul of a layer, which no gradient needs."""

LAYER: Final = {
    "attention_norm": P("fsdp", replicate="tp"),
    "q": P("fsdp", "tp"),
    "k": P("fsdp", "tp"),
    "v": P("fsdp", "tp"),
    "out": P("tp", None, "fsdp"),
    "mlp_norm": P("fsdp", replicate="tp"),
    "down": P("tp", "fsdp"),
    "gate": P("fsdp", "tp"),
    "up": P("fsdp", "tp"),
}


def layer_specs(llama: Llama) -> Params:
    return {name: spec for name, spec in LAYER.items() if llama.gated or name != "gate"}


def specs_of(llama: Llama) -> Params:
    return {
        "embedding": P("tp", "fsdp"),
        "layers": [layer_specs(llama)] * llama.layers,
        "norm": P("fsdp", replicate="tp"),
        "unembedding": P("fsdp", "tp"),
    }


Tables: TypeAlias = tuple[Tensor, ...]
"""Cosines and sines; where sequences are sharded also which positions each one sees."""


ATEN: Final = torch.ops.aten
SAVED: Final = {ATEN.mm.default: 2, ATEN._scaled_dot_product_flash_attention_for_cpu.default: 1}
"""Every second matmul and attention, as torchtitan's `_save_list` has them."""


def block(
    w: Params, x: Tensor, tables: Tables, llama: Llama, recompute: Recompute = "full"
) -> Tensor:
    """x [b, t/tp, d] -> the same."""
    hidden = wide if recompute != "compiled op" else save_results(wide, SAVED)
    x, h = hidden(w, x, tables, llama)
    return x + nn.row_linear(h, w["down"], "tp", dst=S(1), overlap="off")


def wide(w: Params, x: Tensor, tables: Tables, llama: Llama) -> tuple[Tensor, Tensor]:
    """Returns x after attention, and the hidden values of the MLP."""
    cos, sin, *seen = tables
    h = nn.rms_norm(x, w["attention_norm"], "tp", weight_type=R)
    q, key, value = nn.column_linear(h, [w["q"], w["k"], w["v"]], "tp", src=S(1), overlap="off")
    if llama.gated:
        q, key = nn.rotary(q, (cos, sin)), nn.rotary(key, (cos, sin))
    if seen:  # as of Llama 3 (arXiv 2407.21783, section 3.3.2)
        key, value = (all_gather(each, "cp", dim=1, dst=R) for each in (key, value))
        made = nn.attention(q, key, value, mask=seen[0])
    elif llama.fused:
        made = nn.attention(q, key, value, causal=True)
    else:
        before = torch.ones(2 * [q.shape[1]], dtype=torch.bool).tril()
        made = nn.attention(q, key, value, mask=before)
    x = x + nn.row_linear(made, w["out"], "tp", dst=S(1), overlap="off")
    h = nn.rms_norm(x, w["mlp_norm"], "tp", weight_type=R)
    if not llama.gated:
        up = nn.column_linear(h, w["up"], "tp", src=S(1), overlap="off")
        return x, functional.gelu(up)
    gate, up = nn.column_linear(h, [w["gate"], w["up"]], "tp", src=S(1), overlap="off")
    return x, functional.silu(gate) * up


def run_layers(
    layers: Sequence[Params], x: Tensor, tables: Tables, llama: Llama, recompute: Recompute
) -> Tensor:
    """Runs all layers; gathers each a layer ahead."""
    layer: Callable[..., Tensor] = partial(block, llama=llama, recompute=recompute)
    layer = save_results(layer, SAVED) if recompute == "op" else layer
    run = partial(nn.fsdp_layers, layer, specs=layer_specs(llama), axis="fsdp")
    if recompute != "half":
        return run(layers, x, tables, recompute=recompute != "none")
    for at, each in enumerate(layers):
        x = run([each], x, tables, recompute=at % 2 == 1)
    return x


def loss_of(
    params: Params, batch: Tensor, llama: Llama, recompute: Recompute, others: tuple[str, ...]
) -> Tensor:
    """Batch [2, b, t/cp] of tokens and targets -> mean nats a token."""
    params = optree.tree_map(lambda p: p.bfloat16(), params)
    tokens, targets = batch
    names = ("embedding", "norm", "unembedding")
    specs = specs_of(llama)
    root = nn.fsdp_gather({n: params[n] for n in names}, {n: specs[n] for n in names}, "fsdp")
    x = nn.vocab_parallel_embedding(tokens, root["embedding"], "tp", dst=S(1))
    tables = tables_of(tokens.shape[1], llama, others)
    x = run_layers(params["layers"], x, tables, llama, recompute)
    x = nn.rms_norm(x, root["norm"], "tp", weight_type=R)
    logits = nn.column_linear(x, root["unembedding"], "tp", src=S(1), overlap="off")
    if axis_size("tp") == 1:
        nats = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return all_reduce(nats, ("fsdp", "tp", *others), op="mean", dst=I)
    return nn.vocab_parallel_cross_entropy(
        logits.float(), targets, "tp", batch_axis=("fsdp", *others), ignore_index=None
    )


def tables_of(length: int, llama: Llama, others: tuple[str, ...]) -> Tables:
    """Returns what all layers share, for so many positions of this rank."""
    everything = nn.positions(length * axis_size("cp")) if "cp" in others else nn.positions(length)
    at = nn.positions(len(everything), "cp") if "cp" in others else everything
    tables = nn.rotary_tables(at, llama.width // llama.heads, dtype=torch.bfloat16)
    return (*tables, at[:, None] >= everything) if "cp" in others else tables


def others_of(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes beside "fsdp" and "tp", over which all parameters are equal."""
    return tuple(axis for axis in ("dp", "cp") if axis in mesh.shape)


def batch_spec(mesh: Mesh) -> P:
    """Returns the spec of tokens and targets [2, b, t]."""
    others = others_of(mesh)
    rows = ("dp", "fsdp") if "dp" in others else "fsdp"
    return P(None, rows, "cp") if "cp" in others else P(None, rows)


def build(
    mesh: Mesh,
    llama: Llama,
    batch: int,
    length: int,
    recompute: Recompute = "full",
    donates: bool = False,
) -> tuple[Callable[..., Any], Any]:
    """Returns a step, and the shapes of its arguments; `batch` is that of a rank of "fsdp".

    With `donates` the optimizer updates in place, as those of published steps do.
    """
    specs, optimizer = specs_of(llama), adamw(1e-4, weight_decay=0.1)
    state_specs, others = optimizer.specs(specs), others_of(mesh)

    def step(params: Params, state: Any, batch: Tensor) -> tuple[Params, Any, Tensor]:
        value, grads = value_and_grad(loss_of)(params, batch, llama, recompute, others)
        grads = sync_gradients(grads, specs, others)
        grads, _ = clip_by_global_norm(grads, specs, 1.0)
        return *optimizer.update(params, grads, state, in_place=donates), value

    in_specs, out_specs = (specs, state_specs, batch_spec(mesh)), (specs, state_specs, P())
    donate = ("params", "state") if donates else ()
    mapped = shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, donate=donate)
    params = optree.tree_map(ShapeDtype, llama.shapes(), is_leaf=lambda x: isinstance(x, tuple))
    state = {"step": ShapeDtype((), torch.int64), "exp_avg": params, "exp_avg_sq": params}
    num_rows = batch * mesh.shape["fsdp"] * mesh.shape.get("dp", 1)
    return mapped, (params, state, ShapeDtype((2, num_rows, length), torch.int64))


LLAMA_3_8B: Final = Llama(4096, 32, 32, 8, 14336, 128256)
LLAMA_3_70B: Final = Llama(8192, 80, 64, 8, 28672, 128256)
LLAMA_2_13B: Final = Llama(5120, 40, 40, 40, 13824, 32000)
LLAMA_2_70B: Final = Llama(8192, 80, 64, 8, 28672, 32000)
LLAMA_3_405B: Final = Llama(16384, 126, 128, 8, 53248, 128256)


def mpt(width: int, layers: int, heads: int) -> Llama:
    vocabulary = 50432  # 50,368, rounded up for 64 shards
    return Llama(width, layers, heads, heads, 4 * width, vocabulary, gated=False)


def gpt(width: int, layers: int, heads: int) -> Llama:
    return Llama(width, layers, heads, heads, 4 * width, 51200, gated=False, fused=False)


META: Final = replace(H100, name="H100 96 GB HBM2e", memory=96 * 10**9, bandwidth=2.4e12)
"""Meta's Grand Teton, as torchtitan describes it; its limit of 500 W is not in the figures."""

ORACLE: Final = replace(A100, between=25e9)
"""A100 hosts with 1,600 Gb/s between them, as MosaicML has them."""


@dataclass(frozen=True)
class Published:
    """One figure: tokens a second and device, and GiB of memory where they are published."""

    source: str
    hardware: Hardware
    model: str
    llama: Llama
    ranks: tuple[int, int]
    batch: int
    length: int
    recompute: Recompute
    tokens: float
    memory: float | None = None


def _rows(source: str, hardware: Hardware, *rows: tuple[Any, ...]) -> list[Published]:
    return [Published(source, hardware, *row) for row in rows]


def _megatron(
    name: str, llama: Llama, ranks: tuple[int, int], batch: int, teraflops: float
) -> Published:
    """Reads a row of table 1, whose FLOPs count what is recomputed, and full attention."""
    s, v, h, depth = 2048, 51200, llama.width, llama.layers
    each = 96 * s * depth * h**2 * (1 + s / (6 * h) + v / (16 * depth * h)) / s
    return Published(MEGATRON, A100, name, llama, ranks, batch, s, "full", teraflops * 1e12 / each)


TITAN_A100: Final = "torchtitan, docs/performance.md at 0413364"
TITAN_2024: Final = "torchtitan, benchmarks/llama3_h100_202412"
TITAN_2025: Final = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06"
TITAN_405B: Final = "torchtitan, docs/performance.md, autumn 2024"
MOSAIC: Final = "llm-foundry, scripts/train/benchmarking at 061f2c7"
MEGATRON: Final = "Megatron-LM, arXiv 2104.04473, table 1"
MAXTEXT: Final = "NVIDIA DGXC benchmarking, MaxText Llama 3 70B 25.02"

ROWS: Final = (
    *_rows(TITAN_A100, A100,
        ("Llama 3 8B", LLAMA_3_8B, (64, 1), 1, 8192, "half", 2904),
        ("Llama 3 8B", LLAMA_3_8B, (64, 1), 1, 8192, "op", 2973),
        ("Llama 3 70B", LLAMA_3_70B, (64, 1), 1, 8192, "full", 331),
        ("Llama 2 13B", LLAMA_2_13B, (64, 1), 2, 4096, "none", 2162),
        ("Llama 2 13B", LLAMA_2_13B, (64, 1), 2, 4096, "half", 1914),
        ("Llama 2 13B", LLAMA_2_13B, (64, 1), 2, 4096, "op", 1904),
        ("Llama 2 70B", LLAMA_2_70B, (64, 1), 1, 4096, "op", 355),
        ("Llama 2 70B", LLAMA_2_70B, (64, 1), 2, 4096, "full", 353),
    ),
    *_rows(TITAN_405B, META,
        ("Llama 3 405B", LLAMA_3_405B, (16, 8), 2, 8192, "full", 109),
    ),
    *_rows(TITAN_2024, META,
        ("Llama 3 8B", LLAMA_3_8B, (8, 1), 2, 8192, "op", 5762, 82.4),
        ("Llama 3 8B, compiled", LLAMA_3_8B, (8, 1), 2, 8192, "compiled op", 6667, 77.0),
        ("Llama 3 8B", LLAMA_3_8B, (128, 1), 2, 8192, "op", 5605, 67.0),
        ("Llama 3 8B, compiled", LLAMA_3_8B, (128, 1), 2, 8192, "compiled op", 6514, 62.0),
    ),
    *_rows(TITAN_2025, META,
        ("Llama 3 70B, compiled", LLAMA_3_70B, (32, 8), 16, 8192, "full", 597.3),
        ("Llama 3 8B, compiled", LLAMA_3_8B, (8, 8), 12, 8192, "compiled op", 4378),
    ),
    *_rows(MAXTEXT, H100,
        ("Llama 3 70B, compiled", LLAMA_3_70B, (128, 1), 2, 8192, "full", 1052),
    ),
    *_rows(MOSAIC, H100,
        ("MPT 70B", mpt(8192, 80, 64), (64, 1), 8, 2048, "full", 1039),
        ("MPT 70B", mpt(8192, 80, 64), (32, 1), 2, 2048, "full", 882),
        ("MPT 30B", mpt(7168, 48, 56), (32, 1), 14, 2048, "full", 2308),
        ("MPT 30B", mpt(7168, 48, 56), (8, 1), 3, 2048, "full", 2002),
        ("MPT 13B", mpt(5120, 40, 40), (64, 1), 2, 2048, "none", 4800),
        ("MPT 13B", mpt(5120, 40, 40), (8, 1), 2, 2048, "none", 4792),
        ("MPT 7B", mpt(4096, 32, 32), (8, 1), 6, 2048, "none", 10643),
        ("MPT 3B", mpt(2560, 32, 20), (64, 1), 6, 2048, "none", 22525),
    ),
    *_rows(MOSAIC, ORACLE,
        ("MPT 70B", mpt(8192, 80, 64), (64, 1), 8, 2048, "full", 410),
        ("MPT 70B", mpt(8192, 80, 64), (32, 1), 2, 2048, "full", 373),
        ("MPT 30B", mpt(7168, 48, 56), (8, 1), 3, 2048, "full", 916),
        ("MPT 13B", mpt(5120, 40, 40), (8, 1), 2, 2048, "none", 2262),
        ("MPT 7B", mpt(4096, 32, 32), (8, 1), 6, 2048, "none", 4641),
        ("MPT 3B", mpt(2560, 32, 20), (8, 1), 10, 2048, "none", 10811),
    ),
    _megatron("GPT 1.7B", gpt(2304, 24, 24), (32, 1), 16, 137),
    _megatron("GPT 3.6B", gpt(3072, 30, 32), (32, 2), 16, 138),
    _megatron("GPT 7.5B", gpt(4096, 36, 32), (32, 4), 16, 142),
    _megatron("GPT 18.4B", gpt(6144, 40, 48), (32, 8), 32, 135),
)  # fmt: skip
"""All of them bfloat16 or float16, without float8, pipelines and asynchronous tensor parallelism.

Of MosaicML's tables the models of 3B and more at length 2048, on the most and the fewest devices.
"""


def main() -> None:
    """Prints a line for each figure, and how many are near."""
    print(f"{'model':22} {'fsdp x tp':>9} recomputed  tokens/s  published  ratio  memory")
    ratios = []
    words = {*sys.argv[1:]}
    chosen = [row for row in ROWS if words <= {*row.source.replace(",", "").split()}]
    for row in chosen:
        start = time.process_time()
        found = estimate_of(row)
        tokens = row.batch * row.length / row.ranks[1] / found.seconds
        ratios.append(tokens / row.tokens)
        sizes = "x".join(map(str, row.ranks))
        memory = ""
        if row.memory is not None:
            memory = f", {reserved(found.run) / 2**30:.1f} reserved of {row.memory:.1f}"
        print(
            f"{row.model:22} {sizes:>9} {row.recompute:10} {tokens:9.0f} {row.tokens:10.0f} "
            f"{ratios[-1]:6.2f}  {found.peak / 2**30:.1f}{memory} GiB, {row.hardware.name}, "
            f"{row.source}; {time.process_time() - start:.1f} s",
            flush=True,
        )
    near = sum(abs(ratio - 1) <= 0.25 for ratio in ratios)
    print(f"{near} of {len(ratios)} within 25%")


def estimate_of(row: Published) -> Estimate:
    """Estimates the step of a row."""
    mesh = make_mesh(row.ranks, ("fsdp", "tp"), kind="abstract")
    step, args = build(mesh, row.llama, row.batch, row.length, row.recompute, donates=True)
    return estimate(step, *args, hardware=row.hardware)


def reserved(run: DryRun) -> int:
    """Returns the bytes that torchtitan reports: what the allocator of CUDA reserves at most.

    FSDP2 allocates what gathers and reductions return in streams of their own, and streams do not
    share memory (torch's `_fsdp_collectives.py`). Segments are expandable, as torchtitan sets them.
    """
    pools: defaultdict[str, _Segment] = defaultdict(_Segment)
    blocks = [block for block in run.blocks if block.died is None or block.died > block.born]
    events = [(block.born, 1, block) for block in blocks]
    events += [(block.died, 0, block) for block in blocks if block.died is not None]
    for _, is_born, block in sorted(events, key=lambda each: each[:2]):
        pool = pools[block.owner.partition("(")[0] if block.is_message else ""]
        (pool.take if is_born else pool.free)(block)
    return sum(pool.size for pool in pools.values())


class _Segment:
    """Memory that grows at its end; blocks go into the smallest hole that has their size."""

    def __init__(self) -> None:
        self.size, self._holes, self._starts = 0, dict[int, int](), dict[int, int]()

    def take(self, block: Block) -> None:
        size = -(-block.nbytes // 512) * 512
        holes = self._holes.items()
        length, start = min(((n, at) for at, n in holes if n >= size), default=(0, self.size))
        if not length:  # the last hole grows, if it ends where the segment does
            start = next((at for at, n in holes if at + n == self.size), self.size)
            length, self.size = size, start + size
        self._holes.pop(start, None)
        if length > size:
            self._holes[start + size] = length - size
        self._starts[id(block)] = start

    def free(self, block: Block) -> None:
        start = self._starts.pop(id(block))
        end = start + -(-block.nbytes // 512) * 512
        end += self._holes.pop(end, 0)
        before = next((at for at, n in self._holes.items() if at + n == start), start)
        self._holes[before] = end - before


CHOSEN: Final = (
    ("8B on 128", LLAMA_3_8B, 256, (128, 1)),
    ("70B on 256", LLAMA_3_70B, 512, (32, 8)),
)
"""The meshes of torchtitan's benchmarks of December 2024, with their global batches."""


def meshes() -> None:
    """Prints the meshes that are proposed for what authors have run, and their place among them."""
    for name, llama, batch, chosen in CHOSEN:
        proposed = best_mesh(
            partial(_global_step, llama, batch),
            math.prod(chosen),
            axes=("fsdp", "tp"),
            hardware=META,
        )
        sizes = [candidate.mesh.axis_sizes for candidate in proposed.candidates]
        theirs = proposed.candidates[sizes.index(chosen)]
        print(f"{name}, {proposed}")
        print(f"theirs {chosen} is {theirs.seconds / proposed.best.seconds:.2f} times as long")


LARGEST: Final[tuple[Mapping[str, int], ...]] = (
    {"fsdp": 2048, "tp": 8},
    {"dp": 4, "fsdp": 64, "cp": 8, "tp": 8},
)
"""Meshes of 16,384 ranks; with "cp" the length is 131,072, else 8,192."""


def times() -> None:
    """Prints the seconds of estimates of Llama 3 405B, and of a search of 256 candidates for 8B."""
    for shape in LARGEST:
        mesh = make_mesh(tuple(shape.values()), tuple(shape), kind="abstract")
        length = 131_072 if "cp" in shape else 8_192
        step, args = build(mesh, LLAMA_3_405B, 1, length, donates=True)
        start = time.perf_counter()
        found = estimate(step, *args, hardware=H100)
        seconds = time.perf_counter() - start
        print(f"405B, {mesh}: {seconds:.1f} s, {len(found.run.steps):,} steps", flush=True)
    start = time.perf_counter()
    choices = {"recompute": ("full", "op", "half", "none"), "batch": range(64, 1025, 64)}
    ranking = best_mesh(
        _candidate,
        64,
        axes=("fsdp", "tp"),
        hardware=H100,
        processes=2,
        layers=LLAMA_3_8B.layers,
        choices={name: list(values) for name, values in choices.items()},
    )
    seconds = time.perf_counter() - start
    built = sum(each.figures is not None for each in ranking.candidates)
    print(f"8B on 64: {len(ranking.candidates)} candidates, {built} have a step: {seconds:.1f} s")


def _candidate(
    mesh: Mesh, layers: int, batch: int, recompute: Recompute
) -> tuple[Callable[..., Any], Any]:
    return _global_step(replace(LLAMA_3_8B, layers=layers), batch, mesh, recompute)


def _global_step(
    llama: Llama, batch: int, mesh: Mesh, recompute: Recompute = "full"
) -> tuple[Callable[..., Any], Any]:
    if batch % mesh.shape["fsdp"]:
        raise SpecError(f"{mesh.shape['fsdp']} ranks do not divide {batch} sequences")
    return build(mesh, llama, batch // mesh.shape["fsdp"], 8192, recompute, donates=True)


if __name__ == "__main__":
    {"meshes": meshes, "times": times}.get(" ".join(sys.argv[1:]), main)()
