"""A whole training script, for copying: a small transformer with data and tensor parallelism.

It has what a real run needs: bf16 with float32 master weights, accumulation of gradients, clipping,
a schedule, dropout, recomputation, checkpoints, resuming, evaluation and a log. It trains on its
own text. docs/cookbook.md goes through it.

    python examples/cookbook.py --mesh 2x2                                       # simulated ranks
    torchrun --nproc-per-node 2 examples/cookbook.py --mesh 1x2 --folder out/run --resume
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    Mesh,
    P,
    checkpoint,
    device_put,
    make_mesh,
    match_specs,
    random,
    shard_map,
    value_and_grad,
)
from shardmap_torch.nn import (
    attention,
    column_linear,
    row_linear,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)
from shardmap_torch.optim import adamw, clip_by_global_norm, sync_gradients, warmup_cosine
from shardmap_torch.saving import latest, load, save

VOCABULARY = 256  # bytes
Tree = Any

# --- the model: what one rank does with its shards ---


def init(options: argparse.Namespace) -> Tree:
    """Makes the global float32 parameters: the same numbers on every rank and every mesh."""
    generator = torch.Generator().manual_seed(options.seed)
    width, heads, hidden = options.width, options.heads, 4 * options.width

    def normal(*shape: int, fan_in: int) -> Tensor:
        values: Tensor = torch.randn(shape, generator=generator) / fan_in**0.5
        return values

    def layer() -> Tree:
        return {
            "norm": torch.ones(2, width),
            "qkv": normal(width, heads, 3, width // heads, fan_in=width),
            "out": normal(heads, width // heads, width, fan_in=width),
            "up": normal(width, hidden, fan_in=width),
            "down": normal(hidden, width, fan_in=hidden),
        }

    return {
        "tokens": normal(VOCABULARY, width, fan_in=width),
        "positions": normal(options.length, width, fan_in=width),
        "layers": [layer() for _ in range(options.layers)],
        "norm": torch.ones(width),
        "logits": normal(width, VOCABULARY, fan_in=width),
    }


# How each parameter is sharded, by its path in the tree.
SPECS = {
    "tokens": P("tp"),
    "positions": P(),
    "**.norm": P(),
    "layers.*.qkv": P(None, "tp"),
    "layers.*.out": P("tp"),
    "layers.*.up": P(None, "tp"),
    "layers.*.down": P("tp"),
    "logits": P(None, "tp"),
}


def block(layer: Tree, x: Tensor, keys: Tensor, dropout: float) -> Tensor:
    """x [b/dp, t, d] -> the same; heads and hidden features are sharded over "tp"."""

    def drop(x: Tensor, key: Tensor) -> Tensor:  # one mask for the global batch, on any mesh
        return random.dropout(key, x, dropout, spec=P("dp")) if dropout else x

    h = functional.rms_norm(x, x.shape[-1:], layer["norm"][0])
    q, k, v = column_linear(h, layer["qkv"], "tp").unbind(-2)
    x = x + drop(row_linear(attention(q, k, v, causal=True), layer["out"], "tp"), keys[0])
    h = functional.rms_norm(x, x.shape[-1:], layer["norm"][1])
    h = functional.gelu(column_linear(h, layer["up"], "tp"))
    return x + drop(row_linear(h, layer["down"], "tp"), keys[1])


def loss(
    params: Tree, tokens: Tensor, key: Tensor, dropout: float = 0.0, recompute: bool = False
) -> Tensor:
    """tokens [b/dp, t + 1] -> the mean loss of the global batch, in float32."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    params = optree.tree_map(lambda p: p.bfloat16(), params)  # master weights stay as they are
    x = vocab_parallel_embedding(inputs, params["tokens"], "tp")
    x = x + params["positions"][: inputs.shape[1]]
    for number, layer in enumerate(params["layers"]):
        keys = random.split(random.fold_in(key, number))
        if recompute:  # saves x alone, and computes the block again in the backward
            x = checkpoint(block, layer, x, keys, dropout)
        else:
            x = block(layer, x, keys, dropout)
    x = functional.rms_norm(x, x.shape[-1:], params["norm"])
    logits = column_linear(x, params["logits"], "tp").float()
    return vocab_parallel_cross_entropy(logits, targets, "tp", batch_axis="dp")


# --- the steps: functions of global values ---


