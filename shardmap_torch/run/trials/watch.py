"""Computes the steps of a record with random numbers, and watches which pieces these reach."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.ir.observer import tensors_in
from shardmap_torch.checker.rules.infer import signature_of
from shardmap_torch.checker.spmd.ops.losses import READING_TARGETS
from shardmap_torch.core.source_location import Site
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.record.evaluation import Computer, Ranks
from shardmap_torch.record.program import Step
from shardmap_torch.run.trials import operators, shapes
from shardmap_torch.run.trials.draws import Draw, widened
from shardmap_torch.run.trials.noise import Noise
from shardmap_torch.run.trials.operators import Bounds
from shardmap_torch.run.trials.origins import Entries, Origins, Places
from shardmap_torch.run.trials.seen import (
    TIES,
    Condition,
    Seen,
    differences_of,
    patterns_of,
    told_by,
)

Conditions = Sequence[operators.Condition]


class UntriedError(BaseException):
    """Random numbers cannot decide about a body; says why.

    No Exception, as what an operator raises for some numbers is.
    """


@dataclass(eq=False)
class Unwatched(Computer):
    """Computes a run of which only the results count: in wide numbers, with drawn closures.

    Attributes:
        draw: the numbers of the run.
        noise: what the body draws by itself.
    """

    draw: Draw
    noise: Noise

    def compute(self, step: Step, arguments: Sequence[dict[str, Any]]) -> Sequence[Any]:
        """Computes an operator on each rank.

        Raises:
            UntriedError: it draws random numbers, and nothing says how those are sharded.
        """
        op = _operator(step)
        for each in arguments if op is not _BITS else ():
            if isinstance(each.get("dtype"), torch.dtype):
                each["dtype"] = widened(each["dtype"])
        if not _draws(op):
            return [self.call(step, each, rank) for rank, each in enumerate(arguments)]
        found = None if step.in_region else self.noise.draw(op, step.site, arguments)
        if found is None:
            name = operators.name_of(op)
            raise UntriedError(f"{name} draws random numbers, at {step.site}")
        return found if signature_of(op).writes else [*map(_widened_result, found)]

    def call(self, step: Step, arguments: dict[str, Any], rank: int) -> Any:
        """Computes an operator on one rank; integers are rounded as in the dtype of the call."""
        op = _operator(step)
        name = operators.name_of(op)
        if name in shapes.CONTRACTS:
            shapes.compare(name, arguments)
        run = operators.WIDE.get(name, op)
        out = run(**{name: _rounded(value, step) for name, value in arguments.items()})
        return out if signature_of(op).writes else _widened_result(out)

    def closure(self, real: Tensor, site: Site | None) -> Tensor:
        """Draws what stands for a tensor that the body closes over.

        Raises:
            UntriedError: it requires a gradient.
        """
        if real.requires_grad:
            raise UntriedError(
                "the body closes over a tensor that requires a gradient; pass it as an argument, "
                f"at {site}"
            )
        memory = real.untyped_storage()._cdata
        key = memory, real.storage_offset(), real.shape, real.stride()
        return self.draw.closure(key, real)


@dataclass(eq=False)
class Watched(Unwatched):
    """Computes a run, and knows what it meets.

    Attributes:
        crossing: positions of the tensors among all leaves of the arguments.
        parts: into how many parts ranks divide a dim, on one device.
        is_whole: whether the run has the sizes of the call.
        seen: the conditions that it has met.
        lengths: for integer inputs the length of the shortest dim that they index.
        limits: for integer inputs the numbers by which it changes what is done with them.
        ignored: for integer inputs the targets that averaged losses leave out; that there are none
            is looked at in each call.
        masks: large numbers that it writes where something is hidden.
        bounds: the numbers that it compares others with.
        integers: the places of all integer arguments.
        loses_bits: whether it makes numbers of them that are equal more often.
        ties: whether equal entries may matter in it.
        summarizes: whether it makes one boolean or integer of many entries.
        asks_finite: whether it compares a number with itself, which is no number then.
        unknown: what is raised at the end, unless the ranks compute something else.
        origins: what its values come from.
        entries: which of their entries are the same.
        counts: how often conditions were met on each line, by rank.
        fixed: the results that depend on no input.
        unordered: the results, and gradients, that the order of equal entries may have decided.
    """

    crossing: Sequence[int]
    parts: int
    is_whole: bool
    seen: Seen
    lengths: dict[int, int] = field(default_factory=dict)
    limits: dict[int, frozenset[int]] = field(default_factory=dict)
    ignored: dict[int, frozenset[int]] = field(default_factory=dict)
    masks: set[float] = field(default_factory=set)
    bounds: set[float] = field(default_factory=set)
    integers: Places = frozenset()
    loses_bits: bool = False
    ties: bool = False
    summarizes: bool = False
    asks_finite: bool = False
    unknown: UntriedError | None = None
    origins: Origins = field(default_factory=Origins)
    entries: Entries = field(default_factory=Entries)
    counts: Counter[tuple[int, Site | None, str]] = field(default_factory=Counter)
    fixed: set[str] = field(default_factory=set)
    unordered: set[str] = field(default_factory=set)
    _summaries: dict[Condition, dict[int, Tensor]] = field(default_factory=dict)
    _pieces: dict[Condition, dict[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def compute(self, step: Step, arguments: Sequence[dict[str, Any]]) -> Sequence[Any]:
        found = super().compute(step, arguments)
        for x in _tensors(found) if _draws(_operator(step)) else ():
            self.origins.note(x, False, Places())
        return found

    def call(self, step: Step, arguments: dict[str, Any], rank: int) -> Any:
        op = _operator(step)
        if self.draw.limited:
            arguments |= self._limits(step, arguments)
        before = dict(arguments)
        written = _tensors(map(arguments.get, signature_of(op).writes))
        if written and isinstance(before.get("self"), Tensor):
            before["self"] = before["self"].clone()  # what it was before
        operands = _tensors(arguments.values())
        out = super().call(step, arguments, rank)
        _Call(self, step, rank, before, out, operands, written).watch()
        return out

    def _limits(self, step: Step, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns numbers that are no inputs' replaced by one that some entries are larger than.

        Those with which one device compares on that line: others are not the same bound.
        """
        name, limited = operators.name_of(_operator(step)), self.draw.limited
        if name in operators.FILLED:
            return {n: self.draw.stand_in(arguments[n]) for n in operators.FILLED[name]}
        free = [x for x in _tensors(arguments.values()) if not self.origins.is_fixed(x)]
        is_real = bool(free) and all(x.is_floating_point() and x.numel() for x in free)
        if (step.site, name) not in limited or not is_real:
            return {}
        given = self.bounds_in(name, arguments)
        # Chosen by one device, which runs first: between any parts of its entries.
        entries = free[0].nan_to_num(0.0, 0.0, 0.0).flatten()
        generator = torch.Generator().manual_seed(self.draw.seed + len(self.counts))
        shares = torch.rand(len(given), generator=generator).sort().values
        parts = entries.quantile(shares.to(entries)).tolist()
        known = limited[step.site, name] = limited[step.site, name] or (given, parts)
        if known[0] != given:
            return {}
        others = {n: _filled(arguments[n], by) for n, by in zip(given, known[1], strict=True)}
        for x in _tensors(others.values()):
            self.origins.note(x, True, Places())
        return others

    def bounds_in(self, name: str, arguments: Mapping[str, Any]) -> dict[str, float]:
        """Returns the numbers with which an operator compares others, by their names."""
        found = {n: self._number(arguments.get(n)) for n in operators.LIMITED.get(name, ())}
        return {n: number for n, number in found.items() if number is not None}

    def _number(self, x: Any) -> float | None:
        """Returns the number that an argument is, in all of its entries; None of inputs."""
        if not isinstance(x, Tensor):
            return x if isinstance(x, float | int) else None
        is_one = self.origins.is_fixed(x) and x.is_floating_point() and x.numel()
        return x.flatten()[0].item() if is_one and bool((x == x.flatten()[0]).all()) else None

    def closure(self, real: Tensor, site: Site | None) -> Tensor:
        drawn = super().closure(real, site)
        self.origins.note(drawn, False, Places())
        return drawn

    def note_inputs(self, inputs: Sequence[Ranks]) -> None:
        for position, xs in zip(self.crossing, inputs, strict=True):
            place = frozenset({(position, 0)})
            self.integers |= place if operators.is_integer(xs[0].dtype) else Places()
            for x in xs:
                self.origins.note(x, False, place)

    def note_cotangents(self, xs: Ranks) -> None:
        for x in xs:
            self.origins.note(x, False, Places())

    def note_moved(self, made: Ranks, operands: Ranks, adds: bool, copies: bool) -> None:
        fixed = all(map(self.origins.is_fixed, operands))
        places = Places() if adds or fixed else self.origins.entries_of(operands)
        is_unordered = any(map(self.origins.is_unordered, operands))
        for y in made:
            self.origins.note(y, fixed, places, is_unordered)
        for x, y in zip(operands, made, strict=True) if copies else ():
            self.entries.carry(_RESHAPE, {"self": x, "shape": y.shape}, [y])

    def summarize(self, met: Condition, rank: int, flags: Tensor) -> None:
        """Notes a summary of one rank's entries."""
        self.summarizes = True
        self._summaries.setdefault(met, {})[rank] = flags

    def note_pieces(self, met: Condition, rank: int, signs: Tensor, numbers: Tensor) -> None:
        """Notes where a condition of one rank's numbers is true (1), and where false (-1).

        Of the numbers what tells them from others, for each part of each dim.
        """
        self._pieces.setdefault(met, {})[rank] = signs, numbers

    def compare_ranks(self) -> None:
        """Notes in which ways summaries were distributed over the ranks, after the run."""
        for met, by_rank in self._summaries.items():
            self.seen.patterns[met] = set(patterns_of(by_rank))
        for met, pieces in self._pieces.items() if self.draw.style.is_varied else ():
            found = differences_of([*pieces.values()])
            if found is not None:
                self.seen.apart[met], self.seen.mixed[met] = found


