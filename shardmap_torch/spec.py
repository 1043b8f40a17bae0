"""`P`, the partition spec: how one global tensor is sharded over the axes of a mesh."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Final, TypeAlias

from shardmap_torch.core.caching import memo
from shardmap_torch.errors import SpecError, counted, show
from shardmap_torch.report.page import Page, Shown, Table
from shardmap_torch.types import AxisType, I, Partial, R, S

Entry: TypeAlias = str | tuple[str, ...] | None

_HELD: Final = {
    "replicate": "the value, which it uses in its own way",
    "invariant": "the value, used alike by all",
    "partial": "an addend of the value",
}


def _entry_axes(entry: Entry) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else entry


class P(Shown):
    """One entry per tensor dimension: None, an axis name, or a tuple of names (first is major).

    Trailing dimensions may be left out; they are not sharded. Axes that no dimension mentions may
    be typed by keyword: `replicate=` (each rank uses the value in its own way, gradients are summed
    over the axis), `invariant=` (one computation repeated) and `partial=` (the value is the sum
    over the ranks). A value type: immutable, hashable, equal by content, a leaf to pytrees.

    Raises:
        SpecError: an entry is no axis name, or an axis is named twice.

    Source: `jax.sharding.PartitionSpec`, with its `unreduced=` named `partial=`.

    Example:
        >>> P("dp", None, ("fsdp", "tp"), replicate={"pp"})
        P('dp', None, ('fsdp', 'tp'), replicate={'pp'})
        >>> P("dp") == P("dp"), P("dp") == P("tp")
        (True, False)
        >>> list(P("dp", ())) == ["dp", None]  # it iterates over its entries; () is None
        True
    """

    __slots__ = (
        "_hash",
        "entries",
        "invariant",
        "mentioned",
        "partial",
        "replicate",
        "sharded_dims",
    )

    entries: Final[tuple[Entry, ...]]
    replicate: Final[frozenset[str]]
    invariant: Final[frozenset[str]]
    partial: Final[frozenset[str]]

    sharded_dims: Final[tuple[tuple[int, tuple[str, ...]], ...]]
    """The sharded dimensions, with the axes that shard them, major first."""

    mentioned: Final[tuple[str, ...]]
    """The axes that shard some dimension."""

    def __init__(
        self,
        *entries: Entry | list[str],
        replicate: Iterable[str] | str = (),
        invariant: Iterable[str] | str = (),
        partial: Iterable[str] | str = (),
    ) -> None:
        self.entries = tuple(_read_entry(entry) for entry in entries)
        self.replicate = _read_names("replicate", replicate)
        self.invariant = _read_names("invariant", invariant)
        self.partial = _read_names("partial", partial)
        axes = [(dim, _entry_axes(entry)) for dim, entry in enumerate(self.entries)]
        self.sharded_dims = tuple((dim, names) for dim, names in axes if names)
        self.mentioned = tuple(axis for _, names in self.sharded_dims for axis in names)
        self._hash = hash((self.entries, self.replicate, self.invariant, self.partial))
        _reject_repeats(self)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuses a second assignment: specs are shared and hashed."""
        if hasattr(self, name):
            raise AttributeError(f"P is immutable; {name} cannot be set.")
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, P):
            return NotImplemented
        return self is other or (self._hash == other._hash and self._key() == other._key())

    def __hash__(self) -> int:
        """Hashes entries and keywords, once."""
        return self._hash

    def __iter__(self) -> Iterator[Entry]:
        """Iterates over the entries, as JAX's does; it has no length, so that P() is true."""
        return iter(self.entries)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, self._key())

    def __repr__(self) -> str:
        words = [repr(entry) for entry in self.entries]
        for name, axes in self.typed():
            words.append(f"{name}={{{', '.join(map(repr, sorted(axes)))}}}")
        return f"P({', '.join(words)})"

    def page(self) -> Page:
        """Returns a page that says of each dim and of each other axis what a rank holds."""
        rows = [(f"dim {dim}", f"shards over {', '.join(by)}") for dim, by in self.sharded_dims]
        for name, axes in self.typed():
            rows += [(axis, _HELD[name]) for axis in sorted(axes)]
        return Page(repr(self), tables=[Table("What a rank holds", ("of", "it holds"), rows)])

    def _key(self) -> tuple[tuple[Entry, ...], frozenset[str], frozenset[str], frozenset[str]]:
        return self.entries, self.replicate, self.invariant, self.partial

    def typed(self) -> Iterator[tuple[str, frozenset[str]]]:
        """Yields the keywords that name at least one axis, with their axes."""
        for name in ("replicate", "invariant", "partial"):
            axes: frozenset[str] = getattr(self, name)
            if axes:
                yield name, axes

    @property
    def named(self) -> frozenset[str]:
        """All axes that the spec names, in entries or keywords."""
        return frozenset(self.mentioned) | self.replicate | self.invariant | self.partial

    @property
    def types(self) -> Mapping[str, AxisType]:
        """Types along each named axis.

        Example:
            >>> P("dp", replicate={"tp"}).types
            {'dp': S(0), 'tp': R}
        """
        types = {axis: S(dim) for dim, axes in self.sharded_dims for axis in axes}
        keywords = ((self.replicate, R), (self.invariant, I), (self.partial, Partial))
        return types | {axis: type_ for axes, type_ in keywords for axis in sorted(axes)}


