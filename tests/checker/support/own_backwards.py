"""Generated bodies with a Function of the user's own: forward, backward, operand, use, place."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

import shardmap_torch
from shardmap_torch import (
    I,
    Mesh,
    P,
    Partial,
    R,
    ShardMapError,
    V,
    all_gather,
    all_reduce,
    axis_group,
    axis_size,
    convert,
    make_mesh,
    reduce_scatter,
    reinterpret,
    shard_map,
)
from tests.programs.support.harness import global_value
from tests.programs.support.harness import random as numbers

ONE: Final = make_mesh((1,), ("tp",), kind="simulated", simulate="ranks")
TWO: Final = make_mesh((2,), ("tp",), kind="simulated", simulate="ranks")
X, W = numbers((4, 3), 0), numbers((3,), 1)

Make = Callable[[Tensor, Tensor], Tensor]

OPERANDS: Final[Mapping[str, Make]] = {
    "I": lambda h, w: all_reduce(h.sin().sum(0), "tp", dst=I),
    "R": lambda h, w: all_reduce(h.sin().sum(0), "tp", dst=R),
    "gathered": lambda h, w: all_gather(h.sin(), "tp", dst=R).sum(0),
    "converted": lambda h, w: convert(all_reduce(h.sin().sum(0), "tp", dst=I), "tp", src=I, dst=R),
    "K": lambda h, w: w.sin(),
    "V": lambda h, w: h.sin().sum(0),
}
"""The operand that gets the gradient: [3], of another type each."""


@dataclass(frozen=True)
class Given:
    """The operands of a backward, the cotangent, and the derivative of one rank's result."""

    h: Tensor
    a: Tensor
    g: Tensor
    own: Tensor

    @property
    def one(self) -> Tensor:
        return torch.ones_like(self.a)


def _in_place(given: Given) -> Tensor:
    found = given.own.clone()
    found.mul_(0.5)
    return found + found


def _lost(given: Given) -> Tensor:
    copied = given.g.contiguous()
    copied.mul_(2.0)
    return (given.g * (given.own.sum() * 0 + 1)).flatten()[:3] + given.own


def _scaled_view(given: Given) -> Tensor:
    given.g.reshape(-1).mul_(2.0)
    return given.own


BACKS: Final[Mapping[str, Callable[[Given], Tensor | None]]] = {
    "own": lambda x: x.own,
    "own, summed": lambda x: all_reduce(x.own, "tp", dst=I),
    "own, averaged": lambda x: all_reduce(x.own, "tp", dst=I, op="mean"),
    "own, in place": _in_place,
    "own, by n": lambda x: x.own / axis_size("tp"),
    "ones": lambda x: x.one,
    "ones by n": lambda x: x.one / axis_size("tp"),
    "own rows": lambda x: x.one * len(x.h),
    "all rows": lambda x: x.one * (len(x.h) * axis_size("tp")),
    "of the value": lambda x: 0.1 * x.a,
    "full": lambda x: torch.full_like(x.a, 0.5),
    "literal": lambda x: torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
    "zeros": lambda x: torch.zeros_like(x.a),
    "none": lambda x: None,
    "an addend": lambda x: convert(x.one, "tp", src=I, dst=Partial),
    "own, an addend": lambda x: reinterpret(x.own, "tp", src=V, dst=Partial),
    "ones and own": lambda x: x.one + x.own,
    "ones and own, summed": lambda x: x.one + all_reduce(x.own, "tp", dst=I),
    "a lost write": _lost,
    "a write before": _scaled_view,
}
"""The gradient of that operand; a wrong one for most."""

BY_STRIDES: Final = frozenset({"a lost write", "a write before"})
"""Writes that are right or wrong by the strides of the cotangent."""

Form = tuple[Make, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]]

FORWARDS: Final[Mapping[str, Form]] = {
    "attached": (lambda h, a: h.view_as(h), lambda h, a, g: (g, (g * h.detach()).sum(0))),
    "product": (lambda h, a: h * a, lambda h, a, g: (g * a, (g * h).sum(0))),
    "sum": (lambda h, a: h + a, lambda h, a, g: (g, g.sum(0))),
    "alone": (lambda h, a: 2 * a, lambda h, a, g: (h * 0, 2 * g)),
}
"""The result for h [rows, 3], a shard, and a [3]; and both derivatives."""

USES: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "each": lambda h, out: (h * out).sum(),
    "all": lambda h, out: all_reduce((h * out).square().sum(), "tp", dst=I),
    "beside": lambda h, out: (h + out).square().sum(),
}
"""The loss, for h and the result: each rank's own, or one for all."""


def function(forward: str, back: str, base: Any) -> Callable[[Tensor, Tensor], Tensor]:
    compute, derive = FORWARDS[forward]

    class Own(base):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, h: Tensor, a: Tensor) -> Tensor:
            ctx.save_for_backward(h, a)
            return compute(h, a)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
            h, a = ctx.saved_tensors
            of_h, of_a = derive(h, a, g)
            return None if forward == "alone" else of_h, BACKS[back](Given(h, a, g, of_a))

    apply: Callable[[Tensor, Tensor], Tensor] = Own.apply
    return apply


