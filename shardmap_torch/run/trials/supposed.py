"""Supposes values of one step of the ranks' program, to name the step that is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.core.source_location import Site
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.record.program import Step
from shardmap_torch.run.trials.dependence import tolerance
from shardmap_torch.run.trials.draws import Draw
from shardmap_torch.run.trials.operators import name_of
from shardmap_torch.run.trials.runs import Program, Values
from shardmap_torch.run.trials.watch import Unwatched

_LOOKUPS: Final = ("embedding", "index", "index_select")
_DRAWS: Final = 3


@dataclass(eq=False)
class _Supposed(Unwatched):
    """Computes a run with zeros for rows of a step's result that are not one device's.

    Attributes:
        step: the step; None to change none.
        whole: its result on one device; empty to find that.
    """

    step: Step | None
    whole: list[Tensor] = field(default_factory=list)

    def compute(self, step: Step, arguments: Sequence[dict[str, Any]]) -> Sequence[Any]:
        """Computes an operator on each rank, and changes what the step makes."""
        found = super().compute(step, arguments)
        if step is not self.step:
            return found
        if not self.whole:
            self.whole += found
        (whole,) = self.whole
        return [_owned(y, whole) if y.shape == whole.shape else y for y in found]


def _owned(y: Tensor, whole: Tensor) -> Tensor:
    return torch.where((y == whole).all(-1, keepdim=True), y, 0)


def lookup_of_all(ranks: Program, one: Program, draw: Draw) -> Site | None:
    """Finds a lookup whose rows ranks add up though they do not own them, which alone is wrong."""
    pairs = [*zip(_lookups(ranks), _lookups(one), strict=False)]
    draws = [replace(draw, seed=draw.seed + at, closures={}) for at in range(_DRAWS)]
    if not pairs or any(_is_right(ranks, one, None, None, each) for each in draws):
        return None
    for mine, other in pairs:
        if all(_is_right(ranks, one, mine, other, each) for each in draws):
            return mine.site
    return None


def _lookups(program: Program) -> list[Step]:
    steps = program.record.steps
    ops = [each for each in steps if isinstance(each.run, OpOverload)]
    return [each for each in ops if name_of(each.run) in _LOOKUPS]  # type: ignore[arg-type]


def _is_right(
    ranks: Program, one: Program, mine: Step | None, other: Step | None, draw: Draw
) -> bool:
    try:
        alone = _Supposed(draw, one.noise(draw), other)
        expected = _results(one, alone)
        found = _results(ranks, _Supposed(draw, ranks.noise(draw), mine, alone.whole))
    except Exception:  # the user's code may raise anything
        return False
    return all(_is_same(found.get(path), x) for path, x in expected.items())


def _results(program: Program, computer: _Supposed) -> Values:
    return program.results(program.evaluation(computer.draw.values(program.likes), computer))


def _is_same(mine: Any, other: Any) -> bool:
    if not isinstance(mine, Tensor) or not isinstance(other, Tensor) or mine.shape != other.shape:
        return mine is other
    return bool(((mine - other).abs() <= tolerance(other)).all())
