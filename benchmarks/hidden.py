"""Measures how much of a step's messages is hidden, over a rate-limited link.

    .venv/bin/python -m benchmarks.hidden [--rates 250mbit 1gbit 4gbit] [--rounds 9]  # needs root

Six blocks of an MLP of width 512, data parallel over two gloo ranks in network namespaces of their
own: 50 MB of gradients a step, and SGD. The contestants take turns, every other round in reverse
order: the same step without messages, DistributedDataParallel, the step by hand (a sum for each
parameter, after the backward), ours, and ours replayed in the order of the body, and with messages
hidden. Medians of a step with quartiles, and of its ratio to DDP in the same round. With
`--loopback` there is no link between the ranks, and nothing to hide.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.link import LOOPBACK, CannotRunError, run_ranks, two_namespaces
from benchmarks.quiet import joined
from shardmap_torch import I, P, all_reduce, device_put, make_mesh, shard_map, value_and_grad
from shardmap_torch.optim import sync_gradients

WIDTH, BLOCKS, ROWS, RATE = 512, 6, 512, 1e-3
BUCKET_MB: Final = 4

Step = Callable[[], Any]
Params = Sequence[Sequence[Tensor]]


def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + torch.relu(nn.functional.layer_norm(x, [WIDTH]) @ up) @ down


def loss_of(params: Params, x: Tensor) -> Tensor:
    for up, down in params:
        x = block(x, up, down)
    return x.square().mean()


def initial() -> list[list[Tensor]]:
    """Weights [width, 4 * width] and [4 * width, width] of each block, equal on all ranks."""
    torch.manual_seed(0)
    shapes = (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
    return [[torch.randn(shape) * WIDTH**-0.5 / 4 for shape in shapes] for _ in range(BLOCKS)]


def rows() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2 * ROWS, WIDTH)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(w) for pair in initial() for w in pair])

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(self.weights[::2], self.weights[1::2], strict=True)
        return loss_of([*pairs], x)


def of_module(wrap: Callable[[nn.Module], nn.Module], after: Callable[[Tensor], Any]) -> Step:
    model = wrap(Model())
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    x = rows().chunk(2)[dist.get_rank()]

    def run() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x)
        loss.backward()
        for w in model.parameters():
            assert w.grad is not None
            after(w.grad)
        optimizer.step()
        return loss.detach()

    return run


def nothing(x: Any) -> Any:
    return x


def sum_now(grad: Tensor) -> None:
    dist.all_reduce(grad)
    grad /= 2


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)


def ours(**options: Any) -> Step:
    mesh = make_mesh((2,), ("dp",))

    @shard_map(mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()), check="global", **options)
    def step(params: Any, x: Tensor) -> Any:
        value, grads = value_and_grad(
            lambda params: all_reduce(loss_of(params, x), "dp", op="mean", dst=I)
        )(params)
        grads = sync_gradients(grads, P(), "dp", bucket_bytes=BUCKET_MB * 2**20)
        return optree.tree_map(lambda w, g: w - RATE * g, params, grads), value

    params: Any = initial()
    x = device_put(rows(), mesh, P("dp"))

    def run() -> Any:
        nonlocal params
        params, value = step(params, x)
        return value

    return run


CONTESTANTS: Final[dict[str, Callable[[], Step]]] = {
    "no messages": lambda: of_module(nothing, nothing),
    "DDP": lambda: of_module(ddp, nothing),
    "by hand": lambda: of_module(nothing, sum_now),
    "ours": ours,
    "ours, replayed in order": lambda: ours(replay=True, schedule="program"),
    "ours, replayed, hidden": lambda: ours(replay=True),
}


def rank(options: dict[str, Any]) -> None:
    """Times the steps on one rank; the first prints seconds by contestant and round."""
    steps = {name: make() for name, make in CONTESTANTS.items()}
    losses = {name: [float(step()) for _ in range(3)] for name, step in steps.items()}
    for name, found in losses.items():
        # Each rank of the others knows the loss of its own rows; float32, a few thousand addends.
        if "ours" in name:
            torch.testing.assert_close(found, losses["ours"], rtol=1e-5, atol=0.0)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options["rounds"]):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            dist.barrier()
            taken[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(json.dumps(taken), flush=True)


def show(title: str, taken: dict[str, list[float]]) -> None:
    print(title)
    for name, seconds in taken.items():
        low, median, high = statistics.quantiles(seconds, n=4)
        ratio = statistics.median(a / b for a, b in zip(seconds, taken["DDP"], strict=True))
        print(f"  {name:24} {1e3 * median:7.1f} ms ({1e3 * low:.0f} to {1e3 * high:.0f})", end="")
        print(f"  {ratio:.2f}x of DDP")


def main() -> None:
    """Starts both ranks for each rate, and prints the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["250mbit", "1gbit", "4gbit"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--loopback", action="store_true", help="no link between the ranks")
    options = parser.parse_args()
    told = {"rounds": options.rounds}
    if options.loopback:
        show("loopback", run_ranks(LOOPBACK, "benchmarks.hidden", told, 300))
        return
    for rate in options.rates:
        try:
            with two_namespaces(rate, "256kb") as link:
                show(rate, run_ranks(link, "benchmarks.hidden", told, 600))
        except CannotRunError as error:
            raise SystemExit(f"benchmarks/hidden.py cannot run here: {error}") from error


if __name__ == "__main__":
    if sys.argv[1:2] in (["0"], ["1"]):
        with joined() as (_, told):
            rank(told)
    else:
        main()
