"""Random values of a type, tests of the values that ranks compute against it, and their report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.errors import ShardTypeError, listing
from shardmap_torch.run.trials.draws import random_like
from shardmap_torch.types import AxisType, I, K, Partial, R, Z


@dataclass(frozen=True)
class Fault:
    """A claim that numbers refute.

    Attributes:
        reason: text of what is wrong.
        worst: the largest difference.
        scale: the largest expected value, to compare `worst` with.
    """

    reason: str
    worst: float
    scale: float

    def __str__(self) -> str:
        """Formats it as `the ranks differ; the worst difference is 2, where values reach 3.5`."""
        return (
            f"{self.reason}; the worst difference is {self.worst:.3g}, "
            f"where values reach {self.scale:.3g}"
        )


def total(values: Sequence[Tensor]) -> Tensor:
    """Sums over the ranks."""
    return sum(values[1:], values[0])


def shifted(values: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Makes other addends of the same sum."""
    by = random_like(values[0], generator)
    moved = list(values)
    moved[0], moved[-1] = moved[0] + by, moved[-1] - by
    return moved


def gradients_for(
    results: Sequence[Any], inputs: Mapping[str, Any], seed: int
) -> dict[str, Tensor]:
    """Computes the gradients of what can have one for random cotangents, zeros where none flows.

    These are drawn for every result: one without a gradient on a mesh may have it on another.
    """
    generator = torch.Generator().manual_seed(seed)
    known = {name: x for name, x in inputs.items() if is_smooth(x)}
    smooth = [y for y in results if is_smooth(y)]
    drawn = [torch.randn(y.shape, dtype=y.dtype, generator=generator) for y in smooth]
    pairs = [(y, c.to(y.device)) for y, c in zip(smooth, drawn, strict=True) if y.requires_grad]
    if not (pairs and known):
        return {name: torch.zeros_like(x) for name, x in known.items()}
    ys, cotangents = zip(*pairs, strict=True)
    found = torch.autograd.grad(ys, [*known.values()], cotangents, materialize_grads=True)
    return dict(zip(known, found, strict=True))


def tolerance_of(dtypes: Iterable[torch.dtype]) -> float:
    """Returns the tolerance for rounding in the coarsest dtype over dozens of operations."""
    real = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    coarsest = max((float(torch.finfo(dtype).eps) for dtype in real), default=0.0)
    return float((64 * coarsest) ** (15 / 16))


def differ(first: Tensor, second: Tensor, tolerance: float, reason: str) -> Fault | None:
    """Explains the difference of two tensors beyond rounding, where both are finite."""
    if first.shape != second.shape:
        return Fault(f"{reason}: shapes {list(first.shape)}, {list(second.shape)}", torch.inf, 0)
    finite = torch.isfinite(first) & torch.isfinite(second)
    first, second = (_wide(x[finite]) for x in (first, second))
    if not first.numel():
        return None
    scale = float(second.abs().max())
    if torch.allclose(first, second, rtol=tolerance, atol=tolerance * max(1.0, scale)):
        return None
    return Fault(reason, float((first - second).abs().max()), scale)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def refute(
    claim: AxisType,
    column: Sequence[Tensor],
    resplit: Sequence[Tensor] | None,
    meant: Tensor | None,
    tolerance: float,
) -> Fault | None:
    """Compares a type with the values that each rank computed.

    R, I and K: the ranks are equal. Z: they are zero. Partial: the sum depends on the operands'
    sums alone, and equals the operation on the sums. V claims nothing.

    Args:
        claim: the type, along one axis.
        column: the result of each rank.
        resplit: the same for other addends of each Partial operand's sum; None without one.
        meant: the result of one rank on the sums; None if operands vary, which have no sum.
        tolerance: as for `differ`.

    Returns:
        The first fault, or None.

    Example:
        >>> addends = [torch.tensor(1.0), torch.tensor(3.0)]
        >>> print(refute(Partial, addends, None, torch.tensor(3.5), 1e-6))  # doctest: +ELLIPSIS
        the sum is not the operation on the sums; the worst difference is 0.5, where...
        >>> refute(Partial, addends, None, torch.tensor(4.0), 1e-6)
    """
    faults: list[Fault | None] = []
    if claim in (I, R, K):
        faults += [unequal(x, column[0], tolerance, "the ranks differ") for x in column[1:]]
    elif claim == Z:
        # Z divided by Z is not a number, on all ranks and in the sum as well.
        seen = [x.nan_to_num(0.0) for x in column]
        faults += [differ(x, torch.zeros_like(x), 0.0, "it is not zero") for x in seen]
    elif claim == Partial:
        others = () if resplit is None else (total(resplit),)
        why = "the sum depends on how the operands are split"
        faults += [differ(total(column), other, tolerance, why) for other in others]
        expected = () if meant is None else (meant,)
        why = "the sum is not the operation on the sums"
        faults += [differ(total(column), other, tolerance, why) for other in expected]
    return next((fault for fault in faults if fault is not None), None)


def unequal(first: Tensor, second: Tensor, tolerance: float, reason: str) -> Fault | None:
    """Explains the difference of two tensors, which must be finite in the same entries."""
    if first.shape == second.shape and not torch.equal(first.isfinite(), second.isfinite()):
        return Fault(f"{reason} in what is finite", torch.inf, float("nan"))
    return differ(first, second, tolerance, reason)


@dataclass(frozen=True)
class Validation:
    """The claims that `validate_rule` tried, and those that hold.

    Attributes:
        name: name of the target.
        tried: number of runs on simulated ranks that were compared with the claims.
        shown: the claims that held.
        refused: the types of operands that the checker refuses, which have no claims.
    """

    name: str
    tried: int
    shown: tuple[str, ...]
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Formats the claims, one per line."""
        lines = [f"{self.name}: {len(self.shown)} claims hold in {self.tried} runs"]
        lines += [f"  {claim}" for claim in self.shown]
        return "\n".join(lines + [f"  refused: {refusal}" for refusal in self.refused])


@dataclass
class Findings:
    """Collects the outcome of each claim in each run.

    Attributes:
        name: name of the target.
        tried: the number of runs so far.
        held: the claims that held, in order.
        wrong: those that did not, each with its worst fault.
        refused: as in `Validation`.
    """

    name: str
    tried: int = 0
    held: dict[str, None] = field(default_factory=dict)
    wrong: dict[str, Fault] = field(default_factory=dict)
    refused: dict[str, None] = field(default_factory=dict)

    def note(self, claim: str, fault: Fault | None) -> None:
        """Records the outcome of one claim in one run."""
        if fault is None:
            self.held[claim] = None
        elif claim not in self.wrong or self.wrong[claim].worst < fault.worst:
            self.wrong[claim] = fault

    def report(self) -> Validation:
        """Returns the report.

        Raises:
            ShardTypeError: a claim does not hold.
        """
        if self.wrong:
            count = len(self.wrong)
            does = "claim does" if count == 1 else "claims do"
            raise ShardTypeError(
                listing(
                    f"validate_rule: {self.name}: {count} {does} not hold:",
                    [f"{claim}: {fault}" for claim, fault in self.wrong.items()],
                )
            )
        return Validation(self.name, self.tried, tuple(self.held), tuple(self.refused))
