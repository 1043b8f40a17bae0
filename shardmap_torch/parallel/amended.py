"""Errors in the forward of a parallelized module: where, and the change of the plan that mends it.

A plan is changed as its author would change it: another style for a Linear near the line that
fails, or none, two styles that change places, attributes that are divided. Each plan is checked as
a call is, without a run; the first that is accepted under global strictness is printed.
"""

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from traceback import walk_tb
from typing import Any, Final

from torch import Tensor, nn

from shardmap_torch.checker.queries import types_now
from shardmap_torch.core.ambient import silently
from shardmap_torch.core.source_location import error_site
from shardmap_torch.errors import TRIED, ShardMapError, show_shape
from shardmap_torch.ops import axis_size
from shardmap_torch.parallel.plan import ROOT, Style, is_matched
from shardmap_torch.parallel.styles import (
    EMBEDDING,
    LINEAR,
    LocalAttributes,
    PackedColwiseParallel,
    kind_of,
)
from shardmap_torch.parallel.words import WORDS
from shardmap_torch.types import I, K, R, Z

_PLANS: Final = 24
"""Maximal number of plans that are tried: most fail where the first did, long before the end."""

Changes = Mapping[str, Style | None]
"""Styles for keys of a plan in place of those that it has; None leaves the key out."""


@dataclass(frozen=True)
class _Place:
    """The place in a module at which its body has failed.

    Attributes:
        path: of the innermost module whose forward runs.
        words: the names in the line of the user's code.
        shapes: lines about the tensors among these.
    """

    path: str
    words: Sequence[str]
    shapes: Sequence[str]


def note_place(error: Exception, paths: Mapping[int, str], axis: str) -> None:
    """Keeps with an error where in the module it was raised.

    Args:
        error: what leaves the body, where values have types.
        paths: those of the bound copies of the modules, by identity.
        axis: of the plan.
    """
    path, values, site = ROOT, dict[str, Any](), error_site(error)
    for frame, _ in walk_tb(error.__traceback__):
        first = next(iter(frame.f_locals.values()), None)
        path = paths.get(id(getattr(first, "module", first)), path)
        if site is not None and frame.f_code.co_filename == site.file:
            values = frame.f_locals
    words = [*dict.fromkeys(re.findall(r"[^\W\d]\w*", site.source if site else ""))]
    tensors = {name: x for name in words if isinstance(x := values.get(name), Tensor)}
    vars(error)["place"] = _Place(path, words, [_shown(*each, axis) for each in tensors.items()])


def _shown(name: str, x: Tensor, axis: str) -> str:
    type_, whole = (types_now(x) or {}).get(axis, I), [*x.shape]
    how = f", of type {type_} over {axis!r}"
    if type_.dim is not None:
        whole[type_.dim] *= axis_size(axis)
        how = f", over {axis!r} a shard of {whole}"
    how = ", equal on all ranks" if type_ in (I, R, K, Z) else how
    return f"  {name}: {show_shape(x.dtype, x.shape)}{how}"


