"""Bodies that send values round, each right, and wrong in several ways."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    all_reduce,
    axis_index,
    axis_size,
    make_mesh,
    ppermute,
    shard_map,
    shift,
)
from shardmap_torch.mesh import Mesh
from shardmap_torch.transform import Check

Mutant = str
"""Mistake of a body; "" for none."""


def ring_attention(q: Tensor, k: Tensor, v: Tensor, wrong: Mutant = "") -> Tensor:
    """Attends causally to keys that go round; all are [n, t/r, d] on r ranks."""
    count, rank, length = axis_size("cp"), axis_index("cp"), q.shape[1]
    hops = 2 if wrong == "two hops at once" else 1
    rows = rank * length + torch.arange(length)
    top = torch.full(q.shape[:-1], -math.inf, dtype=q.dtype)
    total, weight = torch.zeros_like(q), torch.zeros_like(top)
    for step in range(count - (wrong == "a block left out" and count > 1)):
        source = (rank + step if wrong == "other order" else rank - step) % count
        columns = source * length + torch.arange(length)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        later = rows[:, None] < columns
        if wrong == "mask of each block" and count > 1:
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
        if wrong == "diagonal" and count > 1:
            later = rows[:, None] <= columns
            later[0, 0] = False
        scores = scores.masked_fill(later, -math.inf)
        highest = torch.maximum(top, scores.amax(-1))
        old, new = torch.exp(top - highest), torch.exp(scores - highest.unsqueeze(-1))
        if wrong != "not rescaled":
            total = total * old.unsqueeze(-1)
        total = total + new @ v
        weight = new.sum(-1) + (weight if wrong == "weights not rescaled" else weight * old)
        top = highest
        if step + 1 < count:
            k, v = shift(k, "cp", hops), shift(v, "cp", hops)
            k = k.detach() if wrong == "detached" else k
            v = v.detach() if wrong == "detached once" and step == 1 else v
            v = torch.where(v > 50, 50, v) if wrong == "a threshold" else v
            v = v + 1e-3 if wrong == "a bias in each hop" else v
    scale = count if wrong == "scaled" else 1
    return total / weight.unsqueeze(-1) / scale


def pipeline(stages: Any, x: Tensor, wrong: Mutant = "") -> Tensor:
    """Sends microbatches x [m, n, d] through the stages of all ranks, [l/r, d, d] each."""
    count, rank = axis_size("pp"), axis_index("pp")
    forward = [(i, (i + (2 if wrong == "other stages" else 1)) % count) for i in range(count)]
    received, results = torch.zeros_like(x[0]), []
    for tick in range(len(x) + count - 1):
        feed = x[min(tick, len(x) - 1)]
        h = torch.where(rank == 0, feed, received)
        for layer in stages.flip(0) if wrong == "layers reversed" and count > 1 else stages:
            h = torch.relu(h @ layer) + h
        results.append(h)
        if count > 1:
            h = h.detach() if wrong == "detached" and tick == 1 else h
            received = ppermute(h, "pp", forward)
    first = count - 1 + (wrong == "a microbatch dropped" and count > 1)
    done = torch.stack([*results[first:], *results[:1]][: len(x)])
    if wrong == "an early microbatch" and count > 1:
        done = torch.stack(results[count - 2 : count - 2 + len(x)])
    last = torch.where(rank == count - 1, done, torch.zeros_like(done))
    if wrong == "sum of all stages":
        last = done
    y = all_reduce(last, "pp", dst=I, op="mean" if wrong == "mean" else "sum")
    return y


def convolution(x: Tensor, weight: Tensor, wrong: Mutant = "") -> Tensor:
    """Convolves x [n, c, h/r, w] by weight [d, c, 3, 3], with the neighbours' rows around."""
    count = axis_size("rows")
    down, up = [(i, i + 1) for i in range(count - 1)], [(i + 1, i) for i in range(count - 1)]
    if wrong == "wrapped round" and count > 1:
        down, up = [*down, (count - 1, 0)], [*up, (0, count - 1)]
    if wrong == "sides changed":
        down, up = up, down
    above, below = x[:, :, -1:], x[:, :, :1]
    if wrong == "the same row":
        above = x[:, :, :1]
    if count > 1:
        above, below = ppermute(above, "rows", down), ppermute(below, "rows", up)
    else:
        above, below = torch.zeros_like(above), torch.zeros_like(below)
    if wrong == "no halo below" and count > 1:
        below = torch.zeros_like(below)
    rows = torch.cat([above, x, below], 2)
    return functional.conv2d(rows, weight, padding=(0, 1)).tanh()


