"""Generated bodies with a Function of the user's own: forward, backward, operand, use, place."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, product
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


COPIES: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "contiguous": lambda g: g.contiguous(),
    "reshape": lambda g: g.reshape(-1),
    "flatten": lambda g: g.flatten(),
    "ravel": lambda g: g.ravel(),
    "the same": lambda g: g,
    "reshape_as": lambda g: g.reshape_as(torch.empty(g.numel())),
    "to": lambda g: g.to(memory_format=torch.contiguous_format),
}
"""Functions whose result has the memory of a cotangent, or not, by its strides."""


def _written(copy: str, is_read: bool) -> Callable[[Given], Tensor]:
    """Makes a gradient after a write into what may be a copy; of the cotangent, or of the copy."""

    def back(given: Given) -> Tensor:
        copied = COPIES[copy](given.g)
        copied.mul_(2.0)
        read = given.g if is_read else copied.reshape(given.g.shape)
        return read.reshape(-1, 3).sum(0) * 0.5 + 0 * given.own

    return back


_WRITES: Final = (*product(COPIES, ("g read", "copy read")),)

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
    "own, of a clone": lambda x: x.g.clone().mul_(0).sum() + x.own,
    **{f"{c} is written, {read}": _written(c, read == "g read") for c, read in _WRITES},
}
"""The gradient of that operand; a wrong one for most."""

BY_STRIDES: Final = frozenset(f"{copy} is written, {read}" for copy, read in _WRITES)
"""Writes that are right or wrong by the strides of the cotangent, and by who else has it."""

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
    "sum": lambda h, out: out.sum(),
    "mean": lambda h, out: out.mean(0).sum() / axis_size("tp"),
    "all of the sum": lambda h, out: all_reduce(out.sum(), "tp", dst=I),
    "rows": lambda h, out: (out.sum(1) * h.sum(1)).sum(),
    "turned": lambda h, out: (out.t().contiguous() * h.t().contiguous()).sum(),
    "twice": lambda h, out: out.sum() + (h * out).sum(),
}
"""The loss, for h and the result: each rank's own, or one for all.

The cotangents of the result are dense, of zero strides, expanded along a dim, or transposed.
"""


USES_OF_A_ROW: Final = ("each", "all", "beside", "sum", "twice")

MAKERS: Final[Mapping[str, Any]] = {
    "torch": torch.autograd.Function,
    "torch, setup_context": torch.autograd.Function,
    "ours": shardmap_torch.Function,
    "ours, setup_context": shardmap_torch.Function,
    "hook": None,
}


def function(forward_name: str, back: str, maker: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function of h and a; a backward, or a hook on a, makes the gradient of a."""
    compute, derive = FORWARDS[forward_name]
    if maker == "hook":

        def hooked(h: Tensor, a: Tensor) -> Tensor:
            a = a.view_as(a)
            if a.requires_grad:
                a.register_hook(lambda g: BACKS[back](Given(h.detach(), a.detach(), g, g)))
            return compute(h, a)

        return hooked

    def forward(ctx: Any, h: Tensor, a: Tensor) -> Tensor:
        keep(ctx, (h, a), None)
        return compute(h, a)

    def keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: object) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        h, a = ctx.saved_tensors
        of_h, of_a = derive(h, a, g)
        return None if forward_name == "alone" else of_h, BACKS[back](Given(h, a, g, of_a))

    own: dict[str, Any] = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    if maker.endswith("setup_context"):
        own |= {"forward": staticmethod(compute), "setup_context": staticmethod(keep)}
    made: Any = type("Own", (MAKERS[maker],), {**own, "__module__": __name__})
    apply: Callable[[Tensor, Tensor], Tensor] = made.apply
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
        maker: of the gradient, a key of `MAKERS`.
    """

    forward: str
    back: str
    operand: str
    use: str
    place: str
    maker: str

    def _loss(self, mesh: Mesh, x: Tensor, w: Tensor, maker: str) -> Tensor:
        h = x * w
        if self.forward == "gathered":
            part: Any = OwnPart if maker.startswith("ours") else Part
            return GATHERED_USES[self.use](h, part.apply(h, mesh, self.back))
        a = OPERANDS[self.operand](h, w)
        return USES[self.use](h, function(self.forward, self.back, maker)(h, a))

    def run(self, mesh: Mesh, check: Any, types: Any = None, maker: str = "") -> list[Tensor]:
        """Returns both gradients and the loss; `types` says how w enters, if nothing is checked."""
        made = maker or self.maker
        is_one = self.use.startswith("all")

        def outside(x: Tensor, w: Tensor) -> Tensor:
            loss = self._loss(mesh, x, w, made)
            return loss if is_one else all_reduce(loss, "tp", dst=I)

        def inside(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x, w = (each.detach().requires_grad_() for each in (x, w))
            loss = self._loss(mesh, x, w, made)
            of_x, of_w = torch.autograd.grad(loss, (x, w))
            of_w = of_w if self.place == "inside" else all_reduce(of_w, "tp", dst=I)
            loss = loss.detach()
            return of_x, of_w, loss if is_one else all_reduce(loss, "tp", dst=I)

        specs = {"mesh": mesh, "in_specs": (P("tp"), types or P()), "check": check}
        if self.place != "outside":
            return [*shard_map(inside, out_specs=(P("tp"), P(), P()), **specs)(X, W)]
        x, w = (each.clone().requires_grad_() for each in (X, W))
        loss = shard_map(outside, out_specs=P(), **specs)(x, w)
        return [*torch.autograd.grad(loss, (x, w)), loss.detach()]

    def is_right(self, expected: list[Tensor]) -> bool:
        """Returns whether ranks that nobody checks compute what one device does."""
        if self.back in BY_STRIDES:
            return False
        for types in (P(invariant={"tp"}), P(replicate={"tp"})):
            with suppress(ShardMapError):  # a result differs by rank
                if same(self.run(TWO, False, types, self.knowing), expected):
                    return True
        return False

    def runs_on_one_device(self) -> bool:
        """Returns False for a write into what is expanded, or a collective after the body's end."""
        try:
            self.expected()
        except (RuntimeError, ShardMapError):
            return False
        return True

    def expected(self) -> list[Tensor]:
        return self.run(ONE, False, P(invariant={"tp"}), self.knowing)

    @property
    def knowing(self) -> str:
        """The maker that knows the mesh: a plain Function does not, until it is checked."""
        return self.maker.replace("torch", "ours")

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
    """Yields that many programs which one device runs, of all in a random order."""
    kinds = product(FORWARDS, BACKS, OPERANDS, USES, PLACES, MAKERS)
    found = [Program(*each) for each in kinds if each[0] != "alone" or each[3] in USES_OF_A_ROW]
    # A hook does not replace what autograd derives before it, which has to be typed.
    found = [each for each in found if (each.maker, each.operand) != ("hook", "I")]
    found += [
        Program("gathered", back, "V", use, place, maker)
        for back, use, place, maker in product(
            {**PARTS, **SCATTERS}, GATHERED_USES, PLACES, ("torch", "ours")
        )
        for _ in range(30)  # there are few
    ]
    random.Random(seed).shuffle(found)
    return islice((each for each in found if each.runs_on_one_device()), count)
