"""Random loops over microbatches, right and wrong, for `check="global"`."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch import I, Mesh, P, R, ShardMapError, all_reduce, make_mesh, shard_map

ROWS: Final = 144
WIDTH: Final = 4
AXES: Final = ("dp", "cp")
SIZES: Final = ((2, 1), (3, 1), (2, 2))

Rows = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes rows [k, WIDTH] from these, from w, and from the microbatch's targets."""

BY_ROW: Final[Mapping[str, Rows]] = {
    "tanh": lambda h, w, y: h.tanh(),
    "matmul": lambda h, w, y: h @ w,
    "difference": lambda h, w, y: h - y,
    "product": lambda h, w, y: h * y,
    "softmax": lambda h, w, y: h.softmax(-1),
    "layer_norm": lambda h, w, y: torch.nn.functional.layer_norm(h, (WIDTH,)),
    "relu": lambda h, w, y: h.relu(),
    "running sum": lambda h, w, y: h.cumsum(1),
    "masked": lambda h, w, y: h.masked_fill(y > 0, 0.0),
}
"""Operations that treat each row alike."""

BY_BATCH: Final[Mapping[str, Rows]] = {
    "centred": lambda h, w, y: h - h.mean(0),
    "running sum of rows": lambda h, w, y: h.cumsum(0),
    "softmax of rows": lambda h, w, y: h.softmax(0),
    "sorted rows": lambda h, w, y: h.sort(0)[0],
    "by number of rows": lambda h, w, y: h / h.shape[0],
    "centred over ranks": lambda h, w, y: h - all_reduce(h.mean(0), AXES, op="mean", dst=R),
}
"""Operations whose rows depend on which rows are in the microbatch."""

LOSSES: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "sum": lambda h: h.square().sum(),
    "mean": lambda h: h.square().mean(),
    "sum over ranks": lambda h: all_reduce(h.sin().sum(), AXES, dst=I),
    "mean over ranks": lambda h: all_reduce(h.sin().mean(), AXES, op="mean", dst=I),
    "square of a sum": lambda h: h.sum().square(),
    "square of a mean of rows": lambda h: h.mean(0).square().sum(),
    "standard deviation": lambda h: h.std(),
}

MISTAKES: Final[Mapping[str, Callable[[list[Tensor]], list[Tensor]]]] = {
    "leaves the first out": lambda parts: parts[1:],
    "leaves the last out": lambda parts: parts[:-1],
    "takes the first twice": lambda parts: [*parts, parts[0]],
    "weighs by number": lambda parts: [part * (n + 1) for n, part in enumerate(parts)],
    "squares each": lambda parts: [part.square() for part in parts],
    "decays": lambda parts: [part * 0.9**n for n, part in enumerate(parts)],
    "sums over ranks too early": lambda parts: [all_reduce(part, AXES, dst=R) for part in parts],
}
"""Changes of the list of each microbatch's gradient before it is added up."""


