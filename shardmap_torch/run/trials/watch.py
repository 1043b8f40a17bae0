"""Watches a run with random numbers: which pieces of its functions they reach, on all ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.backends.rank import current_rank
from shardmap_torch.checker.rules.infer import name_arguments, signature_of, tensors_of
from shardmap_torch.core.autograd_state import NONE, running_backward
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import Site, call_site, is_called_by
from shardmap_torch.core.torch_private.engine import TorchDispatchMode
from shardmap_torch.core.tree import flatten
from shardmap_torch.run.trials import operators
from shardmap_torch.run.trials.origins import Origins, Places

Condition = tuple[Site | None, str, int, int]
"""The line of a condition, its operator, which of its conditions, and how many came before."""


class UntriedError(BaseException):
    """Random numbers cannot decide about a body; says why.

    No Exception, which a body might catch.
    """


@dataclass
class Seen:
    """The conditions that were true somewhere, and those that were false somewhere."""

    true: set[Condition] = field(default_factory=set)
    false: set[Condition] = field(default_factory=set)

    def add(self, other: "Seen") -> None:
        """Adds what another run has met."""
        self.true |= other.true
        self.false |= other.false

    @property
    def missing(self) -> str | None:
        """Describes a condition that was the same everywhere; None if there is none."""
        for value, same in (("false", self.true - self.false), ("true", self.false - self.true)):
            for site, name, _, _ in sorted(same, key=str):
                return f"the condition of {name} is never {value} for random inputs, at {site}"
        return None


@dataclass(eq=False)
class Watched:
    """Knowledge of one run of all ranks, which take turns.

    Attributes:
        crossing: positions of the tensors among all leaves of the arguments.
        wide: whether numbers have 64 bits; else they have those that the body asks for.
        seen: the conditions that it has met.
        lengths: for integer inputs the length of the shortest dim that they index.
        limits: for integer inputs the numbers by which it changes what is done with them.
        fixed: for each tensor among the results whether it depends on no input.
        steps: the operations of the first rank, but casts, with arguments that are no tensors.
        origins: what its values come from.
    """

    crossing: Sequence[int]
    wide: bool
    seen: Seen = field(default_factory=Seen)
    lengths: dict[int, int] = field(default_factory=dict)
    limits: dict[int, frozenset[int]] = field(default_factory=dict)
    fixed: list[bool] = field(default_factory=list)
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    origins: Origins = field(default_factory=Origins)

    def body(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the body, whose forward is watched on each rank."""

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            leaves, _ = flatten((args, kwargs))
            for position in self.crossing:
                self.origins.enter(leaves[position], position)
            with _Watch(self):
                out = function(*args, **kwargs)
            tensors = [base_of(x) for x in flatten(out)[0] if isinstance(x, Tensor)]
            self.fixed = [self.origins.is_fixed(x) for x in tensors]
            return out

        return watched

    @property
    def limits_within(self) -> dict[int, frozenset[int]]:
        """Those limits that may be looked up."""
        return {
            at: limits.intersection(range(self.lengths.get(at, 0)))
            for at, limits in self.limits.items()
        }

    @contextmanager
    def backward(self) -> Iterator[Callable[[Callable[..., Any]], Callable[..., Any]]]:
        """Yields what wraps the backward of each rank."""

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def watched(rank: int) -> Any:
                with _Watch(self, rank):
                    return function(rank)

            return watched

        yield wrap


class _Watch(TorchDispatchMode):
    """Looks at each operation of one rank."""

    def __init__(self, watched: Watched, rank: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched, self._origins = watched, watched.origins
        self._is_first = (current_rank() if rank is None else rank) == 0
        self._count: dict[tuple[Site | None, str], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._watched.wide and isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs["dtype"] = widened(kwargs["dtype"])
        arguments, name = name_arguments(func, args, kwargs), operators.name_of(func)
        written = _tensors(map(arguments.get, signature_of(func).writes))
        operands = _tensors(arguments.values())
        if written and isinstance(arguments.get("self"), Tensor):
            arguments["self"] = arguments["self"].clone()  # what it was before
        out = func(*args, **kwargs)
        if self._watched.wide and not written:
            out = _widened_result(out)
        if self._is_first and name != "_to_copy":
            values = [_numbers(out)] if name == "lift_fresh" else arguments.values()
            self._watched.steps.append((name, *map(_literal, values)))
        if torch.Tag.nondeterministic_seeded in func.tags and name not in operators.DRAWLESS:
            raise _refusal(name, "draws random numbers")
        free = [x for x in operands if not self._origins.is_fixed(x)]
        fixed = not free or name in operators.MADE
        if not fixed and not _is_derived():
            self._look(name, arguments, free, out)
        places = self._origins.entries_of(free) if name in operators.MOVED else Places()
        for x in [*_tensors([out]), *written]:
            self._origins.note(x, fixed, places)
        return out

    def _look(
        self, name: str, arguments: Mapping[str, Any], free: Sequence[Tensor], out: Any
    ) -> None:
        """Requires that random operands can tell what an operation does."""
        for at in self._origins.entries_of(free):
            limits = self._watched.limits
            limits[at] = limits.get(at, frozenset()) | operators.limits(name, arguments)
        if name in operators.LOOKUPS:
            self._look_up(name, operators.LOOKUPS[name](arguments))
            return
        if name == "_to_copy":
            _require_kept(free[0], out)
        if name in operators.MOVED:
            return
        if operators.is_analytic(name, arguments):
            reached = operators.moderate(name, arguments, out)
            self._meet(name, [] if reached is None else [reached], False)
            return
        conditions = None
        if not any(x.is_complex() for x in free):
            conditions = operators.conditions(name, arguments, out)
        if conditions is None:
            raise _refusal(name, "may have pieces that random inputs do not reach")
        self._meet(name, conditions)

    def _look_up(self, name: str, indices: Sequence[tuple[int, Tensor]]) -> None:
        lengths = self._watched.lengths
        for length, index in indices:
            if index.dtype == torch.bool and not self._origins.is_fixed(index):
                raise _refusal(name, "selects entries by a mask that depends on inputs")
            for at in self._origins.entries_of([index]):
                lengths[at] = min(length, lengths.get(at, length))

    def _meet(
        self, name: str, conditions: Sequence[tuple[Tensor, Tensor]], both: bool = True
    ) -> None:
        """Notes conditions that have to be true somewhere, and, if `both`, false somewhere."""
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


_DERIVATIVES: Final = (torch.autograd.grad.__code__, torch.autograd.backward.__code__)


def _is_derived() -> bool:
    """Returns whether autograd runs a formula of its own, whose pieces are those of the forward."""
    return running_backward() != NONE and is_called_by(_DERIVATIVES)


def _refusal(name: str, why: str) -> UntriedError:
    return UntriedError(f"{name} {why}, at {call_site()}")


def _require_kept(x: Tensor, out: Tensor) -> None:
    """Requires that a cast does not round, but among floating numbers."""
    if torch.can_cast(x.dtype, out.dtype) and (out.dtype != torch.bool or x.dtype == torch.bool):
        return
    raise _refusal("a cast", f"makes {out.dtype} of {x.dtype}")


def _tensors(values: Any) -> list[Tensor]:
    return [x for value in values for x in tensors_of(value)]


def widened(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which numbers of a dtype are tried: 64 bits for each real one."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


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
