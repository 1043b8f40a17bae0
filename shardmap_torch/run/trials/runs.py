"""Runs a checked call with random numbers on simulated ranks, and computes its gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.guards.monitor import CheckedStep, Departure, Difference, copied
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.core.tree import flatten
from shardmap_torch.run import threads
from shardmap_torch.run.trials.watch import UntriedError, Watched, widened


@dataclass(frozen=True)
class Like:
    """Properties of an argument that its random values have too."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    grad: bool


_MANY: Final = 1 << 20
"""The range of integers that index nothing."""

_FEW: Final = 4
"""The range of half of all integers."""


@dataclass(frozen=True)
class Draw:
    """One choice of random numbers.

    Attributes:
        seed: of the generator.
        scale: the standard deviation of floating numbers.
        positive: positions of arguments whose floating numbers are their absolute values.
        lengths: for integers the length of what they index; None if that is not known yet.
        limits: for integers others that some of them are, by which conditions change.
    """

    seed: int
    scale: float
    positive: frozenset[int] = frozenset()
    lengths: Mapping[int, int] | None = None
    limits: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def values(self, likes: Mapping[int, Like], wide: bool) -> dict[int, Tensor]:
        """Draws the arguments by position."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = {at: self._draw(at, like, generator) for at, like in likes.items()}
        return {
            at: x.to(likes[at].device, x.dtype if wide else likes[at].dtype).requires_grad_(
                likes[at].grad
            )
            for at, x in drawn.items()
        }

    def _draw(self, position: int, like: Like, generator: torch.Generator) -> Tensor:
        dtype = widened(like.dtype)
        if dtype == torch.bool:
            return torch.rand(like.shape, generator=generator) < 0.5
        if not (dtype.is_floating_point or dtype.is_complex):
            length = 1 if self.lengths is None else self.lengths.get(position, _MANY)
            length = min(length, torch.iinfo(dtype).max)
            drawn = torch.randint(length, like.shape, generator=generator)
            often = torch.rand(like.shape, generator=generator) < 0.5
            drawn[often] %= _FEW  # several are equal, and small
            for limit in sorted(self.limits.get(position, ())):
                drawn[torch.rand(like.shape, generator=generator) < 0.2] = limit
            return drawn.to(dtype)
        drawn = self.scale * torch.randn(like.shape, dtype=dtype, generator=generator)
        return drawn.abs().to(dtype) if position in self.positive else drawn

    def cotangent(self, position: int, y: Tensor) -> Tensor:
        """Draws the cotangent of a result."""
        generator = torch.Generator().manual_seed(self.seed + 7919 * (position + 1))
        return torch.randn(y.shape, dtype=widened(y.dtype), generator=generator).to(y)


GRADIENT: Final = "the gradient of "

Values = dict[str, Any]
"""Results by their paths, then gradients of arguments; None for one that is not differentiable."""


@dataclass(frozen=True)
class Program:
    """A call on one mesh, checked there.

    Attributes:
        call: the call; its tensors do not count.
        verdict: the verdict on it.
        likes: what is drawn for each argument, by its position.
    """

    call: Call
    verdict: Verdict
    likes: Mapping[int, Like]

    @property
    def work(self) -> int:
        """The number of entries that all ranks compute, forward and backward."""
        uses = (use for equation in self.verdict.equations for use in equation.results)
        return self.call.mesh.size * sum(torch.Size(use.shape).numel() for use in uses)

    def run(self, draw: Draw, wide: bool = True) -> tuple[Values, Watched]:
        """Computes results and gradients, in the dtypes of the call or in wide ones.

        Raises:
            UntriedError: random numbers cannot decide about the body.
        """
        watched = Watched(tuple(self.likes), wide)
        inputs = draw.values(self.likes, wide)
        leaves = list(self.call.leaves)
        for at, x in inputs.items():
            leaves[at] = x
        start = copied(self.verdict.start, _widened) if wide else self.verdict.start
        applied = replace(self.verdict, start=start).apply(replace(self.call, leaves=leaves), _stop)
        applied = replace(
            applied, function=watched.body(applied.function), separate=watched.backward
        )
        try:
            results, _ = flatten(threads.run(applied))
            return self._with_gradients(results, inputs, draw), watched
        except Departure as departure:
            raise UntriedError(f"its steps are others:\n{departure.difference}") from None

    def _with_gradients(
        self, results: Sequence[Any], inputs: Mapping[int, Tensor], draw: Draw
    ) -> Values:
        values: Values = dict(zip(self.verdict.result.match.paths, results, strict=True))
        leaves = {at: x for at, x in inputs.items() if x.requires_grad}
        pairs = [
            (y, draw.cotangent(position, y))
            for position, y in enumerate(results)
            if is_smooth(y) and y.requires_grad
        ]
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        if leaves and pairs:
            ys, cotangents = zip(*pairs, strict=True)
            gradients = torch.autograd.grad(ys, [*leaves.values()], cotangents, allow_unused=True)
        paths = self.call.match.paths
        named = {GRADIENT + paths[at]: g for at, g in zip(leaves, gradients, strict=True)}
        return {
            name: x.detach() if isinstance(x, Tensor) else x for name, x in (values | named).items()
        }


def _stop(difference: Difference) -> NoReturn:
    raise Departure(difference)


def _widened(step: CheckedStep) -> CheckedStep:
    """Returns the same step on wide numbers."""
    return replace(step, dtype=None if step.dtype is None else widened(step.dtype))
