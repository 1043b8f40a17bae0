"""Compares what ranks compute from random numbers with what one device computes."""

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.rules.infer import is_real
from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.core.source_location import Site, error_site
from shardmap_torch.errors import show
from shardmap_torch.run.trials.dependence import ZERO, Dependence, tolerance
from shardmap_torch.run.trials.draws import (
    APART,
    FARTHER,
    HIGHEST,
    LEVELLED,
    MEETING,
    ODD,
    PLAIN,
    SHIFTED,
    STRUCTURED,
    TIED,
    UNDEFINED,
    Draw,
    Style,
)
from shardmap_torch.run.trials.operators import ASK_FINITE, LARGE, is_integer
from shardmap_torch.run.trials.runs import GRADIENT, Program, Values
from shardmap_torch.run.trials.seen import Seen
from shardmap_torch.run.trials.supposed import lookup_of_all
from shardmap_torch.run.trials.watch import UntriedError, Watched


class RefutedError(Exception):
    """Ranks compute something else than one device; says what.

    Attributes:
        lookup: the line of a lookup whose rows ranks add up though they do not own them.
    """

    lookup: Site | None = None


_VISIBLE: Final = 1e-6
"""Size from which a result tells which pieces are right."""

_ROUNDING: Final = 1e-14
"""Rounding of inputs, in parts of these."""

_SHARE: Final = 1e-2
"""The part of a difference that such rounding must not make."""

_TIES: Final = 3
"""Minimal number of trials with equal entries, where these may matter."""

_UNEVEN: Final = 4
"""Minimal number of those in which ranks have an extremum more or less often, if any has."""

_ODD_SLACK: Final = 1e4
"""The factor by which results of odd numbers may differ more: a square of 1e2 takes four digits.

So does a loss of logits of 1e5, whose gradient is a difference.
"""

_PROBES: Final = 16
"""Maximal number of limits of an integer argument that are looked at."""

_NEAR: Final = 8
"""Maximal number of bounds near which all numbers are tried."""