class Part(torch.autograd.Function):
    """A gather whose backward takes this rank's part, by positions in Python."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, mesh: Mesh, way: str) -> Tensor:
        ctx.mesh, ctx.way = mesh, way
        return all_gather(h, "tp", dst=I if way in ("chunk", "slice", "narrow") else R)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        group = axis_group(ctx.mesh, "tp")
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        return {**PARTS, **SCATTERS}[ctx.way](g, rank, n), None, None


PARTS: Final[Mapping[str, Callable[[Tensor, Any, int], Tensor]]] = {
    "chunk": lambda g, rank, n: g.chunk(n)[rank],
    "slice": lambda g, rank, n: g[rank * (len(g) // n) : (rank + 1) * (len(g) // n)],
    "narrow": lambda g, rank, n: g.narrow(0, rank * (len(g) // n), len(g) // n),
    "chunk by n": lambda g, rank, n: g.chunk(n)[rank] / n,
    "chunk of a sum": lambda g, rank, n: all_reduce(g, "tp", dst=R).chunk(n)[rank],
}
SCATTERS: Final[Mapping[str, Callable[[Tensor, Any, int], Tensor]]] = {
    "scatter": lambda g, rank, n: reduce_scatter(g, "tp"),
    "scattered mean": lambda g, rank, n: reduce_scatter(g, "tp", op="mean"),
}

GATHERED_USES: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "each": lambda h, out: (h.sum(0) * out.sin().sum(0)).sum(),
    "all": lambda h, out: out.sin().square().sum(),
}


@dataclass(frozen=True)
class Program:
    """A body that takes the gradient of its loss, or leaves that to the caller.

    Attributes:
        forward: of the Function; "gathered" for `Part`.
        back: its backward.
        operand: the type of its second operand.
        use: of its result.
        place: "outside"; or "inside", or "inside, summed" over the ranks.
        ours: whether it is a `shardmap_torch.Function`.
    """

    forward: str
    back: str
    operand: str
    use: str
    place: str
    ours: bool

    def _loss(self, mesh: Mesh, x: Tensor, w: Tensor, base: Any) -> Tensor:
        h = x * w
        if self.forward == "gathered":
            part: Any = Part if base is not shardmap_torch.Function else OwnPart
            return GATHERED_USES[self.use](h, part.apply(h, mesh, self.back))
        a = OPERANDS[self.operand](h, w)
        return USES[self.use](h, function(self.forward, self.back, base)(h, a))

    def run(self, mesh: Mesh, check: Any, types: Any = None, base: Any = None) -> list[Tensor]:
        """Returns the gradients of x and w; `types` says how w enters, if nothing is checked."""
        made = base or (shardmap_torch.Function if self.ours else torch.autograd.Function)
        is_one = self.use == "all"

        def outside(x: Tensor, w: Tensor) -> Tensor:
            loss = self._loss(mesh, x, w, made)
            return loss if is_one else all_reduce(loss, "tp", dst=I)

        def inside(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            x, w = (each.detach().requires_grad_() for each in (x, w))
            found = torch.autograd.grad(self._loss(mesh, x, w, made), (x, w))
            return found[0], all_reduce(found[1], "tp", dst=I) if self.place != "inside" else found[
                1
            ]

        specs = {"mesh": mesh, "in_specs": (P("tp"), types or P()), "check": check}
        if self.place != "outside":
            return [*shard_map(inside, out_specs=(P("tp"), P()), **specs)(X, W)]
        x, w = (each.clone().requires_grad_() for each in (X, W))
        return [*torch.autograd.grad(shard_map(outside, out_specs=P(), **specs)(x, w), (x, w))]

    def is_right(self, expected: list[Tensor]) -> bool:
        """Returns whether ranks that nobody checks compute what one device does."""
        if self.back in BY_STRIDES:
            return False
        ours = shardmap_torch.Function  # a plain one does not know the mesh, until it is checked
        for types in (P(invariant={"tp"}), P(replicate={"tp"})):
            with suppress(ShardMapError):  # a result differs by rank
                if same(self.run(TWO, False, types, ours), expected):
                    return True
        return False

    def expected(self) -> list[Tensor]:
        return self.run(ONE, False, P(invariant={"tp"}), shardmap_torch.Function)

    def fate(self, check: Any, expected: list[Tensor], mesh: Mesh = TWO) -> str:
        """Returns "equal", "wrong", or the error with which it is refused."""
        try:
            return "equal" if same(self.run(mesh, check), expected) else "wrong"
        except (ShardMapError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"


class OwnPart(shardmap_torch.Function):
    """The same, as a Function of ours."""

    forward = Part.forward
    backward = Part.backward


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(map(global_value, found), expected, strict=True)
    return all(torch.allclose(mine, other, atol=1e-9) for mine, other in pairs)


PLACES: Final = ("outside", "inside", "inside, summed")


def programs(count: int, seed: int = 0) -> Iterator[Program]:
    """Yields that many of all programs, in a random order."""
    kinds = product(FORWARDS, BACKS, OPERANDS, USES, PLACES, (False, True))
    found = [Program(*each) for each in kinds]
    found += [
        Program("gathered", back, "V", use, place, ours)
        for back, use, place, ours in product(
            {**PARTS, **SCATTERS}, GATHERED_USES, PLACES, (False, True)
        )
        for _ in range(6)  # there are few
    ]
    return iter(random.Random(seed).sample(found, count))