def amend(
    error: Exception,
    module: nn.Module,
    styles: Mapping[str, Style],
    accepts: Callable[[Mapping[str, Style]], object],
) -> None:
    """Adds to an error where the module fails, and in place of advice what mends the plan.

    Args:
        error: that of a call.
        module: the root of the plan.
        styles: the plan.
        accepts: checks a call with another one; raises an error if it is refused.
    """
    found = next((x for x in map(vars, (error.__context__ or error, error)) if "place" in x), {})
    if not isinstance(error, ShardMapError) or not {"place", "tries"} <= found.keys():
        return  # it is of no forward, or not of the axis of the plan
    head, fix, advice = f"{error}".partition("\nFix: ")
    place = found["place"]
    head = re.sub(r"\n  In the body .*", "", head)  # where the line is, they are told below
    near = _Near(module, styles, place)
    lines = [head, *near.lines(), *(() if re.search(r"\n  \w+: \w+\[", head) else place.shapes)]
    for changes in near.changes() if found["tries"] else ():
        changed = {**styles, **changes}
        try:
            with silently(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                accepts({key: style for key, style in changed.items() if style is not None})
        except Exception:  # whatever the module raises on these shards
            continue
        few = near.few(changes)
        if {*changes.values()} == {None} and not few:  # at worst; more than the plan may be wrong
            advice += f"\n{TRIED}{_told(changes)}"
        else:
            lines, fix, advice = [*lines, *few, TRIED + _told(changes)], "", ""
        break
    error.args = ("\n".join(lines) + fix + advice,)


def _told(changes: Changes) -> str:
    given = [f"{key!r}: {_text(style)}" for key, style in changes.items() if style is not None]
    without = [repr(key) for key, style in changes.items() if style is None]
    parts = [f"{{{', '.join(given)}}} in the plan"] * bool(given)
    return " and ".join([*parts, *[f"the plan without {', '.join(without)}"] * bool(without)])


def _text(style: Style) -> str:
    """Formats a style as its word, where it has one."""
    words = (word for word, each in WORDS.items() if repr(each.style) == repr(style))
    return repr(style if isinstance(style, str) else next(words, style))


class _Near:
    """Modules near the one that failed, and the styles that the plan has for them."""

    def __init__(self, module: nn.Module, styles: Mapping[str, Style], place: _Place) -> None:
        self._modules, self._styles, self._place = dict(module.named_modules()), styles, place
        self._holder = place.path
        while not (below := self._below()) and self._holder:
            self._holder = self._holder.rpartition(".")[0]
        self._paths: dict[str, str] = {}  # one of each key
        for path in sorted(below, key=self._order):
            self._paths.setdefault(self._key(path), path)

    def _below(self) -> list[str]:
        start = f"{self._holder}." * bool(self._holder)
        found = [path for path in self._modules if path.startswith(start) and path != self._holder]
        return [path for path in found if kind_of(self._modules[path]) is not None]

    def _order(self, path: str) -> tuple[bool, bool, bool, int]:
        name, own = path.rpartition(".")[2], self._place
        is_known = self._key(path) in self._styles
        return path != own.path, is_known, name not in own.words, path.count(".")

    def _key(self, path: str) -> str:
        """Returns the key of a module: that of the plan, or one for all layers of a list."""
        known = (key for key in self._styles if is_matched(path, key))
        tokens = path.split(".")
        for i, token in enumerate(tokens):
            if token.isdigit() and self._modules[".".join(path.split(".")[: i + 1])]._modules:
                tokens[i] = "*"
        return next(known, ".".join(tokens))

    def lines(self) -> Iterator[str]:
        """Yields a line that names the module, and what the plan has of it and its neighbours."""
        missing = [repr(key) for key in self._paths if key not in self._styles]
        path, style = self._place.path, self._styles.get(self._key(self._place.path))
        where = f"  in {path!r}" if path else "  in the module's own forward"
        where += "" if style is None else f", which the plan has as {_text(style)}"
        if path or missing:
            yield where + f"; not in the plan: {', '.join(missing)}" * bool(missing)

    def changes(self) -> Iterator[Changes]:
        """Yields changes of the plan, the likeliest first; at last without all that is near."""
        known = {key: path for key, path in self._paths.items() if key in self._styles}
        yield from islice(self._likely(), _PLANS)
        for keys in (self._named(known), self._few(), known):
            if 0 < len(keys) < len(self._styles):
                yield dict.fromkeys(keys)

    def few(self, keys: Collection[str]) -> list[str]:
        """Says of how few outputs several modules are that are left out, as keys and values."""
        if len(keys) < 2 or {*keys} != {*self._few()}:
            return []
        outputs = next(iter(self._modules[self._paths[next(iter(keys))]].parameters())).shape[0]
        names = " and ".join(map(repr, keys))
        return [f"  {names} have {outputs} outputs on one device, too few for heads on each rank"]

    def _few(self) -> list[str]:
        named = {self._alike(self._paths[key]) for key in self._named(self._paths)}
        return [key for key, path in self._paths.items() if self._alike(path) in named]

    def _named(self, keys: Iterable[str]) -> list[str]:
        names = {key: self._paths[key].split(".")[-1] for key in keys if key in self._styles}
        return [key for key, name in names.items() if name in self._place.words]

    def _alike(self, path: str) -> tuple[object, ...]:
        shapes = [x.shape for x in self._modules[path].parameters()]
        return repr(self._styles.get(self._key(path))), *shapes

    def _likely(self) -> Iterator[Changes]:
        divided = self._divided()
        for key, path in self._paths.items():
            _, is_known, is_elsewhere, _ = self._order(path)
            yield from divided if is_known and is_elsewhere else ()
            yield from self._styled(key, path)
            yield from self._swapped(key) if path == self._place.path else ()
        yield from divided

    def _styled(self, key: str, path: str) -> Iterator[Changes]:
        own, kind = self._styles.get(key), kind_of(self._modules[path])
        if kind == LINEAR and _PARTS & {*self._place.words}:
            packed = [{key: PackedColwiseParallel(parts=parts)} for parts in (3, 2)]
            yield from packed
            yield from ({**each, **packed[0]} for each in self._divided())
        near = [at for at, other in self._paths.items() if _are_alike(path, other, self._modules)]
        styles = [self._styles[at] for at in near if own is None and at in self._styles]
        for text, style in {_text(x): x for x in (*styles, *_WORDS[kind == EMBEDDING])}.items():
            if own is None or text != _text(own):
                yield {key: style}
        if own is not None:
            yield {key: None}

    def _swapped(self, one: str) -> Iterator[Changes]:
        for other in self._paths if one in self._styles else ():
            if other in self._styles and _text(self._styles[one]) != _text(self._styles[other]):
                yield {one: self._styles[other], other: self._styles[one]}

    def _divided(self) -> Iterator[Changes]:
        """Yields numbers that the module has, as of heads, for each rank to have its part."""
        own, key = vars(self._modules[self._holder]), self._key(self._holder)
        names = [name for name, x in own.items() if type(x) is int and x > 1]
        yield from ({key: LocalAttributes(name)} for name in names if key not in self._styles)


def _are_alike(path: str, other: str, modules: Mapping[str, nn.Module]) -> bool:
    is_beside = path.rpartition(".")[0] == other.rpartition(".")[0]
    return is_beside and kind_of(modules[path]) == kind_of(modules[other])


_PARTS: Final = frozenset(("chunk", "split", "tensor_split", "unbind", "unflatten"))
"""Names in a line that takes the matrices of one weight apart, as q, k and v."""

_WORDS: Final = (
    ("colwise", "rowwise", "colwise_gather_output"),
    ("embedding_rowwise", "embedding_colwise"),
)
"""Styles that a Linear is tried with, and an Embedding."""