Limits = Mapping[int, frozenset[int]]


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
    _excused: Seen = field(default_factory=Seen)
    _ties: bool = False
    _uneven: int = 0
    _summarizes: bool = False
    _asks_finite: bool = False
    _loses_bits: bool = False
    _unknown: UntriedError | None = None
    _bounds: set[float] = field(default_factory=set)
    _lost: set[str] = field(default_factory=set)
    _untold: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Makes trials until all pieces of both programs, and all dependences, were met.

        Raises:
            RefutedError: the ranks compute something else.
            UntriedError: random numbers cannot decide.
        """
        blocks = self.ranks.blocks
        expected, watched = _run(self.one, Draw(0, blocks=blocks))
        self.zero = {name for name, x in expected.items() if isinstance(x, Tensor)}
        self._untold = {*expected}
        base = Draw(1, blocks=blocks, lengths=watched.lengths)
        base = replace(base, limits=self._limits(watched, self._limits_of_ranks(), base))
        positive: frozenset[int] = frozenset()
        if not _is_defined(_run(self.one, base)[0]):
            positive = self._positive(base)
        base = replace(base, positive=positive)
        dependence = Dependence(self.one, blocks, self.ranks.result_blocks)
        try:
            self._meet_all(base, dependence)
        except RefutedError as refuted:
            refuted.lookup = lookup_of_all(self.ranks, self.one, base)
            raise
        self._require_decided(dependence)

    def _meet_all(self, base: Draw, dependence: Dependence) -> None:
        # Each choice has closures of its own, the same for ranks and for one device.
        draws = (replace(base, seed=seed, closures={}) for seed in count(1))
        for style in PLAIN:
            draw = replace(next(draws), style=style)
            if self._try(draw) and style is PLAIN[0]:
                dependence.look(draw, self._lost)
        for style in STRUCTURED if self._is_discrete(draw) else ():
            draw = replace(next(draws), style=style)
            if self._try(draw, partly=True):
                dependence.look(draw, self._lost)
        for number, style in enumerate(TIED if self._ties else ()):
            if number < _TIES or self._seen[0].lacks_ties or 0 < self._uneven < _UNEVEN:
                self._try(replace(next(draws), style=style), partly=True)
        asks_finite = self._asks_finite or not ASK_FINITE.isdisjoint(
            self.one.operators | self.ranks.operators
        )
        in_pieces = asks_finite or any(seen.true or seen.false for seen in self._seen)
        are_several = sum(is_real(like.dtype) for like in self.one.likes.values()) > 1
        special = APART * are_several + ODD * in_pieces
        special += UNDEFINED * asks_finite + LEVELLED * self._summarizes
        special += MEETING * self._loses_bits
        # A softmax of numbers of which few are beyond a bound does not show what happens there.
        special += tuple(Style(shift=bound) for bound in sorted(self._bounds)[:_NEAR])
        for style in special:
            self._try(replace(next(draws), style=style), partly=True)
        self._see_all(draws, dependence)
        self._go_farther(draws)

    def _go_farther(self, draws: Iterator[Draw]) -> None:
        """Makes trials until pieces are met which the others have missed."""
        # Signs of what an input is multiplied by may hide the largest of a block, once.
        highest = (HIGHEST,) * 3 * self.one.parts * self._summarizes
        for style in highest + FARTHER:
            if self.num_trials >= len(PLAIN) and not any(self._missing()):
                return
            # Functions of positive numbers may be equal for these alone.
            self._try(replace(next(draws), style=style, positive=frozenset()))
        self._move_limits(draws)

    def _move_limits(self, draws: Iterator[Draw]) -> None:
        """Makes trials with other numbers in place of those beyond which no draw has come.

        A bound that holds for all numbers has no other side, and what stands for infinity has one
        that no input should reach. Programs that agree for other bounds, on both sides of them, are
        the same function of their bounds too. Those that do not agree may be right for these alone.
        """
        if not any(self._missing()):
            return
        at = set[Any]().union(*(seen.one_sided for seen in self._seen))
        before = deepcopy(self._seen)
        try:
            for style in PLAIN * 6 + LEVELLED * self._summarizes:
                draw = replace(next(draws), style=style, limited=dict.fromkeys(at))
                self._try(draw, partly=True)
        except (RefutedError, UntriedError):
            self._seen = before

    def _see_all(self, draws: Iterator[Draw], dependence: Dependence) -> None:
        """Makes trials in which dependences are large that have not been seen."""
        for style in SHIFTED:
            found = dependence.unseen.values()
            for pattern in sorted({draw.style.pattern for draw in found}):
                draw = replace(next(draws), style=replace(style, pattern=pattern))
                if self._try(draw, partly=pattern != "random"):
                    dependence.look(draw, self._lost)

    def _missing(self) -> tuple[str | None, ...]:
        """Returns a condition that was the same in all trials, on one device and on the ranks."""
        one, ranks = self._seen
        unmixed = ranks.unmixed(self.ranks.call.mesh.size)
        return one.missing(self._excused), ranks.missing(self._excused) or unmixed

    def _is_discrete(self, draw: Draw) -> bool:
        drawn = [*draw.values(self.one.likes).values(), *draw.closures.values()]
        return not all(map(is_smooth, drawn))

    def _limits_of_ranks(self) -> Limits:
        """Returns the numbers by which conditions change on the ranks, as at edges of blocks."""
        if all(is_real(like.dtype) for like in self.ranks.likes.values()):
            return {}  # they are those of integers
        try:
            return self.ranks.run(Draw(0, blocks=self.ranks.blocks))[1].limits
        except Exception:  # the user's code; the first trial shows it
            return {}

    def _limits(self, watched: Watched, of_ranks: Limits, base: Draw) -> Limits:
        """Returns the numbers by which conditions change, but those that the body does not take.

        On one device it fails with these, as a lookup does: they are out of its domain, and so is
        what happens for them.
        """
        limits: dict[int, frozenset[int]] = {}
        met = watched.limits.keys() | of_ranks.keys()
        for at in sorted(at for at in met if is_integer(self.one.likes[at].dtype)):
            numbers = watched.limits.get(at, frozenset()) | of_ranks.get(at, frozenset())
            bounds = torch.iinfo(self.one.likes[at].dtype)
            inside = range(watched.lengths.get(at, 0))
            own = sorted(n for n in numbers if bounds.min <= n <= bounds.max)
            probed = [n for n in own if n not in inside][:_PROBES]
            without = watched.ignored.get(at, frozenset())
            outside = {n for n in probed if self._takes(base, at, n, n in without)}
            limits[at] = frozenset(own).intersection(inside) | outside
        return limits

    def _takes(self, base: Draw, at: int, number: int, is_ignored: bool) -> bool:
        """Returns whether one device takes a number among the integers of an argument."""
        seen = Seen()
        try:
            self.one.run(replace(base, limits={at: frozenset({number})}), seen=seen)
        except Exception:  # the user's code may raise anything
            is_ignored = True
        if is_ignored:
            self._excused.add(seen)
        return not is_ignored

    def _positive(self, base: Draw) -> frozenset[int]:
        """Returns the arguments that have to be positive for results to be finite.

        Others are not: functions of these may be equal for positive numbers alone.
        """
        found = frozenset(self.one.likes)
        for at in self.one.likes:
            draws = [replace(base, seed=seed, positive=found - {at}) for seed in range(len(PLAIN))]
            if all(_is_defined(_run(self.one, draw)[0]) for draw in draws):
                found -= {at}
        return found

    @property
    def averages(self) -> bool:
        """True if losses have targets, none of which was ignored in the trials."""
        return bool(self.one.class_losses)

    def report(self, over: str, call: Call) -> str:
        """Formats what was found for a call, over these axes."""
        ranks = self.ranks.call.mesh.size
        within = f" within {self.worst:.0e}" if self.worst else ""
        lines = [
            f"tried with numbers over {over}: in {self.num_trials} trials {ranks} ranks had the "
            f"results and gradients of one device{within}"
        ]
        if sizes := self.sizes(call):
            lines.append(f"  {sizes}")
        lines += [f"  zero in all of them: {name}" for name in sorted(self.zero)]
        return "\n".join(lines)

    def sizes(self, call: Call) -> str:
        """Formats of which sizes arguments are, where these are not those of a call."""
        likes = self.ranks.likes
        shapes = [tuple(like.shape) for like in likes.values()]
        if shapes == [tuple(call.leaves[at].shape) for at in likes]:
            return ""
        return f"at smaller sizes, with arguments of {', '.join(map(str, shapes))}"

    def _try(self, draw: Draw, partly: bool = False) -> bool:
        """Compares the programs for one choice of numbers; returns whether that says something.

        Args:
            draw: the numbers.
            partly: whether results may have entries that are not finite, as rows of an attention
                of which all is hidden.
        """
        try:
            expected, one = self.one.run(draw)
        except Exception as error:  # the user's code may raise anything
            if partly:
                return False
            raise _failure(self.one, error) from error
        if not (_is_partly_defined(expected) if partly else _is_defined(expected)):
            return False
        try:
            values, ranks = self.ranks.run(draw)
        except Exception as error:  # the user's code may raise anything
            raise RefutedError(f"on the ranks it fails: {_described(error)}") from error
        if one.noise.drawn != ranks.noise.drawn:
            raise UntriedError("it draws other random numbers on one device")
        unordered = set() if draw.style in PLAIN else one.unordered | ranks.unordered
        lost = self._require_equal(values, expected, draw, unordered)
        self.num_trials += 1
        self._ties |= one.ties or ranks.ties
        self._uneven += one.seen.has_ties
        self._loses_bits |= one.loses_bits or ranks.loses_bits
        self._bounds |= {each for each in one.bounds | ranks.bounds if 1 < abs(each) < LARGE}
        self._summarizes |= one.summarizes or ranks.summarizes
        self._asks_finite |= one.asks_finite or ranks.asks_finite
        self._unknown = self._unknown or one.unknown or ranks.unknown
        self.zero -= {n for n, x in expected.items() if n in one.fixed or _size(x) > ZERO}
        told = expected.keys() - self.zero
        if draw.style.odd is None and all(_size(expected[name]) > _VISIBLE for name in told):
            for seen, watched in zip(self._seen, (one, ranks), strict=True):
                if not lost:
                    seen.add(watched.seen)
                elif lost <= unordered and not any(name.startswith(GRADIENT) for name in lost):
                    seen.add(watched.seen.ties)
        self._lost = lost
        return True

    def _require_equal(
        self, values: Values, expected: Values, draw: Draw, unordered: set[str]
    ) -> set[str]:
        """Requires equal values; returns the names of those that are lost in rounding.

        A cumprod, for one, has no digit of its gradient right where numbers are tiny. So are those
        that have equal entries in another order.
        """
        for name in sorted(values.keys() ^ expected.keys()):
            where = "on one device" if name in values else "on the ranks"
            raise RefutedError(f"{where} there is no result {name}")
        slack = _ODD_SLACK if draw.style in (*APART, *ODD, *UNDEFINED) else 1.0
        differences = {name: _difference(values[name], x, slack) for name, x in expected.items()}
        lost = {name for name, what in differences.items() if isinstance(what, str)}
        if lost - unordered and not draw.style.tied:
            lost &= unordered | self._moved_by_rounding(draw, values, expected)
        for name, difference in differences.items():
            if isinstance(difference, float):
                self.worst = max(self.worst, difference / slack)
            elif name not in lost or (draw.style.tied and name not in unordered):
                raise RefutedError(f"{name} {difference}{_shown(draw.style)}")
        self._untold -= expected.keys() - lost
        return lost

    def _moved_by_rounding(self, draw: Draw, values: Values, expected: Values) -> set[str]:
        """Returns what inputs that are off by rounding move about as far as the programs differ.

        What is as small as rounding of the products of two inputs, as the gradient through a
        softmax of large logits, may be nothing else, though near inputs may have the same.
        """
        tiny = _ROUNDING * max(1.0, draw.style.scale) ** 2
        near = replace(draw, style=replace(draw.style, jitter=_ROUNDING))
        moved = [(self.one.run(near)[0], expected), (self.ranks.run(near)[0], values)]
        return {
            name
            for name, other in expected.items()
            for found, base in moved
            if _is_larger(_distance(found[name], base[name]), _distance(values[name], other))
            or max(_size(values[name]), _size(other)) <= tiny
        }

    def _require_decided(self, dependence: Dependence) -> None:
        """Requires that the trials suffice."""
        if self._unknown is not None:
            raise self._unknown
        if self.num_trials < len(PLAIN):
            raise UntriedError("results are infinite or not a number for random inputs")
        if self.one.class_losses != self.ranks.class_losses:
            raise UntriedError("losses whose targets may be ignored are others on one device")
        for missing, where in zip(self._missing(), ("on one device", "on the ranks"), strict=True):
            if missing is not None:
                raise UntriedError(f"{where} {missing}")
        for name in self.zero:
            if not name.startswith(GRADIENT):
                raise UntriedError(f"{name} is zero for all random inputs")
        for name in sorted(self._untold):
            raise UntriedError(f"{name} is lost in rounding for all random inputs")
        if dependence.unseen:
            raise UntriedError(dependence.explain())


def _run(program: Program, draw: Draw) -> tuple[Values, Watched]:
    try:
        return program.run(draw)
    except Exception as error:  # the user's code may raise anything
        raise _failure(program, error) from error


def _failure(program: Program, error: Exception) -> UntriedError:
    return UntriedError(f"on the {program.call.mesh} it fails: {_described(error)}")


def _described(error: Exception) -> str:
    site = error_site(error)
    return f"{type(error).__name__}: {error}" + (f", at {site}" if site is not None else "")


def _is_defined(values: Values) -> bool:
    """Returns whether all numbers are finite."""
    return all(bool(x.isfinite().all()) for x in values.values() if isinstance(x, Tensor))


def _is_partly_defined(values: Values) -> bool:
    """Returns whether each result has a finite number; gradients may have none."""
    return all(
        bool(x.isfinite().any())
        for name, x in values.items()
        if isinstance(x, Tensor) and x.numel() and not name.startswith(GRADIENT)
    )


def _distance(mine: Any, other: Any) -> Tensor | None:
    """Returns the distance of entries; None where tensors are none, or not alike."""
    if not (isinstance(mine, Tensor) and isinstance(other, Tensor)) or not is_smooth(mine):
        return None
    if mine.dtype.itemsize == 1:  # torch computes little with floats of eight bits
        mine, other = mine.float(), other.float()
    return (mine - other).abs() if mine.shape == other.shape else None


def _is_larger(moved: Tensor | None, apart: Tensor | None) -> bool:
    """Returns whether entries move by rounding about as far as they are apart, where most."""
    if moved is None or apart is None or not bool(apart.isfinite().all()):
        return False
    at = apart.argmax()
    return bool(moved.flatten()[at] > _SHARE * apart.flatten()[at])


def _shown(style: Style) -> str:
    """Formats for which arguments it is so, where these are special."""
    if style.tied:
        return ", where entries are equal"
    return _SHOWN.get(style.pattern, "")


_SHOWN: Final = {
    "first": ", where booleans are a prefix and integers ascend",
    "last": ", where booleans are a suffix",
    "all": ", where all booleans are true and integers equal",
    "none": ", where all booleans are false and integers 0",
    "sparse": ", where few booleans are true and integers lie in long runs",
    "dense": ", where few booleans are false and integers descend",
    "blocks": ", where booleans and integers are constant on each rank",
}


def _size(value: Any) -> float:
    """Returns the largest entry; infinity for what has none."""
    if not isinstance(value, Tensor) or not value.numel():
        return math.inf
    return float(value.abs().max()) if is_smooth(value) else float(bool(value.any()))


def _difference(mine: Any, other: Any, slack: float) -> float | str:
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
    # Where one device has no number, ranks may have another one that is none.
    defined = other.isfinite()
    apart = torch.where(defined, (mine - other).abs().nan_to_num(torch.inf), 0.0)
    known = torch.where(defined, other, 0.0)
    if bool((apart > slack * tolerance(known)).any()):
        return _worst(mine, other, apart)
    return float(apart.max()) / max(float(known.abs().max()), 1.0)


def _worst(mine: Tensor, other: Tensor, apart: Tensor) -> str:
    at = tuple(int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    place = f" at {list(at)}" if at else ""
    a, b = mine[at].item(), other[at].item()
    shown = (f"{a:.6g}", f"{b:.6g}") if is_smooth(other) else (str(a), str(b))
    return (
        f"is {shown[0]} on the ranks and {shown[1]} on one device{place}{_times(mine, other, a, b)}"
    )


def _times(mine: Tensor, other: Tensor, a: float, b: float) -> str:
    """Says of which small fraction of one device's values all those of the ranks are."""
    if (
        not is_smooth(other)
        or other.is_complex()
        or not (math.isfinite(a) and math.isfinite(b) and a * b)
    ):
        return ""
    scale = Fraction(a / b).limit_denominator(_MAX_TIMES)
    alike = abs(scale) <= _MAX_TIMES and torch.allclose(mine, other * float(scale), rtol=1e-9)
    return f", all of it {scale} times as much" if alike else ""


_MAX_TIMES: Final = 64
"""Ranks that one forgets, or counts twice, are few."""