@dataclass
class _Call:
    """One call of an operator on one rank, at which a run looks.

    Attributes:
        watched: the run.
        step: the step.
        rank: the rank.
        arguments: by name, as they were before.
        out: what it has made.
        operands: the tensors among the arguments.
        written: those of them that it has written.
    """

    watched: Watched
    step: Step
    rank: int
    arguments: Mapping[str, Any]
    out: Any
    operands: Sequence[Tensor]
    written: Sequence[Tensor]

    def watch(self) -> None:
        """Notes what the call may do with other numbers, and what its results come from."""
        name = operators.name_of(_operator(self.step))
        if _asks_for_zeros(name, self.operands, self.out):
            name, self.arguments = "ne", {"self": self.operands[0], "other": 0}
        watched, origins = self.watched, self.watched.origins
        watched.masks |= operators.mask_numbers(name, self.arguments)
        free = [x for x in self.operands if not origins.is_fixed(x)]
        fixed = not free or name in operators.MADE
        bounds = None if fixed else self._bounds(name, free)
        if not fixed and not self.step.is_derived:
            self._look(name, free, bounds)
        if not watched.is_whole and (fixed or name in operators.CUT):
            conditions = operators.of_sizes(name, self.arguments, self.out)
            self._meet(f"{name} at smaller sizes", conditions)
        places = self._places(name, free)
        is_unordered = any(map(origins.is_unordered, self.operands))
        if name in operators.SELECTED and not fixed:
            is_unordered |= operators.is_ambiguous(name, self.arguments)
        for x in self.written:
            watched.entries.write(x)
        watched.entries.carry(_operator(self.step), self.arguments, tensors_in(self.out))
        for x in [*tensors_in(self.out), *self.written]:
            origins.note(x, fixed, places, is_unordered)
            if not (self.written or x.is_floating_point()):
                origins.bound(x, bounds)

    def _places(self, name: str, free: Sequence[Tensor]) -> Places:
        """Returns the integer arguments whose entries a result has, but for what is added."""
        origins, arguments = self.watched.origins, self.arguments
        if name in operators.MOVED:
            return origins.entries_of(free)
        if name not in ("add", "sub") or len(free) != 1 or arguments.get("alpha", 1) != 1:
            return Places()
        if arguments["self"] is not free[0] or free[0].is_floating_point():
            return Places()
        sign = 1 if name == "add" else -1
        return frozenset(
            (at, added + sign * number)
            for at, added in origins.entries_of(free)
            for number in operators.integers_of(arguments["other"])
        )

    def _look(self, name: str, free: Sequence[Tensor], bounds: Bounds | None) -> None:
        """Requires that random operands can tell what an operation does."""
        arguments, out = self.arguments, self.out
        self._note_limits(name)
        self._note_lost_bits(name, free)
        if _operator(self.step) is _BITS:
            raise self._refusal(name, f"reads the bits of {free[0].dtype}")
        if name in operators.LOOKUPS and arguments.get("mode") != operators.LARGEST:
            self._look_up(name)
            return
        if name in _CASTS and not torch.can_cast(free[0].dtype, out.dtype):  # it rounds
            raise self._refusal("a cast", f"makes {out.dtype} of {free[0].dtype}")
        if name in operators.SELECTED:
            self.watched.summarizes = True
            self.watched.ties |= name in ("argmax", "argmin")
            self._meet(name, operators.chosen(name, arguments, out, self.watched.parts), False)
            self._note_pieces(self._met(name), operators.order(arguments, out), free)
            return
        if name in operators.MOVED:
            return
        if operators.is_analytic(name, arguments):
            reached = operators.moderate(name, arguments, out, self.watched.masks)
            self._meet(name, [] if reached is None else [reached], False)
            return
        if bounds is not None and bounds[0] == bounds[1]:
            return  # the same for all inputs
        conditions = self._conditions(name, free)
        if conditions is None:
            why = "may have pieces that random inputs do not reach"
            self.watched.unknown = self.watched.unknown or self._refusal(name, why)
            return
        self._meet(name, conditions, of=free)
        self._note_ways(name, free)

    def _conditions(self, name: str, free: Sequence[Tensor]) -> Conditions | None:
        """Returns the conditions of pieces; they are not open where an entry meets itself."""
        watched = self.watched
        if any(x.is_complex() for x in free):
            return None
        of = watched.origins.bounds_of
        found = operators.conditions(name, self.arguments, self.out, watched.masks, of)
        if all(x.is_floating_point() for x in free):
            watched.bounds.update(watched.bounds_in(name, self.arguments).values())
        same = self._same(name, free)
        if found is None or same is None:
            return found
        # Whether a number is one: x != x asks.
        watched.asks_finite |= free[0].is_floating_point() and bool(same.any())
        return [(each, is_open & ~same) for each, is_open in found]

    def _same(self, name: str, free: Sequence[Tensor]) -> Tensor | None:
        """Returns where entries are compared with themselves."""
        if name not in operators.COMPARED or len(free) != 2:
            return None
        return self.watched.entries.are_same(*free)

    def _bounds(self, name: str, free: Sequence[Tensor]) -> Bounds | None:
        may_ask = free[0].is_floating_point() and name not in ("lt", "gt")
        same = None if may_ask else self._same(name, free)
        if same is not None and same.numel() and bool(same.all()):
            return int(self.out.min()), int(self.out.max())
        return operators.bounds(name, self.arguments, self.watched.origins.bounds_of)

    def _note_ways(self, name: str, free: Sequence[Tensor]) -> None:
        """Notes whether entries were equal, and what a rank makes of many entries."""
        watched, arguments = self.watched, self.arguments
        if operators.has_ties(name, arguments):
            watched.ties = True
            if name in operators.EXTREMA:
                ties = operators.tied(arguments, self.out, watched.parts)
                self._meet(f"{TIES} {name}", ties, False)
        summary = operators.summary(name, arguments, self.out)
        origins = watched.origins
        is_place = origins.entries_of(free) or any(map(origins.bounds_of, free))
        if summary is not None and not is_place:
            watched.summarize(self._met(name), self.rank, summary)

    def _note_limits(self, name: str) -> None:
        origins = self.watched.origins
        for operand, other, near in operators.limits(name, self.arguments):
            if not (isinstance(other, Tensor) and not origins.is_fixed(other)):
                numbers = {each for n in operators.integers_of(other) for each in near(n)}
                self._limit(origins.entries_of([operand]), numbers)

    def _limit(self, places: Places, numbers: Iterable[int]) -> None:
        limits = self.watched.limits
        for at, added in places:
            limits[at] = limits.get(at, frozenset()) | {number - added for number in numbers}

    def _note_lost_bits(self, name: str, free: Sequence[Tensor]) -> None:
        """Notes numbers that only more bits tell apart than a result has.

        Raises:
            UntriedError: no argument can be such numbers.
        """
        watched, dtype = self.watched, self.step.dtype
        for x in free:
            first, known = (
                operators.period(_operator(self.step), x, dtype),
                watched.origins.bounds_of(x),
            )
            if first is None or (known is not None and 0 <= known[0] <= known[1] < first):
                continue
            places = watched.origins.entries_of([x]) or watched.integers
            if not places and dtype in _SMALL:
                raise self._refusal("a cast", f"makes {dtype} of {x.dtype}")
            watched.loses_bits = True
            self._limit(places, operators.meeting(first))

    def _look_up(self, name: str) -> None:
        watched, arguments = self.watched, self.arguments
        lengths = watched.lengths
        for length, index in operators.LOOKUPS[name](arguments):
            is_random = index.dtype == torch.bool and not watched.origins.is_fixed(index)
            if is_random and not operators.is_masked_fill(name, arguments):
                raise self._refusal(name, "selects entries by a mask that depends on inputs")
            ignored = operators.ignored_by(name, arguments)
            if ignored and self.step.function not in READING_TARGETS:
                why = "averages over targets, and no run looks at those to ignore"
                raise self._refusal(name, why)
            for at, added in watched.origins.entries_of([index]):
                watched.ignored[at] = ignored
                lengths[at] = min(max(1, length - added), lengths.get(at, length))

    def _meet(
        self,
        name: str,
        conditions: Sequence[tuple[Tensor, Tensor]],
        both: bool = True,
        of: Sequence[Tensor] = (),
    ) -> None:
        """Notes conditions that have to be true somewhere, and, if `both`, false somewhere.

        Those of numbers that differ by rank, on some ranks alone.
        """
        self.watched.counts[self.rank, self.step.site, name] += 1
        seen = self.watched.seen
        for number, (condition, is_open) in enumerate(conditions):
            met = self._met(name, number)
            is_true = bool((condition & is_open).any())
            if is_true:
                seen.true.add(met)
            if bool((~condition & is_open).any()) or (is_true and not both):
                seen.false.add(met)
            self._note_pieces(met, (condition, is_open), of)

    def _met(self, name: str, number: int = -1) -> Condition:
        """Returns a condition that was met last; -1 is that on the whole of a result."""
        site = self.step.site
        return site, name, number, self.watched.counts[self.rank, site, name]

    def _note_pieces(
        self, met: Condition, pieces: tuple[Tensor, Tensor], of: Sequence[Tensor]
    ) -> None:
        """Notes where a condition is true, and the numbers of this rank that it is of."""
        condition, is_open = pieces
        numbers = [x for x in of if x.dtype != torch.bool and not x.is_complex()]
        if numbers:
            signs = torch.where(is_open, torch.where(condition, 1, -1), 0).to(torch.int8)
            told = told_by(numbers, signs.shape)
            self.watched.note_pieces(met, self.rank, signs, told)

    def _refusal(self, name: str, why: str) -> UntriedError:
        return UntriedError(f"{name} {why}, at {self.step.site}")


