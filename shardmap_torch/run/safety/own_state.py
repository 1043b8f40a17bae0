"""Bodies that change the data that they refer to: each of their runs starts from the same values.

A check interprets a body several times, and ranks of a simulated mesh share one process with the
counters and tables that their body changes. So each interpretation finds what the first one did,
and a check leaves nothing behind, no tensor without data in a cache either. Each rank finds that
too, as processes do, and in its backward what it has left itself; after a call the data is as the
first rank has left it. What a body reads beside that data is not seen: see `guards.state`.
"""

import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from types import CodeType
from typing import Any, Final

from torch import Tensor

from shardmap_torch.backends.rank import current_rank
from shardmap_torch.backends.threads import PAUSES
from shardmap_torch.boundary.call import Call, Wrap
from shardmap_torch.checker.guards.holders import LOOKS, Holder, Whole, held, hold, is_same
from shardmap_torch.checker.guards.state import State, codes_in
from shardmap_torch.checker.queries import types_now
from shardmap_torch.core.source_location import Site, warn_at
from shardmap_torch.core.tree import flatten
from shardmap_torch.errors import ShardTypeError, show_shape
from shardmap_torch.types import I, K, R, Z

_CHANGED: Final = (
    "{}: the body keeps what each rank has for itself in what it refers to, and a backward of it "
    "runs after another call has replaced that. Pass it as an argument, save it in the context of "
    "a Function, or close over a variable of the body itself."
)
_DRAWN: Final = (
    "{}: the body draws from {}, whose state each process has for itself: what it draws would "
    "count as equal on all ranks.\nFix: pass what it depends on as an argument, or draw random "
    "numbers from a key of shardmap_torch.random."
)


_KEPT: Final = (
    "{}: {} keeps a tensor of the body: {}. After the call it is that of one rank.\n"
    "Fix: return it, with its spec in out_specs: a loss by P(), after all_reduce(loss, axis, "
    "op='mean', dst=I), or as loss.reshape(1), one a rank, by P(axis); debug_print shows it there."
)
_TOLD: Final = set[Site]()
_INTO: Final = "append|appendleft|extend|add|insert|setdefault|update"


class Undone:
    """Undoes, before each interpretation of a body and after all of them, what it has changed.

    Attributes:
        altered: places among the holders of what was changed, also if only for a while.
        kept: what each name keeps of the body that differs between ranks.
    """

    def __init__(self, states: Sequence[State]) -> None:
        self.altered = set[int]()
        self.kept: dict[str, str] = {}
        self._states = states
        self._holders = [holder for state in states for holder in state.holders]
        self._start = [held(*holder) for holder in self._holders]

    def look(self) -> None:
        """Notes what is changed now, though it may be as it was when the check ends."""
        if not all(state.holds() for state in self._states):
            pairs = enumerate(zip(self._holders, self._start, strict=True))
            self.altered |= {at for at, (here, was) in pairs if not is_same(held(*here), was)}

    def note_kept(self) -> None:
        """Notes names under which the body, which has just been interpreted, keeps its tensors."""
        if all(state.holds() for state in self._states):
            return
        for here, was in zip(self._holders, self._start, strict=True):
            for name, value in () if is_same(held(*here), was) else _entries(here, was):
                shown = next(filter(None, map(_differing, flatten(value)[0])), "")
                named = (each for other in self._holders for each in _entries(other))
                if shown and (known := next((k for k, x in named if k and x is here[0]), name)):
                    self.kept.setdefault(known, shown)

    def only_kept(self) -> Iterator[tuple[Site, str, str]]:
        """Yields what is kept and read by no code that the body refers to: line, name and shape."""
        met = [x for state in self._states for x in state.opaque if isinstance(x, CodeType)]
        codes = [each for x in met for each in codes_in(x) if each.co_name != "__init__"]
        lines = ((x.co_filename, line) for x in codes for *_, line in x.co_lines() if line)
        sites = [Site(*place) for place in dict.fromkeys(lines)] if self.kept else []
        for name, shown in self.kept.items():
            found = [site for site in sites if re.search(rf"{name}\b", site.source)]
            into = rf"{name}\b[^=]*( \+?= |\.({_INTO})\()"
            if found and all(re.search(into, site.source) for site in found):
                yield found[0], re.findall(r"\w+", name)[-1], shown

    def restore(self) -> None:
        """Puts everything back."""
        self.look()
        for at in self.altered:
            hold(*self._holders[at], self._start[at])