@dataclass(frozen=True)
class Accumulation:
    """A step that adds up gradients of microbatches.

    Attributes:
        count: number of microbatches.
        operations: names of operations on rows.
        loss: name of the loss of a microbatch.
        style: how a gradient is taken, and how the batch is divided.
        divided: whether the sum is divided by `count`.
        over_ranks: how gradients of ranks are combined.
        mistake: name of a mistake, or None.
        targets_turned: whether microbatches meet the targets of the next one.
    """

    count: int
    operations: tuple[str, ...]
    loss: str
    style: str
    divided: bool
    over_ranks: str
    mistake: str | None = None
    targets_turned: bool = False

    def __call__(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Runs as the body of one rank: w [WIDTH, WIDTH], x and y [rows, WIDTH]."""
        xs, ys = self._divide(x), self._divide(y)
        if self.targets_turned:
            ys = [*ys[1:], ys[0]]
        leaf = w.detach().clone().requires_grad_(self.style in ("autograd", "backward"))
        if self.style == "vmap":
            by_batch = torch.func.vmap(self._gradient, (None, 0, 0))
            stacked = by_batch(leaf, x.view(self.count, -1, WIDTH), self._targets(y, ys))
            total = stacked.sum(0)
            parts = [*stacked]
        else:
            parts = [self._gradient(leaf, *each) for each in zip(xs, ys, strict=True)]
            total = sum(parts[1:], parts[0])
        if self.mistake is not None:
            total = self._added(MISTAKES[self.mistake](parts))
        elif self.style == "stack":
            total = self._added(parts)
        if self.divided:
            total = total / self.count
        return all_reduce(total, AXES, op="mean" if self.over_ranks == "mean" else "sum", dst=I)

    def _targets(self, y: Tensor, ys: list[Tensor]) -> Tensor:
        return torch.stack(ys) if self.targets_turned else y.view(self.count, -1, WIDTH)

    def _added(self, parts: list[Tensor]) -> Tensor:
        if self.style == "stack":
            return torch.stack(parts).sum(0)
        total: Tensor = sum(parts[1:], parts[0])
        return total

    def _divide(self, x: Tensor) -> list[Tensor]:
        if self.style == "views":
            return list(x.view(self.count, -1, WIDTH))
        if self.style != "slices":
            return list(x.chunk(self.count))
        rows = x.shape[0] // self.count
        return [x[n * rows : (n + 1) * rows] for n in range(self.count)]

    def _gradient(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            h = x @ w
            for name in self.operations:
                h = OPERATIONS[name](h, w, y)
            return LOSSES[self.loss](h)

        if self.style == "autograd":
            return torch.autograd.grad(loss(w), w)[0]
        if self.style == "backward":
            w.grad = None
            loss(w).backward()
            assert w.grad is not None
            return w.grad
        found: Tensor = torch.func.grad(loss)(w)
        return found


OPERATIONS: Final = {**BY_ROW, **BY_BATCH}
RIGHT: Final[Mapping[str, tuple[bool, str]]] = {
    "sum": (False, "sum"),
    "sum over ranks": (False, "sum"),
    "mean": (True, "mean"),
    "mean over ranks": (True, "sum"),
}
"""Losses with how their gradients are added up: divided by their number, combined over ranks."""

STYLES: Final = ("slices", "views", "vmap", "stack", "torch.func", "autograd", "backward")


def drawn(rng: random.Random) -> Accumulation:
    """Draws a right program."""
    loss, (divided, over_ranks) = rng.choice(sorted(RIGHT.items()))
    operations = rng.choices(sorted(BY_ROW), k=rng.randint(0, 3))
    count, style = rng.choice((2, 3, 4)), rng.choice(STYLES)
    return Accumulation(count, tuple(operations), loss, style, divided, over_ranks)


def mutant(program: Accumulation, rng: random.Random) -> Accumulation:
    """Changes a program in one place, which may be harmless."""
    changes: tuple[dict[str, Any], ...] = (
        {"mistake": rng.choice(sorted(MISTAKES))},
        {"operations": (*program.operations, rng.choice(sorted(BY_BATCH)))},
        {"loss": rng.choice(sorted(LOSSES))},
        {"divided": not program.divided},
        {"over_ranks": "sum" if program.over_ranks == "mean" else "mean"},
        {"targets_turned": True},
    )
    return replace(program, **rng.choice(changes))


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Draws w, x and y in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((WIDTH, WIDTH), (ROWS, WIDTH), (ROWS, WIDTH))
    w, x, y = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    return w, x, y


def run(program: Accumulation, sizes: tuple[int, int], check: Any) -> Tensor | None:
    """Runs a program on simulated ranks; None if it is refused."""
    mesh: Mesh = make_mesh(sizes, AXES, kind="simulated", simulate="ranks")
    specs = (P(), P(AXES), P(AXES))
    step = shard_map(program, mesh=mesh, in_specs=specs, out_specs=P(), check=check)
    try:
        result: Tensor = step(*inputs())
    except ShardMapError:
        return None
    return result


def outcome_of(seed: int) -> str:
    """Runs a program, a mutant if the seed is odd: "refused", "right" or "wrong"."""
    rng = random.Random(seed)
    program = drawn(rng)
    program = mutant(program, rng) if seed % 2 else program
    found = run(program, SIZES[seed % len(SIZES)], "global")
    if found is None:
        return "refused" if seed % 2 else "wrong"
    expected = run(program, (1, 1), "local")
    assert expected is not None
    # Ranks add the same float64 numbers in another order.
    return "right" if torch.allclose(found, expected, rtol=1e-9, atol=1e-10) else "wrong"