def ring_matmul(x: Tensor, w: Tensor, wrong: Mutant = "") -> Tensor:
    """Computes x @ w, x [n/r, d] and w [d, m/r]; the rows of x go round."""
    count, rank = axis_size("tp"), axis_index("tp")
    y = x.new_zeros(x.shape[0] * count, w.shape[1])
    for step in range(count):
        source = (rank - step) % count if wrong != "other order" else (rank + step) % count
        at = source * x.shape[0] + torch.arange(x.shape[0])
        y = y.index_add(0, at, x @ w)
        if step + 1 < count + (wrong == "one hop more"):
            x = shift(x, "tp", 1)
    return y + (x @ w).sum() * (wrong == "one hop more")


@dataclass(frozen=True)
class Case:
    """A body with its specs, and shapes of arguments that its sizes divide."""

    body: Callable[..., Tensor]
    mesh: tuple[tuple[int, ...], tuple[str, ...]]
    in_specs: tuple[P, ...]
    out_specs: P
    shapes: tuple[tuple[int, ...], ...]
    wrong: tuple[Mutant, ...]

    def on(self, mesh: Mesh, wrong: Mutant = "", check: Check = "global") -> Callable[..., Tensor]:
        """Maps the body over a mesh."""

        def body(*args: Tensor) -> Tensor:
            return self.body(*args, wrong=wrong)

        body.__name__ = self.body.__name__
        return shard_map(
            body, mesh=mesh, in_specs=self.in_specs, out_specs=self.out_specs, check=check
        )

    def mapped(self, wrong: Mutant = "", check: Check = "global") -> Callable[..., Tensor]:
        """Maps the body over a simulated mesh of the case's sizes."""
        return self.on(make_mesh(*self.mesh, kind="simulated"), wrong, check)

    def one_device(self) -> Callable[..., Tensor]:
        """Maps the body over one rank."""
        sizes, names = self.mesh
        return self.on(make_mesh((1,) * len(sizes), names, kind="simulated"), check="local")

    def arguments(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Draws arguments that need gradients."""
        torch.manual_seed(0)
        return [torch.randn(s, dtype=dtype).requires_grad_() for s in self.shapes]


CASES = (
    Case(
        ring_attention,
        ((2, 3), ("dp", "cp")),
        (P("dp", "cp"),) * 3,
        P("dp", "cp"),
        ((2, 6, 4),) * 3,
        tuple(
            "two hops at once,a block left out,other order,mask of each block,diagonal,"
            "not rescaled,weights not rescaled,detached,detached once,a threshold,"
            "a bias in each hop,scaled".split(",")
        ),
    ),
    Case(
        pipeline,
        ((3,), ("pp",)),
        (P("pp"), P()),
        P(),
        ((6, 4, 4), (4, 2, 4)),
        tuple(
            "other stages,layers reversed,detached,a microbatch dropped,an early microbatch,"
            "sum of all stages,mean".split(",")
        ),
    ),
    Case(
        convolution,
        ((2, 3), ("dp", "rows")),
        (P("dp", None, "rows"), P()),
        P("dp", None, "rows"),
        ((2, 2, 6, 3), (2, 2, 3, 3)),
        ("wrapped round", "sides changed", "the same row", "no halo below"),
    ),
    Case(
        ring_matmul,
        ((3,), ("tp",)),
        (P("tp"), P(None, "tp")),
        P(None, "tp"),
        ((6, 4), (4, 6)),
        ("other order", "one hop more"),
    ),
)
