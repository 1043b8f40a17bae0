"""Bodies made from a seed, whose messages a schedule can hide, and what disturbs them."""

import random as python_random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, TypeAlias
from unittest import mock

import torch
from torch import Tensor

from shardmap_torch import (
    R,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    axis_size,
    broadcast,
    ppermute,
    reduce_scatter,
    reinterpret,
    value_and_grad,
)
from shardmap_torch.backends import communicator

AXES: Final = ("dp", "tp")
Axes: TypeAlias = str | tuple[str, ...]
Action: TypeAlias = Callable[[Tensor, Tensor, Axes], Tensor]

_MOVES: Final = ("_ALL_GATHER", "_REDUCE", "_EXCHANGE", "_SEND", "_RECEIVE")


def generated(seed: int, length: int = 24) -> Callable[..., Any]:
    """Makes a body of values [4, 4] that vary over both axes, and weights [4, 4] that do not.

    It returns what depends on all it has made, some of that twice or as views, and its arguments.
    """
    rng = python_random.Random(seed)
    every: list[Axes] = [*AXES, AXES]
    actions: list[tuple[Action, int, int, Axes]] = [
        (
            ACTIONS[rng.choice([*ACTIONS])],
            rng.randrange(99),
            rng.randrange(99),
            rng.choice(every),
        )
        for _ in range(length)
    ]

    def body(x: Tensor, w: Tensor) -> Any:
        values = [x * 1, x @ w]
        for act, first, second, axes in actions:
            a, b = (values[at % len(values)] for at in (first, second))
            values.append(act(a, b, axes))
        last = values[-1]
        return [torch.stack(values).sum(0), x, last, last.t(), last], w

    return body


def varying(x: Tensor, axes: Axes) -> Tensor:
    return reinterpret(x, axes, src=R, dst=V) * 0.5


def summed(a: Tensor, axes: Axes, op: Any = "sum") -> Tensor:
    return varying(all_reduce(a, axes, op=op, dst=R), axes)


def gathered(a: Tensor, b: Tensor, axes: Axes) -> Tensor:
    return varying(all_gather(a, axes, tiled=False, dst=R), axes).mean(0)


def scattered(a: Tensor, b: Tensor, axes: Axes) -> Tensor:
    return reduce_scatter(a, axes).repeat(axis_size(axes), 1) * 0.5


def turned(a: Tensor, b: Tensor, axes: Axes) -> Tensor:
    n = axis_size(axes)
    return ppermute(a, axes, [(rank, (rank + 1) % n) for rank in range(n)])


def written(a: Tensor, b: Tensor, axes: Axes) -> Tensor:
    return a.mul_(0.5).add_(b.detach().clone())


def part(a: Tensor, b: Tensor, axes: Axes) -> Tensor:
    a[1:3].add_(b[:2] * 0.25)
    return a[:2].repeat(2, 1)


def sent_then_written(a: Tensor, b: Tensor, axes: Axes) -> Tensor:
    """Writes into what a message is read from, and into a view of what another one brings."""
    far = varying(all_gather(a, axes, tiled=False, dst=R), axes)
    a.t()[:2].copy_(b[:2] * 0.5)
    far[-1].t()[::2].mul_(0.25)
    return far.mean(0) + a


def by_two_ways(a: Tensor, b: Tensor, axes: Axes) -> Tensor:
    return summed(a + summed(a @ b / 4, axes), axes) * 0.5


def microbatches(a: Tensor, b: Tensor, axes: Axes) -> Tensor:
    return torch.cat([torch.tanh(summed(rows @ b / 4, axes) @ b) for rows in a.chunk(2)])


def in_half(a: Tensor, b: Tensor, axes: Axes) -> Tensor:
    return summed(torch.tanh(a).bfloat16(), axes).to(a.dtype)


def derived(a: Tensor, b: Tensor, axes: Axes) -> Tensor:
    def loss(rows: Sequence[Tensor]) -> Tensor:
        first, second = rows
        y = torch.tanh(first @ second / 4) @ reduce_scatter(second, axes).repeat(axis_size(axes), 1)
        return all_reduce(torch.tanh(y).sum(), axes, op="mean", dst=R)

    _, grads = value_and_grad(lambda rows: varying(loss(rows), axes))([a, b])
    return torch.tanh(grads[0]) + summed(grads[1], axes) * 0.1


ACTIONS: Final[dict[str, Action]] = {
    "matmul": lambda a, b, axes: a @ b / 4,
    "tanh": lambda a, b, axes: torch.tanh(a),
    "add": lambda a, b, axes: a + b,
    "view": lambda a, b, axes: a.t(),
    "write": written,
    "part": part,
    "sum": lambda a, b, axes: summed(a, axes),
    "mean": lambda a, b, axes: summed(a, axes, "mean"),
    "max": lambda a, b, axes: summed(a, axes, "max"),
    "gather": gathered,
    "scatter": scattered,
    "exchange": lambda a, b, axes: all_to_all(a, axes, split_dim=0, concat_dim=1).reshape(4, 4),
    "turn": turned,
    "broadcast": lambda a, b, axes: varying(broadcast(a, axes, source=0, dst=R), axes),
    "sent": sent_then_written,
    "two ways": by_two_ways,
    "microbatches": microbatches,
    "half": in_half,
    "derived": derived,
}


@contextmanager
def delays(seed: int, longest: float = 1e-3) -> Iterator[None]:
    """Waits for a random time before some of what this process sends and receives."""
    rng = python_random.Random(seed)

    def late(act: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*args: Any) -> Any:
            if rng.random() < 0.5:
                time.sleep(rng.random() * longest)
            return act(*args)

        return begin

    with ExitStack() as stack:
        for name in _MOVES:
            own = late(getattr(communicator, name))
            stack.enter_context(mock.patch.object(communicator, name, own))
        yield