def _filled(x: Any, number: float) -> Any:
    return torch.full_like(x, number) if isinstance(x, Tensor) else number


_CASTS: Final = ("_to_copy", "to")

_SMALL: Final = (torch.int8, torch.uint8, torch.int16, torch.uint16)

_RESHAPE: Final = torch.ops.aten.reshape.default

_BITS: Final = torch.ops.aten.view.dtype


def _rounded(value: Any, step: Step) -> Any:
    """Returns integers in as many bits as the result of a step has, where that has too few."""
    if isinstance(value, list):
        return [_rounded(each, step) for each in value]
    is_exact = not isinstance(value, Tensor) or not (step.dtype and step.dtype.is_floating_point)
    if is_exact or operators.period(_operator(step), value, step.dtype) is None:
        return value
    return value.to(step.dtype).double()


def _operator(step: Step) -> OpOverload:
    assert isinstance(step.run, OpOverload)  # collectives move, and compute nothing
    return step.run


def _draws(op: OpOverload) -> bool:
    """Returns whether a call draws random numbers."""
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    return is_random and operators.name_of(op) not in operators.DRAWLESS


def _asks_for_zeros(name: str, operands: Sequence[Tensor], out: Any) -> bool:
    """Returns whether a cast makes a boolean of each number, as a comparison with 0 does."""
    is_boolean = name in _CASTS and out.dtype == torch.bool
    return is_boolean and operands[0].dtype != torch.bool


def _tensors(values: Any) -> list[Tensor]:
    return [x for value in values for x in tensors_in(value)]


def _widened_result(out: Any) -> Any:
    """Returns numbers of 64 bits, where an operation that takes none makes others."""
    if not isinstance(out, Tensor) or widened(out.dtype) == out.dtype:
        return out
    return out.to(widened(out.dtype))