def make_steps(
    mesh: Mesh, options: argparse.Namespace
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[[], Tree]]:
    """Returns the training step, the evaluation, and what makes the first state."""
    specs = match_specs(init(options), SPECS)
    schedule = warmup_cosine(options.rate, steps=options.steps, warmup=options.warmup)
    optimizer = adamw(schedule, weight_decay=0.1, decays=lambda p: p.ndim > 1)
    state_specs = {"params": specs, "optimizer": optimizer.specs(specs)}
    microbatches = P(None, "dp")  # [accumulation, sequences, t + 1]
    dropout, recompute = options.dropout, options.recompute
    in_specs, out_specs = (state_specs, microbatches, P()), (state_specs, P(), P())

    @shard_map(mesh=mesh, in_specs=in_specs, out_specs=out_specs, check="global")
    def step(state: Tree, batch: Tensor, key: Tensor) -> tuple[Tree, Tensor, Tensor]:
        params, total = state["params"], torch.zeros(())
        grads: Tree = None
        for number, tokens in enumerate(batch.unbind()):
            own_key = random.fold_in(key, number)
            value, new = value_and_grad(loss)(params, tokens, own_key, dropout, recompute)
            grads = new if grads is None else optree.tree_map(torch.add, grads, new)
            total = total + value
        grads = optree.tree_map(lambda g: g / len(batch), grads)
        grads = sync_gradients(grads, specs, "dp")
        grads, norm = clip_by_global_norm(grads, specs, max_norm=1.0)
        params, moments = optimizer.update(params, grads, state["optimizer"])
        return {"params": params, "optimizer": moments}, total / len(batch), norm

    @shard_map(mesh=mesh, in_specs=(specs, P("dp"), P()), out_specs=P(), check="global")
    def evaluate(params: Tree, tokens: Tensor, key: Tensor) -> Tensor:
        return loss(params, tokens, key)

    def start() -> Tree:
        params = init(options)
        state = {"params": params, "optimizer": optimizer.init(params)}
        return device_put(state, mesh, state_specs)

    return step, evaluate, start


# --- the run: data, log, checkpoints ---


def sample(text: Tensor, options: argparse.Namespace, count: int, seed: int) -> Tensor:
    """Draws windows [count, t + 1] at places that the seed alone decides, so on no rank."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - options.length, (count, 1), generator=generator)
    return text[starts + torch.arange(options.length + 1)]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mesh", default="2x2", help="data-parallel x tensor-parallel ranks")
    parser.add_argument("--data", type=Path, default=Path(__file__), help="a file to learn")
    parser.add_argument("--folder", type=Path, default=Path("out/cookbook"))
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    speed = parser.add_mutually_exclusive_group()  # what recomputes is not compiled
    speed.add_argument("--recompute", action="store_true", help="save memory: compute blocks again")
    speed.add_argument("--compile", action="store_true", help="compile the training step")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=3e-3)
    sizes = {"batch": 16, "accumulate": 2, "length": 64, "width": 64, "heads": 4, "layers": 2}
    counts = {"steps": 100, "until": 0, "warmup": 10, "every": 20, "seed": 0}
    for name, default in {**sizes, **counts}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains, and returns the losses of the steps that this run made."""
    options = parse(arguments)
    sizes = tuple(int(size) for size in options.mesh.split("x"))
    mesh = make_mesh(sizes, ("dp", "tp"))  # simulated, or of processes under torchrun
    text = torch.tensor(list(options.data.read_bytes()))
    train_text, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    step, evaluate, start = make_steps(mesh, options)
    state = start()
    done = latest(options.folder)
    if done is not None and not options.resume:
        raise SystemExit(f"{options.folder} has step {done} of a run: --resume it, or name another")
    if done is not None:
        state = load(state, options.folder, done)
    run = torch.compile(step, fullgraph=True) if options.compile else step
    key, losses = random.key(options.seed), []

    def log(**entry: Any) -> None:
        if mesh.rank == 0:
            print(json.dumps(entry))
            with (options.folder / "log.jsonl").open("a") as file:
                file.write(json.dumps(entry) + "\n")

    options.folder.mkdir(parents=True, exist_ok=True)
    for number in range(done or 0, options.until or options.steps):
        began = time.perf_counter()
        batch = sample(train_text, options, options.batch, seed=number)
        batch = batch.unflatten(0, (options.accumulate, -1))
        batch = device_put(batch, mesh, P(None, "dp"))
        state, value, norm = run(state, batch, random.fold_in(key, number))
        losses.append(value.item())
        rate = batch.numel() / (time.perf_counter() - began)
        log(step=number + 1, loss=losses[-1], norm=norm.item(), tokens_a_second=round(rate))
        if (number + 1) % options.every == 0:
            held = device_put(sample(held_out, options, 16, seed=0), mesh, P("dp"))
            log(step=number + 1, held_out=evaluate(state["params"], held, key).item())
            save(state, options.folder, number + 1, keep=2)
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
