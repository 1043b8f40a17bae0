"""Cost of a size that a function has not seen: batches of 500 sizes, and a cache that grows.

    python -m benchmarks.sizes [--sizes 500] [--tokens 200]

Processor time on a simulated mesh of two ranks, `check="global"`. A batch size that was not seen
before is served by the verdict for all sizes, which the third one derives. A decoder whose cache
grows by each token is compared with the same decoder whose cache has its room from the start.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import show
from shardmap_torch import I, Mesh, P, all_reduce, make_mesh, shard_map, value_and_grad
from shardmap_torch.nn import attention, kv_update

WIDTH, HEADS, LAYERS = 256, 8, 4
CACHE = [P(None, None, "tp")] * LAYERS
WEIGHTS = [{"qkv": P(None, "tp"), "out": P("tp")}] * LAYERS


def clocked(call: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the seconds of processor time that a call takes, and its result."""
    start = time.process_time()
    out = call()
    return time.process_time() - start, out


def batches(mesh: Mesh, number: int) -> tuple[list[float], list[float]]:
    """Seconds of calls with so many batch sizes, and of the same calls once more."""

    @shard_map(mesh=mesh, in_specs=(P(), P("tp")), out_specs=(P(), P()), check="global")
    def gradient(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        def loss(w: Tensor) -> Tensor:
            return all_reduce(torch.tanh(x @ w).square().mean(), "tp", op="mean", dst=I)

        value, grad = value_and_grad(loss)(w)
        return value, all_reduce(grad, "tp", op="sum", dst=I)

    w, several = torch.randn(16, 16), [torch.randn(2 * n, 16) for n in range(2, number + 2)]
    new = [clocked(partial(gradient, w, x))[0] for x in several]
    return new, [clocked(partial(gradient, w, x))[0] for x in several]


def layer(weights: dict[str, Tensor], x: Tensor, cache: Tensor, at: Tensor | None) -> Any:
    """One layer of a decoder: attention over what is cached, of the heads of this rank."""
    q, k, v = torch.einsum("btd,dhck->cbthk", x, weights["qkv"])
    cache = kv_update(cache, torch.stack([k, v], 3), at, dim=1)
    seen = None if at is None else torch.arange(cache.shape[1])[None] <= at
    y = attention(q, *cache.unbind(3), mask=seen)
    return x + all_reduce(torch.einsum("bthk,hkd->btd", y, weights["out"]), "tp", dst=I), cache


def tokens(mesh: Mesh, number: int, *, grows: bool) -> Iterator[float]:
    """Yields the seconds that each of so many tokens takes."""

    def decode(weights: Any, x: Tensor, cache: Any, at: Tensor | None = None) -> Any:
        updated = []
        for each, cached in zip(weights, cache, strict=True):
            x, new = layer(each, x, cached, at)
            updated.append(new)
        return x, updated

    specs = (WEIGHTS, P(), CACHE) + (() if grows else (P(),))
    step = shard_map(decode, mesh=mesh, in_specs=specs, out_specs=(P(), CACHE), check="global")
    torch.manual_seed(0)
    k = WIDTH // HEADS
    weights = [
        {
            "qkv": torch.randn(WIDTH, HEADS, 3, k) / WIDTH**0.5,
            "out": torch.randn(HEADS, k, WIDTH) / WIDTH**0.5,
        }
        for _ in range(LAYERS)
    ]
    x, room = torch.randn(1, 1, WIDTH), 1 if grows else number + 1
    cache = [torch.zeros(1, room, HEADS, 2, k) for _ in range(LAYERS)]
    for turn in range(number):
        rest = () if grows else (torch.tensor(turn + 1),)
        seconds, (x, cache) = clocked(partial(step, weights, x, cache, *rest))
        yield seconds


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    gc.disable()  # a collection takes as long as a check
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    new, seen = batches(mesh, options.sizes)
    checks = sum(each > 20 * statistics.median(seen) for each in new)
    added = statistics.median(a - b for a, b in zip(new[3:], seen[3:], strict=True))
    rows = [
        (f"{options.sizes} batch sizes, calls that took 20 times a seen one", str(checks), "3"),
        ("an unseen size costs more than a seen one by", f"{1e6 * added:.0f} us", "100 us"),
    ]
    pairs = zip(
        tokens(mesh, options.tokens, grows=False),
        tokens(mesh, options.tokens, grows=True),
        strict=True,
    )
    fixed, growing = zip(*pairs, strict=True)
    half = options.tokens // 2
    of_all = sum(growing[4:]) / sum(fixed[4:])
    late = statistics.median(g / f for g, f in zip(growing[half:], fixed[half:], strict=True))
    rows += [
        ("tokens with a growing cache, of those with a fixed one", f"{of_all:.2f}x", "1.2x"),
        ("the same, median of the second half", f"{late:.2f}x", "1.2x"),
    ]
    show("Sizes", ("", "measured", "goal"), rows)


if __name__ == "__main__":
    main()
