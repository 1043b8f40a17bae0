"""Pending sums and known factors: how a value on the ranks differs from that on one device.

Ranks have addends of it (a pending sum), or have it multiplied by a known number: after a mean over
each rank's part, the sum over ranks is `axis_size` times the mean on one device. Both pass through
linear operations, and through nothing else; so a multiple is typed as a pending sum over an axis of
its own. The gradient of a multiple is that multiple of the gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.rules.infer import is_factor
from shardmap_torch.checker.rules.rule import overloads
from shardmap_torch.checker.spmd.layout import UnrelatedError, numbers_of_shards
from shardmap_torch.checker.spmd.ops.advice import in_digits, multiple
from shardmap_torch.core.torch_private.engine import OpOverload

Axes = frozenset[str]

NO_AXES: Final[Axes] = frozenset()
ONE: Final = Fraction(1)


@dataclass(frozen=True)
class Sums:
    """The reductions and the factor between values in one storage and their values on one device.

    Attributes:
        partial: axes over which the value meant is the sum over the ranks.
        loose: axes over which each rank has its own value, which means nothing on one device.
        pending: the loose axes over which the "max" or the "min" is meant.
        scale: the factor between the value, after the sums, and that on one device.
        means: axes over which a mean of each rank's part was taken, so that the factor is not 1.
        cause: the step that made the factor, for messages.
        zero: whether the value is known to be zeros.
        flows: whether a gradient flows through an extremum that is pending.
        equal: axes over which it is equal on all ranks, though types cannot say so: the cotangent
            of a pending sum in a backward of the user's own.
    """

    partial: Axes = NO_AXES
    loose: Axes = NO_AXES
    pending: frozenset[tuple[str, str]] = frozenset()
    scale: Fraction = ONE
    means: Axes = NO_AXES
    cause: str = ""
    zero: bool = False
    flows: bool = False
    equal: Axes = NO_AXES

    @property
    def is_finished(self) -> bool:
        """Returns whether the value is that on one device."""
        is_scaled = self.scale is not ONE and self.scale != 1
        return not (self.partial or self.loose or self.pending or self.equal or is_scaled)

    def over(self, *types: str) -> Axes:
        """Returns the axes over which one of these reductions is pending."""
        return frozenset(axis for axis, axis_type in self.pending if axis_type in types)

    def scaled(self, factor: Fraction, means: Axes, cause: str) -> "Sums":
        """Returns the same sums with the factor multiplied; a factor of 1 has no cause."""
        scale = self.scale if factor is ONE else self.scale * factor
        if scale is ONE or scale == 1:
            return Sums(self.partial, self.loose, self.pending, equal=self.equal)
        known = scale, self.means | means, self.cause or cause
        return Sums(self.partial, self.loose, self.pending, *known, equal=self.equal)


FINISHED: Final = Sums()


def reject_scaled(sums: Sums) -> None:
    """Requires that a value is not a multiple of that on one device.

    Raises:
        UnrelatedError: it is.
    """
    if sums.scale == 1:
        return
    axis = min(sums.means & sums.partial or sums.means, default="")
    raise UnrelatedError(*multiple(sums.scale, sums.cause, axis, axis in sums.partial))


DIVIDING: Final = overloads("div.Tensor div.Scalar div_.Tensor div_.Scalar")
_SCALING: Final = overloads("mul.Tensor mul.Scalar mul_.Tensor mul_.Scalar") + DIVIDING

_FACTORS: Final = {
    **dict.fromkeys(_SCALING, "other"),
    **dict.fromkeys(overloads("full new_full full_like"), "fill_value"),
    **dict.fromkeys(overloads("scalar_tensor"), "s"),
}
"""Operations whose results are multiples of a number, and the name of that argument."""


def factor_of(
    op: OpOverload, here: Mapping[str, Any], there: Mapping[str, Any], dtype: torch.dtype
) -> tuple[str, Fraction] | None:
    """Returns the argument that scales an operation, and the factor between both programs, or None.

    Example:
        >>> import torch
        >>> div, float32 = torch.ops.aten.div.Tensor, torch.float32
        >>> factor_of(div, {"other": 4}, {"other": 12}, float32)  # by a local size
        ('other', Fraction(3, 1))
    """
    name = _FACTORS.get(op, "")
    if not (dtype.is_floating_point or dtype.is_complex or name == "other"):
        return None  # an integer or a bool may not hold the number
    factor = _ratio(op, here.get(name), there.get(name))
    return None if factor is None else (name, factor)


def _ratio(op: OpOverload, by: Any, there: Any) -> Fraction | None:
    """Returns the factor between an operation by a number and by another; None for no numbers."""
    if not (is_factor(by) and is_factor(there)):
        return None
    if by == there:
        return ONE
    ratio = Fraction(by) / Fraction(there)
    if op in DIVIDING:
        ratio = 1 / ratio
    # 1 / 3 in floating point is no third.
    simple = ratio.limit_denominator(_LARGEST)
    return simple if abs(simple - ratio) <= _ROUNDING * abs(ratio) else ratio


def part_of(here: Tensor, there: Tensor | None, sizes: Mapping[str, int]) -> Fraction | None:
    """Returns the part of numbers on one device that those on a rank are, of some axes' sizes.

    Example:
        >>> import torch
        >>> part_of(torch.tensor(4), torch.tensor(8), {"dp": 2, "tp": 4})
        Fraction(1, 2)
    """
    if there is None or here.shape != there.shape or here.dtype != there.dtype:
        return None
    for count in numbers_of_shards(sizes):
        if torch.equal(here if count == 1 else here * count, there):
            return Fraction(1, count)
    return None


_LARGEST: Final = 1 << 20
_ROUNDING: Final = Fraction(1, 1 << 50)
"""Two divisions of floating-point numbers, and their quotient, are nearer than this."""


def common_scale(sums: Sequence[Sums]) -> Sums:
    """Returns the factor that these have in common, except for factors of 1.

    Raises:
        UnrelatedError: they have several.
    """
    found = [each for each in sums if each.scale is not ONE and each.scale != 1]
    for other in found[1:]:
        if other.scale != found[0].scale:
            raise UnrelatedError(
                f"one operand is {in_digits(found[0].scale)} times its value there, because of "
                f"{found[0].cause}, and another {in_digits(other.scale)} times, because of "
                f"{other.cause}"
            )
    return found[0] if found else FINISHED
