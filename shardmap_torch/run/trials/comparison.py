"""Compares what ranks compute from random numbers with what one device computes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.core.source_location import error_site
from shardmap_torch.errors import show
from shardmap_torch.run.trials.runs import GRADIENT, Draw, Program, Values
from shardmap_torch.run.trials.watch import Seen, UntriedError, Watched


class RefutedError(Exception):
    """Ranks compute something else than one device; says what."""


_TRIALS: Final = 3
"""The number of trials, if these reach all pieces."""

_SCALES: Final = (1.0, 0.1, 10.0, 1.0, 0.3, 3.0, 1.0, 0.03, 30.0, 1e3, 1e-2, 1e-3, 1e-4, 1e-5, 1e-7)
"""Scales of the numbers of each trial that may be made."""

_VISIBLE: Final = 1e-6
"""Size from which a result tells which pieces are right."""

_OF_ENTRY: Final = 1e-9
_OF_LARGEST: Final = 1e-11
_ZERO: Final = 1e-12
"""Rounding of 64-bit numbers: after exponentials of hundreds, in sums of thousands, of zero."""

Steps = Sequence[tuple[Any, ...]]


@dataclass
class Comparison:
    """Trials of the ranks' program and the one of one device.

    Attributes:
        ranks: the program of the ranks.
        one: the same on one device.
        num_trials: the number of trials that count.
        worst: the largest difference, as a part of the largest entry.
        zero: results and gradients that were zero in every trial.
    """

    ranks: Program
    one: Program
    num_trials: int = 0
    worst: float = 0.0
    zero: set[str] = field(default_factory=set)
    _seen: tuple[Seen, Seen] = field(default_factory=lambda: (Seen(), Seen()))
    _steps: tuple[Steps, Steps] = ((), ())
    _void: int = 0

    def run(self) -> None:
        """Makes trials until all pieces of both programs were met.

        Raises:
            RefutedError: the ranks compute something else.
            UntriedError: random numbers cannot decide.
        """
        expected, watched = _run(self.one, Draw(0, 1.0))
        lengths = watched.lengths
        self.zero = {name for name, x in expected.items() if isinstance(x, Tensor)}
        positive: frozenset[int] = frozenset()
        for seed, scale in enumerate(_SCALES):
            if self._void == 1 and not positive:
                positive = self._positive(lengths)
            if self.num_trials < _TRIALS:
                self._try(Draw(seed + 1, scale, positive, lengths, watched.limits_within))
            else:
                self._try(Draw(seed + 1, scale, frozenset(), lengths, watched.limits))
            if self.num_trials >= _TRIALS and not any(seen.missing for seen in self._seen):
                break
        self._require_decided()
        self._require_same_steps(Draw(1, _SCALES[0], lengths=lengths))

    def _positive(self, lengths: Mapping[int, int]) -> frozenset[int]:
        """Returns the arguments that have to be positive for results to be finite.

        Others are not: functions of these may be equal for positive numbers alone.
        """
        found = frozenset(self.one.likes)
        for at in self.one.likes:
            draws = [Draw(seed, 1.0, found - {at}, lengths) for seed in range(_TRIALS)]
            if all(_is_defined(_run(self.one, draw)[0]) for draw in draws):
                found -= {at}
        return found

    @property
    def averages(self) -> bool:
        """True if losses have targets, none of which was ignored in the trials."""
        return any(name == "nll_loss_forward" for name, *_ in self._steps[0])

    def report(self, over: str) -> str:
        """Formats what was found."""
        ranks = self.ranks.call.mesh.size
        within = f" within {self.worst:.0e}" if self.worst else ""
        lines = [
            f"tried with numbers over {over}: in {self.num_trials} trials {ranks} ranks had the "
            f"results and gradients of one device{within}"
        ]
        lines += [f"  zero in all of them: {name}" for name in sorted(self.zero)]
        return "\n".join(lines)

    def _try(self, draw: Draw) -> None:
        expected, one = _run(self.one, draw)
        if not _is_defined(expected):
            self._void += 1
            return
        try:
            values, ranks = self.ranks.run(draw)
        except Exception as error:  # the user's code may raise anything
            raise RefutedError(f"on the ranks it fails: {_described(error)}") from error
        self.num_trials += 1
        self._steps = one.steps, ranks.steps
        self._require_equal(values, expected)
        fixed = _fixed_results(expected, one)
        self.zero -= {name for name, x in expected.items() if name in fixed or _size(x) > _ZERO}
        if all(_size(x) > _VISIBLE for name, x in expected.items() if name not in self.zero):
            for seen, watched in zip(self._seen, (one, ranks), strict=True):
                seen.add(watched.seen)

    def _require_equal(self, values: Values, expected: Values) -> None:
        for name in sorted(values.keys() ^ expected.keys()):
            where = "on one device" if name in values else "on the ranks"
            raise RefutedError(f"{where} there is no result {name}")
        for name, other in expected.items():
            difference = _difference(values[name], other)
            if isinstance(difference, str):
                raise RefutedError(f"{name} {difference}")
            self.worst = max(self.worst, difference)

    def _require_decided(self) -> None:
        """Requires that the trials suffice."""
        if self.num_trials < _TRIALS:
            raise UntriedError("results are infinite or not a number for random inputs")
        one, ranks = map(_losses, self._steps)
        if one != ranks:
            raise UntriedError("losses whose targets may be ignored are others on one device")
        for seen, where in zip(self._seen, ("on one device", "on the ranks"), strict=True):
            if seen.missing is not None:
                raise UntriedError(f"{where} {seen.missing}")
        for name in self.zero:
            if not name.startswith(GRADIENT):
                raise UntriedError(f"{name} is zero for all random inputs")

    def _require_same_steps(self, draw: Draw) -> None:
        """Requires that the body does the same with the dtypes of the call."""
        for program, steps in zip((self.one, self.ranks), self._steps, strict=True):
            _, own = _run(program, draw, wide=False)
            for mine, other in zip_longest(own.steps, steps):
                if mine != other:
                    raise UntriedError(
                        f"with the dtypes of its arguments it does {_step(mine)}, and with numbers "
                        f"of 64 bits {_step(other)}"
                    )


def _run(program: Program, draw: Draw, wide: bool = True) -> tuple[Values, Watched]:
    try:
        return program.run(draw, wide)
    except Exception as error:  # the user's code may raise anything
        where = f"on the {program.call.mesh}"
        raise UntriedError(f"{where} it fails: {_described(error)}") from error


def _described(error: Exception) -> str:
    site = error_site(error)
    return f"{type(error).__name__}: {error}" + (f", at {site}" if site is not None else "")


def _losses(steps: Steps) -> set[tuple[Any, ...]]:
    return {step for step in steps if step[0] == "nll_loss_forward"}


def _step(step: tuple[Any, ...] | None) -> str:
    if step is None:
        return "no more"
    name, *literals = step
    told = [show(literal) for literal in literals if literal is not None]
    return f"{name}({', '.join(told)})"


def _fixed_results(values: Values, watched: Watched) -> set[str]:
    tensors = [name for name, x in values.items() if isinstance(x, Tensor)]
    return {name for name, fixed in zip(tensors, watched.fixed, strict=False) if fixed}


def _is_defined(values: Values) -> bool:
    """Returns whether all numbers are finite."""
    return all(bool(x.isfinite().all()) for x in values.values() if isinstance(x, Tensor))


def _size(value: Any) -> float:
    """Returns the largest entry; infinity for what has none."""
    if not isinstance(value, Tensor) or not value.numel():
        return math.inf
    return float(value.abs().max()) if is_smooth(value) else float(bool(value.any()))


def _difference(mine: Any, other: Any) -> float | str:
    """Returns the difference as a part of the largest entry, or says what differs."""
    if mine is None and other is None:
        return 0.0
    if mine is None or other is None:  # no gradient is one of zeros
        mine, other = (
            torch.zeros_like(y) if x is None else x for x, y in ((mine, other), (other, mine))
        )
    if not isinstance(other, Tensor):
        same = type(mine) is type(other) and bool(mine == other)
        return 0.0 if same else f"is {show(mine)} on the ranks and {show(other)} on one device"
    if mine.shape != other.shape:
        return f"has shape {list(mine.shape)} on the ranks and {list(other.shape)} on one device"
    if not other.numel():
        return 0.0
    if not is_smooth(other):
        apart = (mine != other).double()
        return 0.0 if not apart.any() else _worst(mine, other, apart)
    apart = (mine - other).abs().nan_to_num(torch.inf)
    scale = float(other.abs().max())
    if bool((apart > _OF_ENTRY * other.abs() + max(_OF_LARGEST * scale, _ZERO)).any()):
        return _worst(mine, other, apart)
    return float(apart.max()) / max(scale, 1.0)


def _worst(mine: Tensor, other: Tensor, apart: Tensor) -> str:
    at = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    place = f" at {list(at)}" if at else ""
    a, b = mine[at].item(), other[at].item()
    shown = (f"{a:.6g}", f"{b:.6g}") if is_smooth(other) else (str(a), str(b))
    return f"is {shown[0]} on the ranks and {shown[1]} on one device{place}"
