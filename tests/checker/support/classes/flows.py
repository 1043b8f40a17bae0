"""Random losses of which gradients are cut: everywhere, or in one program, microbatch or item."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    all_reduce,
    axis_index,
    axis_size,
    convert,
    make_mesh,
    shard_map,
    value_and_grad,
)
from tests.checker.support.classes.trials import differentiated, fate_against, numbers
from tests.checker.support.cuts import CUTS, PARTS

NAMES: Final = ("dp", "tp")
RANKS: Final = {
    strategy: make_mesh((2, 2), NAMES, kind="simulated", simulate=strategy)
    for strategy in ("ranks", "auto")
}
ONE: Final = make_mesh((1, 1), NAMES, kind="simulated", simulate="ranks")
SPECS: Final = (P(), P(None, "tp"), P("tp"), P("dp"))
"""Of three weights and of the batch."""

OPERANDS: Final = (numbers(6, 6) / 2, numbers(6, 8) / 2, numbers(8, 5) / 2, numbers(24, 6))
COUNT: Final = 3
Tensors: TypeAlias = tuple[Tensor, ...]
Cut: TypeAlias = Callable[[Tensor], Tensor]

ALL_CUTS: Final[Mapping[str, Cut]] = {**CUTS, "not cut": lambda x: x * 1}
ALL_PARTS: Final[Mapping[str, Callable[..., Tensor]]] = {**PARTS, "itself": lambda x, cut: cut(x)}


def _masked(x: Tensor, cut: Cut) -> Tensor:
    """Cuts the first rows of the batch."""
    positions = torch.arange(x.shape[0]) + axis_index("dp") * x.shape[0]
    return torch.where((positions < 4)[:, None], x, cut(x))


def _by_rank(x: Tensor, cut: Cut) -> Tensor:
    return torch.where(axis_index("dp") == 0, x, cut(x))


CONDITIONS: Final[Mapping[str, Callable[[int, Tensor], bool]]] = {
    "always": lambda number, x: True,
    "on ranks": lambda number, x: axis_size("dp") > 1,
    "on ranks of tp": lambda number, x: axis_size("tp") > 1,
    "by rows": lambda number, x: x.shape[0] in (12, 4),
    "the first": lambda number, x: number == 0,
    "but the first": lambda number, x: number != 0,
}
"""When a gradient is cut, by the number of the microbatch or item, and by the value."""

MASKS: Final[Mapping[str, Callable[[Tensor, Cut], Tensor]]] = {
    "of the first rows": _masked,
    "on the first rank": _by_rank,
}


@dataclass(frozen=True)
class Cutting:
    """A part of a loss with a cut, and what is done in its place where it is not made."""

    stage: str
    part: str
    cut: str
    when: str
    otherwise: str

    @property
    def right(self) -> bool:
        return self.when == "always" or self.cut == self.otherwise

    def __call__(self, x: Tensor, number: int) -> Tensor:
        def cut(value: Tensor) -> Tensor:
            if self.when in MASKS:
                return MASKS[self.when](value, ALL_CUTS[self.cut])
            made = CONDITIONS[self.when](number, x)
            return ALL_CUTS[self.cut if made else self.otherwise](value)

        return ALL_PARTS[self.part](x, cut=cut)


@dataclass(frozen=True)
class Flows:
    """A loss of two layers, or of a loop over items, and how its gradients are taken.

    Attributes:
        structure: "whole", or which loop it has.
        gradients: how they are taken.
        op: "sum" or "mean" of the rows.
        cuts: where gradients are cut.
        strategy: how ranks are simulated.
    """

    structure: str
    gradients: str
    op: Any
    cuts: tuple[Cutting, ...]
    strategy: str = "ranks"

    @property
    def right(self) -> bool:
        return all(each.right for each in self.cuts)

    def _at(self, stage: str, x: Tensor, number: int) -> Tensor:
        for each in self.cuts:
            x = each(x, number) if each.stage == stage else x
        return x

    def _part(self, w: Tensor, v: Tensor, u: Tensor, x: Tensor, number: int = 0) -> Tensor:
        """The loss of one microbatch, or of the whole batch."""
        hidden = self._at("first", (x @ w).tanh(), number)
        hidden = convert(hidden, "tp", src=I, dst=R)
        z = self._at("second", hidden @ v, number).tanh() @ u
        if self.structure == "items":
            z = z + self._items(hidden, u)
        out = self._at("last", all_reduce(z, "tp", dst=I), number)
        rows = out.square().sum(1)
        return all_reduce(rows.mean() if self.op == "mean" else rows.sum(), "dp", op=self.op, dst=I)

    def _items(self, hidden: Tensor, u: Tensor) -> Tensor:
        total = torch.zeros_like(hidden[:, :5])
        for number, row in enumerate(u):
            total = total + self._at("item", hidden[:, :5] * row, number).sin()
        return total

    def _loss(self, w: Tensor, v: Tensor, u: Tensor, x: Tensor) -> Tensor:
        if self.structure != "losses of microbatches":
            return self._part(w, v, u, x)
        parts = [self._part(w, v, u, part, n) for n, part in enumerate(x.chunk(COUNT))]
        return self._added(parts)

    def _added(self, parts: Sequence[Tensor]) -> Tensor:
        total: Tensor = sum(parts[1:], parts[0])
        return total / COUNT if self.op == "mean" else total

    def __call__(self, w: Tensor, v: Tensor, u: Tensor, x: Tensor) -> Any:
        """Runs as the body of one rank."""
        if self.gradients == "outside":
            return self._loss(w, v, u, x)
        take = GRADIENTS[self.gradients]
        if self.structure == "gradients of microbatches":
            found = [
                take(lambda w, v, u, n=n, part=part: self._part(w, v, u, part, n), (w, v, u))
                for n, part in enumerate(x.chunk(COUNT))
            ]
            added: Sequence[Tensor] = [self._added(each) for each in zip(*found, strict=True)]
        else:
            added = take(lambda w, v, u: self._loss(w, v, u, x), (w, v, u))
        return tuple(all_reduce(each, "dp", dst=I) for each in added)

    def fate(self) -> str:
        outs = (P(), P(None, "tp"), P("tp"))[:: 2 if self.gradients == "some" else 1]

        def run(mesh: Any, check: Any) -> list[Tensor]:
            is_outside = self.gradients == "outside"
            mapped = shard_map(
                lambda *operands: self(*operands),
                mesh=mesh,
                in_specs=SPECS,
                out_specs=P() if is_outside else outs,
                check=check,
            )
            return differentiated(mapped, OPERANDS) if is_outside else [*mapped(*OPERANDS)]

        return fate_against(lambda: run(RANKS[self.strategy], "global"), lambda: run(ONE, True))


Loss: TypeAlias = Callable[..., Tensor]


def _functional(loss: Loss, weights: Sequence[Tensor]) -> Tensors:
    found: Tensors = torch.func.grad(loss, (0, 1, 2))(*weights)
    return found


def _ours(loss: Loss, weights: Sequence[Tensor]) -> Tensors:
    found: Tensors = value_and_grad(lambda weights: loss(*weights))(tuple(weights))[1]
    return found


def _leaves(weights: Sequence[Tensor]) -> list[Tensor]:
    return [w.detach().clone().requires_grad_() for w in weights]


def _autograd(loss: Loss, weights: Sequence[Tensor]) -> Tensors:
    leaves = _leaves(weights)
    return torch.autograd.grad(loss(*leaves), leaves, materialize_grads=True)


def _some(loss: Loss, weights: Sequence[Tensor]) -> Tensors:
    """Leaves out the gradient of the second weight."""
    leaves = _leaves(weights)
    return torch.autograd.grad(loss(*leaves), leaves[::2], materialize_grads=True)


def _backward(loss: Loss, weights: Sequence[Tensor]) -> Tensors:
    """Goes back twice through one graph."""
    leaves = _leaves(weights)
    total = loss(*leaves)
    total.backward(retain_graph=True)
    total.backward()
    return tuple(torch.zeros_like(w) if w.grad is None else w.grad for w in leaves)


GRADIENTS: Final[Mapping[str, Callable[[Loss, Sequence[Tensor]], Tensors]]] = {
    "torch.func": _functional,
    "value_and_grad": _ours,
    "autograd.grad": _autograd,
    "some": _some,
    "backward": _backward,
}
STRUCTURES: Final = ("whole", "gradients of microbatches", "losses of microbatches", "items")


def drawn(rng: random.Random) -> Flows:
    """Draws a program; most have one cut, and a third of these are the same everywhere."""
    structure, gradients = rng.choice(STRUCTURES), rng.choice(["outside", *sorted(GRADIENTS)])
    if structure == "gradients of microbatches" and gradients == "outside":
        gradients = "torch.func"
    stages = ("first", "second", "last", *(["item"] * 3 if structure == "items" else []))

    def cutting() -> Cutting:
        when = rng.choice(["always", "always", "on ranks"] * 3 + sorted({*CONDITIONS, *MASKS}))
        otherwise = rng.choice(["not cut", "not cut", rng.choice(sorted(CUTS))])
        part, cut = rng.choice(sorted(ALL_PARTS)), rng.choice(sorted(CUTS))
        return Cutting(rng.choice(stages), part, cut, when, otherwise)

    cuts = tuple(cutting() for _ in range(rng.choice((1, 1, 2))))
    strategy = rng.choice(("ranks", "ranks", "auto"))
    return Flows(structure, gradients, rng.choice(("sum", "mean")), cuts, strategy)
