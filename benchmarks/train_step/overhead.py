"""Software cost of collectives, of a call's boundary and of a step, on torch's fake process group.

Nothing is sent, so that what is left is Python and copies. Prints JSON.
"""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.train_step import handwritten, ours
from benchmarks.train_step.handwritten import GatherSequence, Reduce, ScatterSequence
from benchmarks.train_step.setting import Setting, Step
from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    all_gather,
    all_reduce,
    convert,
    device_put,
    make_mesh,
    reduce_scatter,
    shard_map,
)

ROUNDS, CALLS, TOGETHER = 21, 320, 16
WIDTHS: Final = 64, 256
LEAVES: Final = 69
"""Parameters, gradients and two moments: 276 leaves in, 207 out."""


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


Pairs = Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]

COLLECTIVES: Final[Pairs] = {
    "all_reduce, dst=I": (Reduce.apply, lambda x: all_reduce(x, "tp", dst=I)),
    "convert, I to R": (Copy.apply, lambda x: convert(x, "tp", src=I, dst=R)),
    "all_gather, dim=1": (GatherSequence.apply, lambda x: all_gather(x, "tp", dim=1, dst=R)),
    "reduce_scatter, dim=1": (ScatterSequence.apply, lambda x: reduce_scatter(x, "tp", dim=1)),
}


def seconds(function: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Measures the processor time of a forward and a backward."""
    start = time.process_time()
    for _ in range(CALLS // TOGETHER):
        ys = [function(x) for _ in range(TOGETHER)]
        torch.autograd.grad(ys, x, [torch.empty_like(y) for y in ys])
    return (time.process_time() - start) / CALLS


def interleaved(pairs: Mapping[str, tuple[Callable[[], float], Callable[[], float]]]) -> Any:
    """Returns, by name, for each round: seconds of the first and of the second of a pair."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    for turn in range(ROUNDS):
        for name, (first, second) in pairs.items():
            if turn % 2:
                samples[name].append((first(), second()))
            else:
                late = second()
                samples[name].append((first(), late))
    return samples


def collectives(mesh: Mesh) -> Any:
    """A forward and a backward in a body, beside those of a Function written by hand."""
    found: Any = None

    def body(_: Tensor) -> None:
        nonlocal found
        x = torch.randn(8, 4, requires_grad=True)
        found = interleaved(
            {
                name: (partial(seconds, by_hand, x), partial(seconds, ours, x))
                for name, (by_hand, ours) in COLLECTIVES.items()
            }
        )

    shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=None, check=False)(torch.ones(2))
    return found


def adamw(p: Any, g: Any, mean: Any, square: Any) -> tuple[Any, Any, Any]:
    mean = torch._foreach_lerp(mean, g, 0.1)
    square = torch._foreach_addcmul(torch._foreach_mul(square, 0.9), g, g, 0.1)
    divisor = torch._foreach_add(torch._foreach_sqrt(square), 1e-8)
    return list(torch._foreach_addcdiv(p, mean, divisor, -0.01)), list(mean), list(square)


def boundary(mesh: Mesh) -> Any:
    """AdamW alone in a body, checked, beside the same calls on plain tensors."""
    specs = [P("tp") if at % 4 else P() for at in range(LEAVES)]
    globals_ = [[torch.randn(256, 64) for _ in range(LEAVES)] for _ in range(4)]
    trees = [device_put(tree, mesh, specs, as_dtensor=True) for tree in globals_]
    plain = [[x.to_local() for x in tree if isinstance(x, DTensor)] for tree in trees]
    mapped = shard_map(adamw, mesh=mesh, in_specs=(specs,) * 4, out_specs=(specs,) * 3)
    mapped(*trees)

    def clock(function: Callable[..., Any], arguments: Any) -> float:
        start = time.process_time()
        for _ in range(5):
            function(*arguments)
        return (time.process_time() - start) / 5

    name = f"AdamW on {LEAVES} parameters, {7 * LEAVES} leaves in and out"
    return interleaved({name: (lambda: clock(adamw, plain), lambda: clock(mapped, trees))})


def steps() -> Any:
    """The whole training step, eager and replayed."""

    def clock(step: Step) -> float:
        start = time.process_time()
        step()
        return time.process_time() - start

    pairs = {}
    for width in WIDTHS:
        setting = Setting(width)
        by_hand = handwritten.make(setting)
        for end, replay in (("", False), (", replayed", True)):
            step = ours.make(setting, replay=replay)
            for _ in range(2):  # it is checked, and recorded
                by_hand(), step()
            name = f"a training step of width {width}{end}"
            pairs[name] = partial(clock, by_hand), partial(clock, step)
    return interleaved(pairs)


def main() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = make_mesh((2,), ("tp",))
    print(json.dumps({**collectives(mesh), **boundary(mesh), **steps()}))


if __name__ == "__main__":
    main()
