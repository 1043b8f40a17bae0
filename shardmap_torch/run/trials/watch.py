"""Watches a run with random numbers: which pieces of its functions they reach, on all ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardmap_torch.backends.rank import current_rank
from shardmap_torch.checker.rules.infer import name_arguments, signature_of, tensors_of
from shardmap_torch.checker.rules.registry import MEANINGS, interpreted
from shardmap_torch.checker.spmd.ops.losses import READING_TARGETS
from shardmap_torch.core.autograd_state import NONE, running_backward
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import Site, call_site, is_called_by
from shardmap_torch.core.torch_private.engine import OpOverload, TorchDispatchMode
from shardmap_torch.core.tree import flatten
from shardmap_torch.run.trials import operators
from shardmap_torch.run.trials.draws import Draw, widened
from shardmap_torch.run.trials.operators import Bounds

Condition = tuple[Site | None, str, int, int]
"""The line of a condition, its operator, which of its conditions, and how many came before."""


class UntriedError(BaseException):
    """Random numbers cannot decide about a body; says why.

    No Exception, which a body might catch.
    """


Pattern = tuple[int, bool]
"""A rank, or -1 for all, and the value that it has; one rank where another one has the other."""


@dataclass
class Seen:
    """The conditions that were true somewhere, and those that were false somewhere.

    Attributes:
        true: those that were true.
        false: those that were false.
        patterns: of what ranks make of many entries, in which ways it was distributed over them.
        apart: of those of numbers, in which parts of dims ranks have other numbers (`_by_part`).
        mixed: in which parts they were true on a rank and false on another, of the same entry.
    """

    true: set[Condition] = field(default_factory=set)
    false: set[Condition] = field(default_factory=set)
    patterns: dict[Condition, set[Pattern]] = field(default_factory=dict)
    apart: dict[Condition, Tensor] = field(default_factory=dict)
    mixed: dict[Condition, Tensor] = field(default_factory=dict)

    def add(self, other: "Seen") -> None:
        """Adds what another run has met."""
        self.true |= other.true
        self.false |= other.false
        for mine, others in ((self.apart, other.apart), (self.mixed, other.mixed)):
            for condition, parts in others.items():
                known = mine.get(condition, parts)
                mine[condition] = known | parts if known.shape == parts.shape else parts
        for condition, patterns in other.patterns.items():
            self.patterns.setdefault(condition, set()).update(patterns)

    def unmixed(self, ranks: int) -> str | None:
        """Describes a summary of entries that ranks did not have in all ways; None if none is.

        Summaries that all ranks have alike are met as conditions are.
        """
        wanted = set(product(range(-1, ranks), (True, False)))
        for (site, name, _, _), met in sorted(self.patterns.items(), key=str):
            if any(rank >= 0 for rank, _ in met) and not wanted <= met:
                rank, value = min(wanted - met)
                where = "all ranks" if rank < 0 else f"rank {rank} and not on all"
                shown = str(value).lower()
                return f"{name} is never {shown} on {where} for random inputs, at {site}"
        for condition in sorted(self.apart, key=str):
            site, name, _, _ = condition
            same = self.apart[condition] & ~self.mixed[condition]
            if bool(same.any()):
                where = "" if bool(same.all()) else " in a part of its entries"
                return (
                    f"the condition of {name} is the same on all ranks{where} for random inputs, "
                    f"at {site}"
                )
        return None

    @property
    def has_ties(self) -> bool:
        """True if entries have been an extremum together, in some parts more often."""
        return any(name.startswith(_TIES) for _, name, _, _ in self.true)

    @property
    def lacks_ties(self) -> bool:
        """True if entries that may be an extremum together have not been."""
        return any(name.startswith(_TIES) for _, name, _, _ in self.false - self.true)

    def missing(self, excused: "Seen") -> str | None:
        """Describes a condition that was the same everywhere; None if there is none.

        Excused is what happens only for arguments with which the body fails on one device.
        """
        never_false = self.true - self.false - excused.false
        never_true = self.false - self.true - excused.true
        for value, same in (("false", never_false), ("true", never_true)):
            for site, name, _, _ in sorted(same, key=str):
                return f"the condition of {name} is never {value} for random inputs, at {site}"
        return None


Origin = tuple[int, int]
"""The position of an integer argument, and what has been added to its entries."""

Places = frozenset[Origin]

_MAX_PLACES: Final = 64


@dataclass(eq=False)
class Origins:
    """Origins of the values of a run: inputs, or numbers that every call of the body has.

    Known by storage; storages are held, so that no other one gets their address.
    """

    _held: list[torch.UntypedStorage] = field(default_factory=list)
    _fixed: set[int] = field(default_factory=set)
    _derived: dict[int, Places] = field(default_factory=dict)
    _bounds: dict[int, Bounds] = field(default_factory=dict)

    def is_known(self, x: Tensor) -> bool:
        """Returns whether the run has made a tensor, or begun with it."""
        address = _address(x)
        return address in self._fixed or address in self._derived

    def is_fixed(self, x: Tensor) -> bool:
        """Returns whether a tensor depends on no input."""
        return _address(x) in self._fixed

    def entries_of(self, tensors: Iterable[Tensor]) -> Places:
        """Returns the arguments whose entries tensors have, but for what was added."""
        return Places().union(*[self._derived.get(_address(x), Places()) for x in tensors])

    def bounds_of(self, value: Any) -> Bounds | None:
        """Returns the bounds of a number or tensor; None if nothing is known."""
        if isinstance(value, Tensor) and not self.is_fixed(value):
            return self._bounds.get(_address(value))
        found = operators.integers_of(value)
        return (min(found), max(found)) if found else None

    def bound(self, x: Tensor, bounds: Bounds | None) -> None:
        """Notes the bounds of a tensor that nothing is written into later."""
        if bounds is not None:
            self._bounds[_address(x)] = bounds

    def note(self, x: Tensor, fixed: bool, entries_of: Places) -> None:
        """Notes what was written into a tensor."""
        address = _address(x)
        self._bounds.pop(address, None)
        self._held.append(x.untyped_storage())
        if fixed:
            self._fixed.add(address)
            return
        self._fixed.discard(address)
        places = self._derived.get(address, Places()) | entries_of
        self._derived[address] = places if len(places) <= _MAX_PLACES else Places()


def _address(x: Tensor) -> int:
    address: int = x.untyped_storage()._cdata
    return address


class _Functions(TorchFunctionMode):
    """Looks classes up in a table: torch reads the largest one, a number that trials cannot see.

    Notes in the body whether a loss goes on at whose targets each run looks.
    """

    def __init__(self, body: "_Body") -> None:
        super().__init__()
        self._body = body

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.one_hot:
            return self._look_up(*args, **(kwargs or {}))
        self._body.reads_targets = func in READING_TARGETS
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._body.reads_targets = False

    def _look_up(self, tensor: Tensor, num_classes: int = -1) -> Tensor:
        if num_classes < 0:
            return functional.one_hot(tensor)
        return functional.embedding(tensor, torch.eye(num_classes, dtype=torch.int64))


class _Body:
    """Runs a body, and its backward, on each rank under a mode.

    Attributes:
        reads_targets: whether a loss goes on at whose targets each run looks.
    """

    reads_targets = False

    def mode(self, rank: int | None = None) -> TorchDispatchMode:
        """Returns the mode of one rank, by default of that whose turn it is."""
        raise NotImplementedError

    def enter(self, leaves: Sequence[Any]) -> None:
        """Notes the arguments on one rank."""

    def leave(self, leaves: Sequence[Any]) -> None:
        """Notes the results on one rank."""

    def body(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the body, whose forward runs under the mode."""

        @wraps(function)
        def under(*args: Any, **kwargs: Any) -> Any:
            self.enter(flatten((args, kwargs))[0])
            with _Functions(self), self.mode():
                out = function(*args, **kwargs)
            self.leave(flatten(out)[0])
            return out

        return under

    @contextmanager
    def backward(self) -> Iterator[Callable[[Callable[..., Any]], Callable[..., Any]]]:
        """Yields what wraps the backward of each rank."""

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def under(rank: int) -> Any:
                with self.mode(rank):
                    return function(rank)

            return under

        yield wrap


