"""Random steps of training, tensor- and data-parallel, and their mutants."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    ShardMapError,
    all_reduce,
    axis_size,
    check_program,
    convert,
    make_mesh,
    shard_map,
    value_and_grad,
)
from tests.checker.support.classes.trials import EQUAL, REFUSED, WRONG, is_same, numbers

NAMES: Final = ("dp", "tp")
ABSTRACT: Final = make_mesh((2, 2), NAMES, kind="abstract")
RANKS: Final = make_mesh((2, 2), NAMES, kind="simulated", simulate="ranks")
ONE: Final = make_mesh((1, 1), NAMES, kind="simulated", simulate="ranks")
WEIGHTS: Final = (P(None, "tp"), P("tp"), P())
"""Of a column-parallel and a row-parallel matrix, and of a bias."""

SPECS: Final = (WEIGHTS, WEIGHTS, WEIGHTS, P("dp"), P("dp"))
Tensors: TypeAlias = tuple[Tensor, ...]
Loss = Callable[[Tensors], Tensor]


def arguments() -> tuple[Tensors, Tensors, Tensors, Tensor, Tensor]:
    """Makes weights, two moments of each, a batch and its targets."""
    shapes = ((6, 8), (8, 4), (4,))
    weights = tuple(numbers(*shape) / 4 for shape in shapes)
    first = tuple(numbers(*shape).flip(0) / 8 for shape in shapes)
    second = tuple(numbers(*shape).square() for shape in shapes)
    return weights, first, second, numbers(8, 6), numbers(8, 4)


def _ours(loss: Loss, weights: Tensors) -> tuple[Tensor, Tensors]:
    found: tuple[Tensor, Tensors] = value_and_grad(loss)(weights)
    return found


def _functional(loss: Loss, weights: Tensors) -> tuple[Tensor, Tensors]:
    gradients, value = torch.func.grad_and_value(loss)(weights)
    return value, gradients


def _autograd(loss: Loss, weights: Tensors) -> tuple[Tensor, Tensors]:
    leaves = tuple(w.detach().requires_grad_() for w in weights)
    value = loss(leaves)
    return value.detach(), torch.autograd.grad(value, leaves)


GRADIENTS: Final[Mapping[str, Callable[[Loss, Tensors], tuple[Tensor, Tensors]]]] = {
    "value_and_grad": _ours,
    "torch.func": _functional,
    "torch.autograd": _autograd,
}

Op: TypeAlias = Literal["sum", "mean"]

SUMS_ELSEWHERE: Final = ("weights", "first moment", "second moment", "activation", "hidden", "step")
"""Places where a mutant sums over dp instead of summing gradients."""

MISTAKES: Final = (
    *(f"sums {place} instead" for place in SUMS_ELSEWHERE),
    *("forgets the sum", "forgets one sum", "sums twice", "sums over tp", "takes another mean"),
    *("clips before the sum", "clips each rank's part", "clips by a norm over dp as well"),
    *("clips by a mean norm", "decays before the sum", "squares before the sum"),
    *("forgets the sum over tp", "sums over tp too late", "copies without a sum"),
    *("adds the bias on each rank", "returns each rank's loss", "divides by a rank's rows"),
    *("divides by the number of ranks", "sums the gradients' norms", "sums the rate times these"),
)


@dataclass(frozen=True)
class Training:
    """A step: loss, gradient, its reduction, clipping, an optimiser.

    Attributes:
        loss: "sum" over the batch, or "mean" of it.
        gradient: how the gradient is taken.
        clips: whether gradients are clipped by the norm of all of them.
        optimizer: "sgd", "momentum" or "adamw".
        mistake: what a mutant does.
    """

    loss: Op
    gradient: str
    clips: bool
    optimizer: str
    mistake: str | None = None

    @property
    def right(self) -> bool:
        return self.mistake is None

    @property
    def sums_elsewhere(self) -> bool:
        """Returns whether it sums something else instead of the gradients."""
        return self._errs(*(f"sums {place} instead" for place in SUMS_ELSEWHERE))

    def _errs(self, *names: str) -> bool:
        return self.mistake in names

    def _sums(self, place: str, x: Tensor) -> Tensor:
        """Sums here, in a mutant that does so instead of summing gradients."""
        errs = self._errs(f"sums {place} instead")
        return all_reduce(x, "dp", dst=I, op=self.loss) if errs else x

    # ------------------------------------------------------------------------------- the model

    def _forward(self, weights: Tensors, x: Tensor) -> Tensor:
        column, row, bias = weights
        if self._errs("copies without a sum"):
            x = convert(x, "tp", src=R, dst=I)
        hidden = self._sums("hidden", (x @ column).tanh())
        out = hidden @ row
        if self._errs("adds the bias on each rank"):
            out = out + bias
        if self._errs("sums over tp too late"):
            return all_reduce(out.tanh(), "tp", dst=I) + bias
        if not self._errs("forgets the sum over tp"):
            out = all_reduce(out, "tp", dst=I)
        if not self._errs("adds the bias on each rank"):
            out = out + bias
        return self._sums("activation", out)

    def _value(self, weights: Tensors, x: Tensor, y: Tensor) -> Tensor:
        rows = (self._forward(weights, x) - y).square().sum(1)
        if self._errs("divides by a rank's rows"):
            return rows.sum() / len(rows)
        return rows.sum() if self.loss == "sum" else rows.mean()

    # ---------------------------------------------------------------------------- the gradients

    def _reduced(self, number: int, g: Tensor, w: Tensor) -> Tensor:
        if self._errs("forgets the sum") or self.sums_elsewhere:
            return g
        if self._errs("forgets one sum") and number == 1:
            return g
        if self._errs("decays before the sum"):
            g = g + 0.1 * w
        if self._errs("divides by the number of ranks"):
            g = g / axis_size("dp")
        other: Mapping[Op, Op] = {"sum": "mean", "mean": "sum"}
        op = other[self.loss] if self._errs("takes another mean") else self.loss
        axis = "tp" if self._errs("sums over tp") else "dp"
        g = all_reduce(g, axis, dst=I, op=op)
        return all_reduce(g, "dp", dst=I, op=op) if self._errs("sums twice") else g

    def _clipped(self, gradients: Tensors) -> Tensors:
        """Scales gradients by their norm, to which a bias, equal over tp, adds once."""
        squares = [g.square().sum() for g in gradients]
        if self._errs("clips each rank's part"):
            total = squares[0] + squares[1] + squares[2]
        elif self._errs("sums the gradients' norms"):
            total = all_reduce((squares[0] + squares[1]).sqrt(), "tp", dst=I).square() + squares[2]
        elif self._errs("clips by a mean norm"):
            total = all_reduce(squares[0] + squares[1], "tp", dst=I, op="mean") + squares[2]
        else:
            axes = NAMES if self._errs("clips by a norm over dp as well") else "tp"
            total = all_reduce(squares[0] + squares[1], axes, dst=I) + squares[2]
        scale = (0.5 / total.sqrt()).clamp(max=1.0)
        return tuple(g * scale for g in gradients)

    # ---------------------------------------------------------------------------- the optimiser

    def _updated(self, w: Tensor, m: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m = self._sums("first moment", 0.9 * m + 0.1 * g)
        square = g.square()
        if self._errs("squares before the sum"):
            square = all_reduce(square, "dp", dst=I)
        v = self._sums("second moment", 0.99 * v + 0.01 * square)
        if self.optimizer == "adamw":
            change = 0.1 * (m / (v.sqrt() + 1e-3) + 0.1 * w)
        else:
            change = 0.1 * (m if self.optimizer == "momentum" else g)
        if self._errs("sums the rate times these"):
            change = all_reduce(change, "dp", dst=I, op=self.loss)
        return self._sums("weights", w - self._sums("step", change)), m, v

    def __call__(
        self, weights: Tensors, first: Tensors, second: Tensors, x: Tensor, y: Tensor
    ) -> tuple[Tensors, Tensors, Tensors, Tensor]:
        """Runs as the body of one rank."""
        take = GRADIENTS[self.gradient]
        value, gradients = take(lambda weights: self._value(weights, x, y), weights)
        if self._errs("clips before the sum"):
            gradients = self._clipped(gradients)
        gradients = tuple(map(self._reduced, range(3), gradients, weights))
        if self.clips and not self._errs("clips before the sum"):
            gradients = self._clipped(gradients)
        updated = map(self._updated, weights, first, second, gradients)
        weights, first, second = zip(*updated, strict=True)
        if not self._errs("returns each rank's loss"):
            value = all_reduce(value, "dp", dst=I, op=self.loss)
        return weights, first, second, value

    # -------------------------------------------------------------------------------- its fate

    def _mapped(self, mesh: Any, check: Any) -> Any:
        outs = (WEIGHTS, WEIGHTS, WEIGHTS, P())
        body: Any = lambda *args: self(*args)  # noqa: E731 - verdicts belong to functions
        return shard_map(body, mesh=mesh, in_specs=SPECS, out_specs=outs, check=check)

    def is_accepted(self, check: Any) -> bool:
        """Returns whether a strictness accepts it."""
        try:
            check_program(self._mapped(ABSTRACT, check), *arguments())
        except ShardMapError:
            return False
        return True

    def fate(self) -> str:
        """Returns REFUSED if local or global strictness refuses it, else whether it is right."""
        if not self.is_accepted("local") or not self.is_accepted("global"):
            return REFUSED
        found, expected = (
            self._mapped(mesh, check)(*arguments()) for mesh, check in ((RANKS, True), (ONE, False))
        )
        pairs = zip(_leaves(found), _leaves(expected), strict=True)
        return EQUAL if all(is_same(x, y) for x, y in pairs) else WRONG


def _leaves(found: Any) -> list[Tensor]:
    *tensors, value = found
    return [*(x for each in tensors for x in each), value]


def drawn(rng: random.Random) -> Training:
    """Draws a right step."""
    losses: tuple[Op, Op] = ("sum", "mean")
    return Training(
        rng.choice(losses),
        rng.choice(sorted(GRADIENTS)),
        rng.random() < 0.5,
        rng.choice(("sgd", "momentum", "adamw")),
    )


def mutant(rng: random.Random) -> Training:
    """Draws a step with one mistake, which may be harmless; those of clipping clip."""
    step = replace(drawn(rng), mistake=rng.choice(MISTAKES))
    assert step.mistake is not None
    return replace(step, clips=step.clips or "clip" in step.mistake or "norm" in step.mistake)
