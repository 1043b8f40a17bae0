"""Steps of one device with the items of a dim beyond those that a rank's loop takes.

Of a dim that ranks share, one device has as many items as all ranks together. Its loop does with
each what it does with the first ones, which are compared with the ranks' step by step. The steps
with other items are skipped if they are the same operations with the same arguments, up to the
item, or add up an expression of another item, or compute again what has been computed before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import torch

from shardmap_torch.checker.ir.observer import COLLECTIVE, INDEX
from shardmap_torch.checker.rules.infer import draws, writes_of
from shardmap_torch.checker.spmd.align import IDENTITIES, Alignment, is_reshape
from shardmap_torch.checker.spmd.batches.terms import ADDS, Term, plain_key, united
from shardmap_torch.checker.spmd.layout import Shape
from shardmap_torch.checker.spmd.recorder import Event, Key, Ref
from shardmap_torch.checker.spmd.sharded import is_view
from shardmap_torch.checker.spmd.values.positions import RULES, Affine, name_of
from shardmap_torch.core.autograd_state import RECORDING
from shardmap_torch.core.torch_private.engine import OpOverload

aten = torch.ops.aten

_NO_ALIASES: Final[Mapping[int, int]] = MappingProxyType({})


@dataclass(frozen=True)
class Taken:
    """Items that an operation takes from a dim.

    Attributes:
        dim: the dim.
        size: how many of its entries an item has; 0 if the dim is gone.
        indices: of these items.
    """

    dim: int
    size: int
    indices: range


def taken(op: OpOverload, arguments: Mapping[str, Any], dim: int, length: int) -> Taken | None:
    """Returns which items an operation takes from a dim of that length; None for other steps.

    Example:
        >>> taken(aten.slice.Tensor, {"start": 4, "end": 6, "step": 1}, 0, 8)
        Taken(dim=0, size=2, indices=range(2, 3))
    """
    found: range | None = None
    size = 0
    if op is aten.unbind.int:
        found = range(length)
    elif op is aten.select.int:
        found = _within(arguments["index"], length)
    elif op is aten.split.Tensor:
        size = arguments["split_size"]
        is_even = type(size) is int and 0 < size <= length and length % size == 0
        found = range(length // size) if is_even else None
    elif op is aten.slice.Tensor:
        bounds = [arguments[name] for name in ("start", "end", "step")]
        if all(type(bound) in (int, type(None)) for bound in bounds):
            term = range(*slice(*bounds).indices(length))
            size = len(term)
            is_even = term.step == 1 and 0 < size and length % size == term.start % size == 0
            found = _within(term.start // size, length // size) if is_even else None
    return None if found is None else Taken(dim, size, found)


def _within(index: Any, length: int) -> range | None:
    return range(index, index + 1) if type(index) is int and 0 <= index < length else None


class Repeats:
    """Reads the steps of one device that have been compared, and skips those that repeat them."""

    def __init__(self, alignment: Alignment, has_other_ranks: bool) -> None:
        """Starts before the first step; `has_other_ranks` if collectives do something there."""
        self._alignment, self._has_other_ranks = alignment, has_other_ranks
        self._at = 0
        self._terms: dict[int, Sequence[Term | None]] = {}
        self._entries: dict[int, Term] = {}
        self._sources: dict[Key, Term] = {}
        self._shapes: dict[int, Shape] = {}
        self._position: Term | None = None
        self._positions: dict[int, int] = {}
        self._made: dict[Key, Sequence[Term | None]] = {}
        self._grad_modes: dict[int, int] = {}
        self._values: dict[Key, Sequence[tuple[int, int]]] = {}
        self._roots: dict[int, int] = {}
        self._versions: dict[int, int] = {}

    def note_source(self, ref: Ref, found: Taken, shape: Shape, term: Term) -> None:
        """Notes that ranks take items, as this one, from a tensor of that shape on one device."""
        source = self._number(ref.number)
        self._sources[source, self._version(source), found.dim, found.size] = term
        self._shapes[source] = shape

    def note_position(self, ref: Ref, term: Term) -> None:
        """Notes that ranks count items there, as in `axis_index(axis) * n + i`."""
        self._position = replace(term, indices=frozenset())
        self._entries[self._alignment.canonical(ref)] = term

    def note_terms(self, terms: Sequence[Term | None]) -> None:
        """Notes what the results of the step that has been taken last are of items."""
        self._terms[self._alignment.at - 1] = terms

    def entry_of(self, ref: Ref) -> Term | None:
        """Returns of which items a tensor on one device is the sum of an expression."""
        return self._entries.get(self._alignment.canonical(ref))

    def read(self) -> None:
        """Reads the steps that have been compared since the last call."""
        for number in range(self._at, self._alignment.at):
            event, terms = self._alignment.events[number], self._terms.pop(number, ())
            key, items = self._key(event)
            self._write(event)
            self._count(event)
            if self._take(event):
                continue
            indices = frozenset[int]().union(*(each.indices for each in items))
            for (made, _), term in zip(event.results, terms, strict=False):
                if term is not None and term.indices == indices:
                    self._entries[self._number(made)] = term
                    self._grad_modes[term.expression] = event.grad_mode
            if key is None:
                continue
            if not items:
                numbers = [self._number(made) for made, _ in event.results]
                self._values[key] = [(each, self._version(each)) for each in numbers]
            elif len(items) == 1 and len(items[0].indices) == 1:
                self._made[key] = terms
        self._at = self._alignment.at

    def skip(self) -> bool:
        """Skips steps that repeat others with items of other ranks; returns whether there are."""
        events, end = self._alignment.events, self._at
        same: dict[int, int] = {}
        for number in range(self._at, len(events)):
            is_of_item = self._repeat(events[number], same)
            if is_of_item is None:
                break
            if is_of_item:
                end = number + 1
                for made, source in same.items():
                    self._alignment.identify(made, source)
                same.clear()
        is_any = end > self._at
        self._alignment.skip(end)
        self._at = end
        return is_any

    # ------------------------------------------------------------------------ single steps

    def _repeat(self, event: Event, same: dict[int, int]) -> bool | None:
        """Returns whether a step has items of other ranks; None if it repeats no other.

        What it computes again is noted in `same`, with what it is equal to.
        """
        key, items = self._key(event, same)
        if self._take(event) or self._count(event):
            self._write(event)
            return True
        if key is None:
            return None
        if not items:
            return self._compute_again(event, key, same)
        made = self._added(event) or self._made.get(key)
        indices = frozenset[int]().union(*(each.indices for each in items))
        if not made or max(indices) < items[0].count:
            return None
        if len(items) > 1 and self._added(event) is None:
            return None
        if len(items) == 1 and (len(indices) > 1 or min(indices) < items[0].count):
            return None
        self._write(event)
        for (number, _), term in zip(event.results, made, strict=True):
            if term is not None:
                self._entries[self._number(number)] = replace(term, indices=indices)
        return True

    def _compute_again(self, event: Event, key: Key, same: dict[int, int]) -> bool | None:
        known = self._values.get(key)
        if known is None or _is_mutable(event):
            return None
        if any(self._version(number) != version for number, version in known):
            return None
        for (made, _), (number, _) in zip(event.results, known, strict=True):
            same[made] = number
        return False

    def _added(self, event: Event) -> Sequence[Term] | None:
        """Returns the sum of an expression of several items that a step makes, if it makes one."""
        args = event.arguments
        if event.name not in ADDS or args.get("alpha", 1) != 1:
            return None
        x, y = args["self"], args["other"]
        if not isinstance(x, Ref) or not isinstance(y, Ref) or x.flows != y.flows:
            return None
        term = united(self.entry_of(x), self.entry_of(y))
        if term is None or event.grad_mode < self._grad_modes.get(term.expression, RECORDING):
            return None
        return [term]

    def _take(self, event: Event) -> bool:
        """Notes the items that a step takes; returns whether it takes some."""
        source, dim = event.arguments.get("self"), event.arguments.get("dim")
        if not self._sources or not isinstance(source, Ref) or not isinstance(dim, int):
            return False
        number = self._number(source.number)
        shape = self._shapes.get(number)
        if shape is None:
            return False
        found = taken(event.name, event.arguments, dim % len(shape), shape[dim])
        if found is None:
            return False
        term = self._sources.get((number, self._version(number), found.dim, found.size))
        if term is None:
            return False
        for (made, _), index in zip(event.results, found.indices, strict=True):
            self._entries[self._number(made)] = replace(term, indices=frozenset({index}))
        return True

    def _count(self, event: Event) -> bool:
        """Notes a number that is computed from a rank's index; returns whether it is an item's."""
        ((number, shape), *others) = event.results or ((0, (0,)),)
        if shape or others or self._has_other_ranks:
            return False
        found: Affine | None = Affine.single(0)
        if event.name != INDEX:
            found = self._counted(event)
        term, number = self._position, self._number(number)
        if found is None:
            return False
        self._positions[number] = found.base
        if term is None or found.base < term.count or number in self._entries:
            return False
        self._entries[number] = replace(term, indices=frozenset({found.base}))
        return True

    def _counted(self, event: Event) -> Affine | None:
        """Computes a number from others that are computed from a rank's index."""
        if event.arguments.get("dtype") is not None:
            return None  # items are integers
        args: dict[str, Any] = {**event.arguments}
        for name, x in event.arguments.items():
            if isinstance(x, Ref):
                at = self._positions.get(self._number(x.number))
                args[name] = None if at is None else Affine.single(at)
        rule = RULES.get(name_of(event.name)) if isinstance(event.name, OpOverload) else None
        known = [args[name] for name, x in event.arguments.items() if isinstance(x, Ref)]
        return rule(args, ()) if rule is not None and known and None not in known else None

    # ----------------------------------------------------------------------- what is known

    def _key(
        self, event: Event, same: Mapping[int, int] = _NO_ALIASES
    ) -> tuple[Key | None, list[Term]]:
        """Returns what a step does, up to items, and its operands with different items."""
        items: dict[tuple[Any, frozenset[int]], Term] = {}

        def of(value: Any) -> Any:
            if isinstance(value, Ref):
                number = self._number(value.number)
                number = same.get(number, number)
                term = self._entries.get(number)
                if term is None:
                    return "value", number, self._version(number)
                items[term.group, term.indices] = term
                return "item", term.expression, value.flows
            if isinstance(value, tuple | list):
                return tuple(map(of, value))
            return plain_key(value)

        arguments = tuple([(name, of(value)) for name, value in event.arguments.items()])
        key = (event.name, arguments, event.grad_mode) if self._is_known(event) else None
        return key, [*items.values()]

    def _is_known(self, event: Event) -> bool:
        """Returns whether a step does the same whenever its operands are the same."""
        if isinstance(event.name, OpOverload):
            return not draws(event.name, event.arguments)
        return event.name in (COLLECTIVE, INDEX) and not self._has_other_ranks

    def _write(self, event: Event) -> None:
        """Notes memory that a step shares, and forgets what is known of memory that it writes."""
        source, name = event.arguments.get("self"), event.name
        if not isinstance(name, OpOverload):
            return
        if isinstance(source, Ref) and (is_view(name) or name in IDENTITIES or is_reshape(name)):
            for number, _ in event.results:
                self._roots.setdefault(self._number(number), self._root(source.number))
        refs = [x for key in writes_of(name, event.arguments) for x in _refs(event.arguments[key])]
        for root in {self._root(ref.number) for ref in refs}:
            self._versions[root] = self._versions.get(root, 0) + 1
            for known in (self._entries, self._positions):
                for number in [number for number in known if self._root(number) == root]:
                    del known[number]

    def _number(self, number: int) -> int:
        return self._alignment.canonical(Ref(number))

    def _root(self, number: int) -> int:
        number = self._number(number)
        return self._roots.get(number, number)

    def _version(self, number: int) -> int:
        return self._versions.get(self._root(number), 0)


def _is_mutable(event: Event) -> bool:
    return isinstance(event.name, OpOverload) and bool(writes_of(event.name, event.arguments))


def _refs(value: Any) -> list[Ref]:
    if isinstance(value, Ref):
        return [value]
    return [ref for x in value for ref in _refs(x)] if isinstance(value, tuple | list) else []