@contextmanager
def undoing(call: Call, states: Sequence[State], shares: bool) -> Iterator[tuple[Call, Undone]]:
    """Yields the call for a check, and what notes and undoes the changes of its body.

    Args:
        call: the call.
        states: what its body and its arguments refer to.
        shares: whether ranks share the data, so that others run when one meets them.

    Raises:
        ShardTypeError: the body draws random numbers of Python or NumPy.
    """
    undone, drawn = Undone(states), _generators()

    @wraps(call.function)
    def fresh(*args: Any, **kwargs: Any) -> Any:
        undone.restore()
        out = call.function(*args, **kwargs)
        undone.note_kept()
        return out

    try:
        with LOOKS.holding(undone.look) if shares else nullcontext():
            yield replace(call, function=fresh), undone
    finally:
        undone.restore()
    for (name, state), (_, was) in zip(_generators(), drawn, strict=False):
        if state != was:
            raise ShardTypeError(_DRAWN.format(call.name, name))
    for site, *told in undone.only_kept():
        if site not in _TOLD:
            _TOLD.add(site)
            warn_at(site, _KEPT.format(call.name, *told))


def _entries(here: Holder, was: Any = None) -> Iterator[tuple[str, Any]]:
    """Yields what a holder has that it had not, with patterns of its name; empty for items."""
    (owner, key), now = here, held(*here)
    if type(now) is not Whole:
        is_variable = isinstance(key, str) and not isinstance(owner, type)
        yield rf"(?<![.\w]){key}" if is_variable else rf"\.{getattr(key, '__name__', key)}", now
        return
    known = {*map(id, was.values)} if type(was) is Whole else set()
    for name, value in zip(now.keys or [""] * len(now.values), now.values, strict=True):
        if id(value) not in known:
            yield rf"[.\"']{re.escape(name)}" if name and isinstance(name, str) else "", value


def _differing(x: Any) -> str:
    """Describes a tensor that is another one on each rank; empty of others."""
    types = (types_now(x) or {}) if isinstance(x, Tensor) else {}
    axes = ", ".join(repr(axis) for axis, type_ in types.items() if type_ not in (I, R, K, Z))
    return f"{show_shape(x.dtype, x.shape)}, another one on each rank of {axes}" if axes else ""


def _generators() -> list[tuple[str, Any]]:
    """Returns the state of generators from which bodies draw by mistake; torch's are seeded."""
    found: list[tuple[str, Any]] = [("Python's random module", random.getstate())]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, position, *_ = numpy.random.get_state()
        found.append(("numpy.random", (keys.tobytes(), position)))
    return found


@contextmanager
def own_state(call: Call, states: Sequence[State], altered: Sequence[int]) -> Iterator[Call]:
    """Yields a call of the same body, each of whose runs starts from the values of now."""
    holders = [holder for state in states for holder in state.holders]
    ranks = _Ranks(call.name, [holders[at] for at in altered])
    start = ranks.read()

    @wraps(call.function)
    def apart(*args: Any, **kwargs: Any) -> Any:
        return ranks.run(current_rank(), start, lambda: call.function(*args, **kwargs))

    with ranks.joined():
        # What a batched program leaves in the data would be tensors that ended with it.
        alone = call.rank_only or ""
        yield replace(call, function=apart, separate=ranks.later, rank_only=alone)


@dataclass(eq=False)
class _Ranks:
    """The values that each rank has left in the holders that a body changes.

    Attributes:
        name: the name of the body.
        holders: the holders.
        ends: what each rank has left, by the rank.
        left: what was left for all when the last of them had ended.
    """

    name: str
    holders: Sequence[Holder]
    ends: dict[int, list[Any]] = field(default_factory=dict)
    left: list[Any] = field(default_factory=list)

    def read(self) -> list[Any]:
        return [held(*holder) for holder in self.holders]

    def _put(self, values: Sequence[Any]) -> None:
        for holder, value in zip(self.holders, values, strict=True):
            hold(*holder, value)

    def run(self, rank: int, start: list[Any], work: Callable[[], Any]) -> Any:
        """Does the work of a rank, which starts from some values and ends with its own."""
        own = start

        def leave() -> None:
            nonlocal own
            own = self.read()

        self._put(start)
        with PAUSES.holding((leave, lambda: self._put(own))):
            out = work()
        self.ends[rank] = self.read()
        return out

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Leaves for all, after the block, what the first rank has left."""
        try:
            yield
        finally:
            if self.ends:
                self._put(self.ends[min(self.ends)])
            self.left = self.read()

    @contextmanager
    def later(self) -> Iterator[Wrap]:
        """Runs a backward of the ranks; its work has the rank as its argument.

        Raises:
            ShardTypeError: another call has replaced what each rank has for itself.
        """
        now = self.read()
        is_own = all(map(is_same, now, self.left))
        if not is_own and self._differ():
            raise ShardTypeError(_CHANGED.format(self.name))
        starts = dict(self.ends) if is_own else {}

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda rank: self.run(rank, starts.get(rank, now), lambda: function(rank))

        with self.joined():
            yield wrap

    def _differ(self) -> bool:
        """Returns whether the ranks have left different values, or any tensors."""
        states = [State(None, [*end]) for end in self.ends.values()]
        return len({state.found for state in states}) > 1 or any(x.tensors for x in states)