@dataclass(eq=False)
class Unwatched(_Body):
    """A run of which only the results count."""

    draw: Draw
    steady: bool
    wide = True
    origins: Origins = field(default_factory=Origins)

    def mode(self, rank: int | None = None) -> TorchDispatchMode:
        return _Wide(self, rank)

    def enter(self, leaves: Sequence[Any]) -> None:
        for x in _tensors(leaves):
            self.origins.note(base_of(x), False, Places())


@dataclass(eq=False)
class Watched(_Body):
    """Knowledge of one run of all ranks, which take turns.

    Attributes:
        crossing: positions of the tensors among all leaves of the arguments.
        draw: the numbers of the run.
        wide: whether numbers have 64 bits; else they have those that the body asks for.
        seen: the conditions that it has met.
        lengths: for integer inputs the length of the shortest dim that they index.
        limits: for integer inputs the numbers by which it changes what is done with them.
        ignored: for integer inputs the targets that averaged losses leave out; that there are none
            is looked at in each call.
        masks: large numbers that it writes where something is hidden.
        parts: into how many parts ranks divide a dim, on one device.
        steady: whether random numbers are all the same; else they are refused.
        is_whole: whether the run has the sizes of the call.
        ties: whether equal entries may matter in it.
        unknown: what is raised at the end, unless the ranks compute something else.
        summarizes: whether it makes one boolean or integer of many entries.
        fixed: for each tensor among the results whether it depends on no input.
        steps: the operations of the first rank, but casts, with arguments that are no tensors.
        origins: what its values come from.
    """

    crossing: Sequence[int]
    draw: Draw
    wide: bool
    seen: Seen = field(default_factory=Seen)
    lengths: dict[int, int] = field(default_factory=dict)
    limits: dict[int, frozenset[int]] = field(default_factory=dict)
    ignored: dict[int, frozenset[int]] = field(default_factory=dict)
    masks: set[float] = field(default_factory=set)
    parts: int = 1
    steady: bool = False
    is_whole: bool = True
    ties: bool = False
    summarizes: bool = False
    unknown: UntriedError | None = None
    _summaries: dict[Condition, dict[int, Tensor]] = field(default_factory=dict)
    _pieces: dict[Condition, dict[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)
    fixed: list[bool] = field(default_factory=list)
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    origins: Origins = field(default_factory=Origins)

    def mode(self, rank: int | None = None) -> TorchDispatchMode:
        return _Watch(self, rank)

    def enter(self, leaves: Sequence[Any]) -> None:
        for position in self.crossing:
            self.origins.note(leaves[position], False, frozenset({(position, 0)}))

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
            self.seen.patterns[met] = set(_patterns(by_rank))
        for met, pieces in self._pieces.items() if self.draw.style.is_varied else ():
            signs, numbers = zip(*pieces.values(), strict=True)
            if len({x.shape for x in signs}) > 1:
                continue
            stacked, others = torch.stack(signs), torch.stack(numbers)
            several = _by_part((stacked.count_nonzero(0) > 1).double()) > 0
            mixed = (stacked.amax(0) > 0).logical_and(stacked.amin(0) < 0)
            self.seen.apart[met] = several & (others != others[0]).any(0)
            self.seen.mixed[met] = _by_part(mixed.double()) > 0

    def leave(self, leaves: Sequence[Any]) -> None:
        tensors = [base_of(x) for x in leaves if isinstance(x, Tensor)]
        self.fixed = [self.origins.is_fixed(x) for x in tensors]


def _patterns(by_rank: Mapping[int, Tensor]) -> Iterator[Pattern]:
    shapes = {x.shape for x in by_rank.values()}
    if len(by_rank) < 2 or len(shapes) > 1:
        return
    made = torch.stack([*by_rank.values()])
    flags = made if made.dtype == torch.bool else made == made.amax(0)
    mixed = flags.any(0) & ~flags.all(0)
    for value in (True, False):
        if made.dtype != torch.bool or bool((flags == value).all(0).any()):
            yield -1, value
    for rank, own in zip(by_rank, flags, strict=True):
        for value in (True, False):
            if bool(((own == value) & mixed).any()):
                yield rank, value


class _Wide(TorchDispatchMode):
    """Computes in wide numbers, with drawn ones in place of tensors from outside."""

    def __init__(self, run: "Watched | Unwatched", rank: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw, self._origins, self._is_wide = run.draw, run.origins, run.wide
        self._is_steady, self._is_backward = run.steady, rank is not None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in MEANINGS:
            return interpreted(func, args, kwargs or {}, self)
        args, kwargs = self._prepared(operators.name_of(func), args, dict(kwargs or {}))
        out = self._computed(func, args, kwargs)
        for x in _tensors([out]):
            self._origins.note(x, False, Places())
        return out

    def _prepared(self, name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self._is_wide and isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs["dtype"] = widened(kwargs["dtype"])
        # A literal is unknown as well; `lift_fresh` is what torch.tensor begins with.
        if name != "lift_fresh" and not all(map(self._origins.is_known, _tensors(args))):
            args = tuple(map(self._drawn, args))
        return args, kwargs

    def _drawn(self, value: Any) -> Any:
        """Returns a random tensor in place of one that the body closes over."""
        if isinstance(value, list | tuple):
            return [self._drawn(each) for each in value]
        if not isinstance(value, Tensor) or self._origins.is_known(value):
            return value
        key = _address(value), value.storage_offset(), value.shape, value.stride()
        if self._is_backward and key not in self._draw.closures:
            return value  # a cotangent
        if value.requires_grad:
            raise UntriedError(
                "the body closes over a tensor that requires a gradient; pass it as an argument, "
                f"at {call_site()}"
            )
        drawn = self._draw.closure(key, value, self._is_wide)
        self._origins.note(drawn, False, Places())
        return drawn

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if self._is_steady and _draws(func):
            out.fill_(0.5)
        return _widened_result(out) if self._is_wide and not signature_of(func).writes else out


class _Watch(_Wide):
    """Looks at each operation of one rank."""

    def __init__(self, watched: Watched, rank: int | None = None) -> None:
        super().__init__(watched, rank)
        self._watched = watched
        self._rank = current_rank() if rank is None else rank
        self._is_first = self._rank == 0
        self._count: dict[tuple[Site | None, str], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in MEANINGS:
            return interpreted(func, args, kwargs or {}, self)
        name = operators.name_of(func)
        args, kwargs = self._prepared(name, args, dict(kwargs or {}))
        arguments = name_arguments(func, args, kwargs)
        written = _tensors(map(arguments.get, signature_of(func).writes))
        operands = _tensors(arguments.values())
        if written and isinstance(arguments.get("self"), Tensor):
            arguments["self"] = arguments["self"].clone()  # what it was before
        out = self._computed(func, args, kwargs)
        if self._is_first and name != "_to_copy":
            values = [_numbers(out)] if name == "lift_fresh" else arguments.values()
            self._watched.steps.append((name, *map(_literal, values)))
        if _asks_for_zeros(name, operands, out):
            name, arguments = "ne", {"self": operands[0], "other": 0}
        if _draws(func) and not self._is_steady:
            raise _refusal(name, "draws random numbers")
        self._watched.masks |= operators.mask_numbers(name, arguments)
        free = [x for x in operands if not self._origins.is_fixed(x)]
        fixed = not free or name in operators.MADE or _draws(func)
        bounds = None if fixed else operators.bounds(name, arguments, self._origins.bounds_of)
        if not fixed and not _is_derived():
            self._look(name, arguments, free, out, bounds)
        if not self._watched.is_whole and (fixed or name in operators.CUT):
            self._meet(f"{name} at smaller sizes", operators.of_sizes(name, arguments, out))
        places = self._places(name, arguments, free)
        for x in [*_tensors([out]), *written]:
            self._origins.note(x, fixed, places)
            if not (written or x.is_floating_point()):
                self._origins.bound(x, bounds)
        return out

    def _places(self, name: str, arguments: Mapping[str, Any], free: Sequence[Tensor]) -> Places:
        """Returns the integer arguments whose entries a result has, but for what is added."""
        if name in operators.MOVED:
            return self._origins.entries_of(free)
        if name not in ("add", "sub") or len(free) != 1 or arguments.get("alpha", 1) != 1:
            return Places()
        if arguments["self"] is not free[0] or free[0].is_floating_point():
            return Places()
        sign = 1 if name == "add" else -1
        return frozenset(
            (at, added + sign * number)
            for at, added in self._origins.entries_of(free)
            for number in operators.integers_of(arguments["other"])
        )

    def _look(
        self,
        name: str,
        arguments: Mapping[str, Any],
        free: Sequence[Tensor],
        out: Any,
        bounds: Bounds | None,
    ) -> None:
        """Requires that random operands can tell what an operation does."""
        self._note_limits(name, arguments)
        if name in operators.LOOKUPS and arguments.get("mode") != operators.LARGEST:
            self._look_up(name, arguments)
            return
        if name in _CASTS and not torch.can_cast(free[0].dtype, out.dtype):  # it rounds
            raise _refusal("a cast", f"makes {out.dtype} of {free[0].dtype}")
        if name in operators.SELECTED:
            self._watched.summarizes = True
            self._watched.ties |= name in ("argmax", "argmin")
            chosen = operators.chosen(name, arguments, out, self._watched.parts)
            self._meet(name, chosen, False)
            met = call_site(), name, -1, self._count[call_site(), name]
            self._note_pieces(met, operators.order(arguments, out), free)
            return
        if name in operators.MOVED:
            return
        if operators.is_analytic(name, arguments):
            reached = operators.moderate(name, arguments, out, self._watched.masks)
            self._meet(name, [] if reached is None else [reached], False)
            return
        if bounds is not None and bounds[0] == bounds[1]:
            return  # the same for all inputs
        conditions = None
        if not any(x.is_complex() for x in free):
            of = self._origins.bounds_of
            conditions = operators.conditions(name, arguments, out, self._watched.masks, of)
        if conditions is None:
            why = "may have pieces that random inputs do not reach"
            self._watched.unknown = self._watched.unknown or _refusal(name, why)
            return
        self._meet(name, conditions, of=free)
        self._note_ways(name, arguments, free, out)

    def _note_ways(
        self, name: str, arguments: Mapping[str, Any], free: Sequence[Tensor], out: Any
    ) -> None:
        """Notes whether entries were equal, and what a rank makes of many entries."""
        if operators.has_ties(name, arguments):
            self._watched.ties = True
            if name in operators.EXTREMA:
                ties = operators.tied(arguments, out, self._watched.parts)
                self._meet(f"{_TIES} {name}", ties, False)
        summary = operators.summary(name, arguments, out)
        is_place = self._origins.entries_of(free) or any(map(self._origins.bounds_of, free))
        if summary is not None and not is_place:
            met = call_site(), name, -1, self._count[call_site(), name]
            self._watched.summarize(met, self._rank, summary)

    def _note_limits(self, name: str, arguments: Mapping[str, Any]) -> None:
        limits = self._watched.limits
        for operand, other, around in operators.limits(name, arguments):
            if isinstance(other, Tensor) and not self._origins.is_fixed(other):
                continue
            for at, added in self._origins.entries_of([operand]):
                found = {n + by - added for n in operators.integers_of(other) for by in around}
                limits[at] = limits.get(at, frozenset()) | found

    def _look_up(self, name: str, arguments: Mapping[str, Any]) -> None:
        lengths = self._watched.lengths
        for length, index in operators.LOOKUPS[name](arguments):
            is_random = index.dtype == torch.bool and not self._origins.is_fixed(index)
            if is_random and not operators.is_masked_fill(name, arguments):
                raise _refusal(name, "selects entries by a mask that depends on inputs")
            ignored = operators.ignored_by(name, arguments)
            if ignored and not self._watched.reads_targets:
                raise _refusal(name, "averages over targets, and no run looks at those to ignore")
            for at, added in self._origins.entries_of([index]):
                self._watched.ignored[at] = ignored
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
        site = call_site()
        count = self._count[site, name] = self._count.get((site, name), -1) + 1
        seen = self._watched.seen
        for number, (condition, is_open) in enumerate(conditions):
            met = site, name, number, count
            is_true = bool((condition & is_open).any())
            if is_true:
                seen.true.add(met)
            if bool((~condition & is_open).any()) or (is_true and not both):
                seen.false.add(met)
            self._note_pieces(met, (condition, is_open), of)

    def _note_pieces(
        self, met: Condition, pieces: tuple[Tensor, Tensor], of: Sequence[Tensor]
    ) -> None:
        """Notes where a condition is true, and the numbers of this rank that it is of."""
        condition, is_open = pieces
        numbers = [x for x in of if x.dtype != torch.bool and not x.is_complex()]
        if numbers:
            signs = torch.where(is_open, torch.where(condition, 1, -1), 0).to(torch.int8)
            told = sum([_by_part(_weighted(x, signs.shape)) for x in numbers])
            self._watched.note_pieces(met, self._rank, signs, torch.as_tensor(told))


def _weighted(x: Tensor, shape: torch.Size) -> Tensor:
    """Returns numbers whose sums change with any entry, and where entries change places.

    Those of an operand, for each entry of a condition; if it has another shape, their sum for all.
    """
    weights = torch.arange(x.numel(), dtype=torch.float64).cos().reshape(x.shape)
    found = x.nan_to_num(0.0, 0.0, 0.0) * weights
    try:
        return found.expand(shape)
    except RuntimeError:
        return found.sum().expand(shape)


_PARTS: Final = 32
"""Maximal number of parts of a dim: single entries of long ones would take more trials to mix."""


def _by_part(x: Tensor) -> Tensor:
    """Sums over each of up to 32 parts of each dim, one dim after the other."""
    sums = []
    for dim, size in enumerate(x.shape):
        others = [other for other in range(x.ndim) if other != dim]
        each = x.sum(others) if others else x
        count = min(size, _PARTS)
        places = torch.arange(size) * count // max(size, 1)
        sums.append(each.new_zeros(count).index_add_(0, places, each))
    return torch.cat(sums) if sums else x.reshape(1)


_CASTS: Final = ("_to_copy", "to")

_TIES: Final = "equal entries in"

_DERIVATIVES: Final = (torch.autograd.grad.__code__, torch.autograd.backward.__code__)


def _is_derived() -> bool:
    """Returns whether autograd runs a formula of its own, whose pieces are those of the forward."""
    return running_backward() != NONE and is_called_by(_DERIVATIVES)


def _draws(func: OpOverload) -> bool:
    """Returns whether a call draws random numbers."""
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    return is_random and operators.name_of(func) not in operators.DRAWLESS


def _refusal(name: str, why: str) -> UntriedError:
    return UntriedError(f"{name} {why}, at {call_site()}")


def _asks_for_zeros(name: str, operands: Sequence[Tensor], out: Any) -> bool:
    """Returns whether a cast makes a boolean of each number, as a comparison with 0 does."""
    is_boolean = name in _CASTS and out.dtype == torch.bool
    return is_boolean and operands[0].dtype != torch.bool


def _tensors(values: Any) -> list[Tensor]:
    return [x for value in values for x in tensors_of(value)]


def _widened_result(out: Any) -> Any:
    """Returns numbers of 64 bits, where an operation that takes none makes others."""
    if not isinstance(out, Tensor) or widened(out.dtype) == out.dtype:
        return out
    return out.to(widened(out.dtype))


_LIMITS: Final = {
    getattr(torch.finfo(dtype), name): name
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for name in ("eps", "tiny", "min", "max")
}
"""Numbers that depend on the dtype, by their names."""


def _numbers(x: Tensor) -> list[Any]:
    """Returns the first numbers of a literal, without what depends on the dtype's precision."""
    numbers: list[Any] = x.detach().flatten()[:64].tolist()
    if not x.is_floating_point():
        return numbers
    rounded = torch.tensor(numbers, dtype=torch.bfloat16).tolist()
    return [n if n in _LIMITS else short for n, short in zip(numbers, rounded, strict=True)]


def _literal(value: Any) -> Any:
    """Returns what has to be the same for each dtype."""
    if isinstance(value, list | tuple):
        return tuple(map(_literal, value))
    if isinstance(value, float):
        return _LIMITS.get(value, value)
    return value if isinstance(value, bool | int | str) else None