@memo
def expanded(spec: P, aliases: tuple[tuple[str, tuple[str, ...]], ...]) -> P:
    """Replaces the axes of a mesh's views by the finest axes of these; see `Mesh.aliases`.

    Example:
        >>> expanded(P(("dp", "cp"), "tp"), (("dp", ("edp", "x")),))
        P(('edp', 'x', 'cp'), 'tp')
    """
    known = dict(aliases)
    if not any(axis in spec.named for axis in known):  # Dynamo cannot trace isdisjoint of keys
        return spec

    def finest(axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(part for axis in axes for part in known.get(axis, (axis,)))

    entries = [entry and finest(_entry_axes(entry)) for entry in spec.entries]
    typed = {word: finest(sorted(axes)) for word, axes in spec.typed()}
    return P(*((e[0] if len(e) == 1 else e) if e else None for e in entries), **typed)


def sharded_by(axes_by_dim: Iterable[Sequence[str]], **typed: Iterable[str]) -> P:
    """Makes a spec of the axes that shard each dim; `typed` are keywords of `P`.

    Example:
        >>> sharded_by([["dp"], [], ["tp", "cp"], []])
        P('dp', None, ('tp', 'cp'))
    """
    entries = [axes[0] if len(axes) == 1 else tuple(axes) or None for axes in axes_by_dim]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries, **typed)


def is_partition(value: object) -> bool:
    """Returns whether `value` is a `P`."""
    return isinstance(value, P)


def _rebuild(entries: tuple[Entry, ...], *typed: frozenset[str]) -> P:
    replicate, invariant, partial = typed
    return P(*entries, replicate=replicate, invariant=invariant, partial=partial)


def _read_entry(entry: Entry | list[str]) -> Entry:
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, tuple | list) and all(isinstance(axis, str) for axis in entry):
        return tuple(entry) or None  # no axis shards it
    raise SpecError(
        f"P takes an axis name, a tuple of axis names or None for a dim, not {show(entry)}."
    )


def _read_names(keyword: str, names: Iterable[str] | str) -> frozenset[str]:
    axes = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (names,)
    if not all(isinstance(axis, str) for axis in axes):
        raise SpecError(f"P({keyword}=...) takes axis names, not {show(names)}.")
    return frozenset(axes)


def _reject_repeats(spec: P) -> None:
    places = [*spec.mentioned, *(axis for _, axes in spec.typed() for axis in axes)]
    twice = sorted({axis for axis in places if places.count(axis) > 1})
    if twice:
        raise SpecError(f"{spec!r} names {', '.join(map(repr, twice))} more than once.")


def longer(spec: P, ndim: int) -> list[str]:
    """Explains that a spec has more entries than a tensor has dims.

    Returns:
        One sentence; none where it has not.

    Example:
        >>> longer(P("dp", "tp"), 1)
        ["P('dp', 'tp') has 2 entries, but the value has 1 dim"]
    """
    if len(spec.entries) <= ndim:
        return []
    entries = counted(len(spec.entries), "entry", "entries")
    return [f"{spec!r} has {entries}, but the value has {counted(ndim, 'dim', 'dims')}"]


def mismatches(spec: P, shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[str]:
    """Explains why `spec` cannot shard a tensor of global `shape` over axes of these `sizes`.

    Returns:
        One sentence per problem, none when it matches.

    Example:
        >>> mismatches(P("tp"), (10,), {"tp": 4})
        ["dim 0 has size 10, which does not divide over 'tp' = 4 ranks (10 = 2*4 + 2)"]
    """
    if too_long := longer(spec, len(shape)):
        return too_long
    problems = []
    for dim, axes in spec.sharded_dims:
        counts = [sizes[axis] for axis in axes]
        num_ranks, size = prod(counts), shape[dim]
        if size % num_ranks:
            names = repr(axes[0]) if len(axes) == 1 else repr(axes)
            product = "*".join(map(str, counts)) + (f" = {num_ranks}" if len(counts) > 1 else "")
            problems.append(
                f"dim {dim} has size {size}, which does not divide over {names} = {product} ranks "
                f"({size} = {size // num_ranks}*{num_ranks} + {size % num_ranks})"
            )
    return problems
