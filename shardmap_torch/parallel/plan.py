"""Plan: the style of each module below a root, and how each parameter is sharded."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar, cast

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from shardmap_torch.errors import SpecError, listing, show
from shardmap_torch.mesh import Mesh
from shardmap_torch.parallel.data import Data
from shardmap_torch.parallel.styles import (
    KNOWN,
    Layouts,
    LocalAttributes,
    kind_of,
    layouts_of,
    mistakes,
)
from shardmap_torch.parallel.words import WORDS, Split, spec_of_split
from shardmap_torch.spec import P, mismatches
from shardmap_torch.spec_patterns import is_match

ROOT: Final = ""
"""The key of a plan that stands for the module itself."""

_NO_DATA: Final = Data()

Style: TypeAlias = ParallelStyle | str
"""A style of torch's or ours, or the word that transformers has for one."""


@dataclass(frozen=True)
class Plan:
    """The resolved plan of one module.

    Attributes:
        axis: the mesh axis of its placements.
        styles: styles and their layouts, by the path of the module.
        splits: how parameters are sharded, by name; a shared one is under its first name.
        words: the styles as the plan has them, by the path of the module or parameter.
        specs: those of the parameters, by name; where one has several parts, these are a dim of it.
        unused: keys of a plan that the module carries which match nothing in it.
        data: the axes of rows.
        units: layers that are gathered by themselves: by path, the names of their parameters in the
            root by those in the layer.
    """

    axis: str
    styles: Mapping[str, Layouts]
    splits: Mapping[str, Split | None]
    words: Mapping[str, Style]
    specs: Mapping[str, P]
    unused: Sequence[str] = ()
    data: Data = _NO_DATA
    units: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @cached_property
    def packed(self) -> dict[str, Split]:
        """The parameters that have several parts."""
        return {name: split for name, split in self.splits.items() if split and split.parts > 1}

    def below(self, path: str, names: Mapping[str, str]) -> "Plan":
        """Returns the plan of the module at a path, for a call of it alone.

        Args:
            path: of the module.
            names: of its parameters in the root, by their names in it.
        """
        own = {name: local for local, name in names.items()}
        return replace(
            self,
            styles=_below(path, self.styles),
            splits={local: self.splits[name] for local, name in names.items()},
            words=_below(path, self.words),
            specs={local: self.specs[name] for local, name in names.items()},
            units={
                unit: {local: own[name] for local, name in each.items()}
                for unit, each in _below(path, self.units).items()
                if unit
            },
        )

    @property
    def root(self) -> Layouts | None:
        """The style of the module itself."""
        return self.styles.get(ROOT)

    @cached_property
    def leaves_shards(self) -> bool:
        """Tells whether a style leaves its module's output sharded, by use_local_output=False."""
        return any(
            change is not None and isinstance(change[1], Shard)
            for layouts in self.styles.values()
            if not getattr(layouts.style, "use_local_output", True)
            for change in layouts.outputs or ()
        )

    def splits_below(self, path: str) -> bool:
        """Returns whether the modules below use a replicated input differently on each rank."""
        below = [
            layouts.style
            for name, layouts in self.styles.items()
            if name != path and (path == ROOT or name.startswith(path + "."))
        ]
        replicated = any(
            isinstance(style, ColwiseParallel | RowwiseParallel)
            and isinstance(style.output_layouts[0], Replicate)
            for style in below
        )
        return any(isinstance(style, ColwiseParallel) for style in below) and not replicated


X = TypeVar("X")


def _below(path: str, entries: Mapping[str, X]) -> dict[str, X]:
    """Returns the entries of a module and of those below it, by their paths in it."""
    start = path + "."
    return {key[len(start) :]: each for key, each in entries.items() if f"{key}.".startswith(start)}


def make_plan(
    module: nn.Module,
    mesh: Mesh,
    styles: Style | Mapping[str, Style],
    axis: str,
    optional: Collection[str] = (),
    data: Data = _NO_DATA,
) -> Plan:
    """Resolves the module of each entry, and how each parameter is sharded.

    Args:
        module: the root.
        mesh: the mesh.
        styles: the plan.
        axis: the axis of its layouts.
        optional: keys that may match nothing: those of plans that came with the module.
        data: the axes of rows.

    Raises:
        SpecError: names all entries that match nothing, or modules they cannot parallelize; or all
            parameters that do not divide, or that modules share but shard differently.
    """
    entries = _Entries(module, optional)
    entries.resolve({ROOT: styles} if isinstance(styles, ParallelStyle | str) else styles)
    splits = _splits(module, entries, axis)
    parameters = dict(module.named_parameters())
    problems = {
        name: found
        for name, split in splits.items()
        if (found := _indivisible(parameters[name].shape, split, axis, mesh))
    }
    if problems:
        head = f"parallelize: these parameters cannot be sharded on the {mesh}:"
        lines = [f"{name}: {each}" for name, found in problems.items() for each in found]
        raise SpecError(listing(head, lines) + entries.without(problems))
    modules = {path: each for path, each in module.named_modules()}
    layouts = {path: layouts_of(style, modules[path]) for path, style in entries.styles.items()}
    return Plan(
        axis,
        MappingProxyType(layouts),
        MappingProxyType(splits),
        MappingProxyType(entries.words),
        data.shard({name: value.shape for name, value in parameters.items()}, splits, axis, mesh),
        tuple(entries.unused),
        data,
        {} if data.shards is None else _units(module),
    )


def _units(module: nn.Module) -> dict[str, dict[str, str]]:
    """Finds the layers: what lists of modules have that lie in no other, and who owns what.

    Elements that nothing calls, as the list of blocks in nanoGPT's ModuleDict, are no layers.
    """
    paths: list[str] = []
    elements: set[str] = set()
    for path, each in module.named_modules():
        if any(path.startswith(f"{unit}.") for unit in paths):
            continue
        if path in elements and type(each).forward is not nn.Module.forward:
            paths.append(path)
        elif isinstance(each, nn.ModuleList | nn.ModuleDict):
            elements |= {f"{path}.{name}" if path else name for name, _ in each.named_children()}
    names = {id(value): name for name, value in module.named_parameters()}
    users: dict[int, set[str]] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        owner = next((unit for unit in paths if name.startswith(f"{unit}.")), ROOT)
        users.setdefault(id(value), set()).add(owner)
    units = {
        path: {
            local: names[id(value)]
            for local, value in module.get_submodule(path).named_parameters()
            if users[id(value)] == {path}
        }
        for path in paths
    }
    return {path: own for path, own in units.items() if own}


def _indivisible(shape: Sequence[int], split: Split | None, axis: str, mesh: Mesh) -> list[str]:
    if split is None or split.parts == 1:
        return mismatches(spec_of_split(split, axis), tuple(shape), mesh.shape)
    size, ranks = shape[split.dim], mesh.shape[axis]
    pieces = split.parts * ranks
    if size % pieces == 0:
        return []
    return [
        f"dim {split.dim} has size {size}, whose {split.parts} parts do not divide over {axis!r} = "
        f"{ranks} ranks ({size} = {size // pieces}*{split.parts}*{ranks} + {size % pieces})"
    ]


class _Entries:
    """The entries of a plan, resolved to modules and parameters.

    Attributes:
        styles: the style of each module, by path.
        parameters: how parameters are sharded that the plan names, by name.
        words: what the plan says of both.
        unused: keys that match nothing, where that is no error.
    """

    def __init__(self, module: nn.Module, optional: Collection[str]) -> None:
        self._module, self._optional = module, optional
        self._paths = {id(target): path for path, target in module.named_modules()}
        self._keys: dict[str, str] = {}
        self.styles: dict[str, ParallelStyle] = {}
        self.parameters: dict[str, Split | None] = {}
        self.words: dict[str, Style] = {}
        self.unused: list[str] = []

    def resolve(self, plan: Mapping[str, Style]) -> None:
        """Resolves all entries.

        Raises:
            SpecError: names all that are wrong.
        """
        _check_entries(plan)
        problems = [each for key, style in plan.items() for each in self._resolve(key, style)]
        if problems:
            name = type(self._module).__name__
            raise SpecError(listing(f"parallelize: the plan does not match {name}:", problems))

    def _resolve(self, key: str, style: Style) -> Iterator[str]:
        targets = list(_matches(self._module, key))
        named = [] if targets or isinstance(style, ParallelStyle) else self._named(key)
        if not targets and not named:
            self.unused.append(key)
            if key not in self._optional:
                yield f"{key!r} matches no module{_hint(self._module, key)}"
        for name, value in named:
            self.words[name] = style
            self.parameters[name] = WORDS[str(style)].split(value.ndim)
        for target in targets:
            for part in _sharing(style, target):
                yield from self._give(key, style, part)

    def _give(self, key: str, style: Style, target: nn.Module) -> Iterator[str]:
        path = self._paths[id(target)]
        if self._keys.get(path, key) != key:
            yield f"{path!r} is matched by {self._keys[path]!r} and by {key!r}"
        found = _read(style)
        problems = [*_unsupported(found, path, target), *mistakes(layouts_of(found, target))]
        yield from (f"{key!r}: {problem}" for problem in problems)
        self.styles[path], self._keys[path], self.words[path] = found, key, style

    def without(self, names: Collection[str]) -> str:
        """Advises to leave out the keys by which these parameters would be sharded."""
        paths = [name.rpartition(".")[0] for name in names if name not in self.parameters]
        keys = dict.fromkeys(self._keys[path] for path in paths if path in self._keys)
        shown = ", ".join(map(repr, keys))
        return (
            f"\nFix: leave {shown} out of the plan, with what takes their results or gives them "
            "their inputs as shards: each rank then has all of it."
        ) * bool(keys)

    def _named(self, key: str) -> list[tuple[str, nn.Parameter]]:
        return [pair for pair in self._module.named_parameters() if is_matched(pair[0], key)]


def _check_entries(plan: object) -> None:
    if not isinstance(plan, Mapping):
        raise SpecError(
            "parallelize takes a plan: a style, or a dict from module names to styles, not a "
            f"{type(plan).__name__}."
        )
    classes = [key for key, x in plan.items() if isinstance(x, type) and x in KNOWN]
    if classes:
        made = ", ".join(f"{key!r}: {plan[key].__name__}()" for key in classes)
        raise SpecError(
            "parallelize: a plan has styles by module name, and here classes of them, which are "
            f"called to make one.\nFix: {{{made}}} in the plan."
        )
    wrong = [
        f"{show(key)}: {show(style) if isinstance(style, str) else type(style).__name__}"
        for key, style in plan.items()
        if not (isinstance(key, str) and is_style(style))
    ]
    if wrong:
        head = (
            "parallelize: a plan has styles by module name, which are "
            f"{', '.join(each.__name__ for each in KNOWN)}, or words of transformers, which are "
            f"{', '.join(map(repr, WORDS))}:"
        )
        raise SpecError(listing(head, wrong))


def is_style(style: object) -> bool:
    """Returns whether it is a style, or a word for one."""
    return style in WORDS if isinstance(style, str) else isinstance(style, KNOWN)


def _matches(module: nn.Module, key: str) -> Iterator[nn.Module]:
    """Yields the modules that a key matches; it has the wildcards of `match_specs`."""
    if key == ROOT:
        yield module
        return
    for path, target in module.named_modules(remove_duplicate=False):
        if path and is_matched(path, key):
            yield target


def _read(style: Style) -> ParallelStyle:
    return style if isinstance(style, ParallelStyle) else WORDS[style].style


def _sharing(style: Style, module: nn.Module) -> Iterator[nn.Module]:
    """Yields what has the style of a module: of a Linear in a wrapper of peft, that and an update.

    One of the two matrices of an update is sharded as the Linear, and the other is whole. A module
    that is trained anew stands beside the one that it was.
    """
    found, wrapper = _read(style), cast(Any, module)
    known = None if kind_of(module) else isinstance(found, ColwiseParallel | RowwiseParallel)
    if known and isinstance(getattr(module, "base_layer", None), nn.Module):
        name = "lora_B" if isinstance(found, ColwiseParallel) else "lora_A"
        yield from (wrapper.base_layer, *getattr(module, name, nn.ModuleDict()).values())
    elif known and isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict):
        yield from (wrapper.original_module, *wrapper.modules_to_save.values())
    else:
        yield module


def is_matched(path: str, key: str) -> bool:
    """Returns whether a key of a plan matches the path of a module or parameter."""
    return is_match(path.split("."), key.split("."))


def _hint(module: nn.Module, key: str) -> str:
    """Lists the names of modules at the level where a key stops matching."""
    tokens = key.partition("**")[0].split(".")
    for length in range(len(tokens) - 1, -1, -1):
        path = ".".join(tokens[:length])
        for parent in _matches(module, path):
            names = ", ".join(repr(name) for name, _ in parent.named_children()) or "none"
            return f"; the modules in {path or type(module).__name__!r} are {names}"
    return ""


def _unsupported(style: ParallelStyle, path: str, module: nn.Module) -> Iterator[str]:
    """Yields reasons for which a style cannot parallelize a module."""
    name, kind = type(style).__name__, type(module).__name__
    where = f"{path!r} is" if path else "the module is"
    if isinstance(style, LocalAttributes):
        missing = [each for each in style.names if type(getattr(module, each, None)) is not int]
        if missing:
            yield f"{where} a {kind} without an integer {', '.join(map(repr, missing))}"
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    if kind_of(module) is None:
        yield f"{name} shards nn.Linear, Conv1D and nn.Embedding, and {where} a {kind}"
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if isinstance(module, nn.Embedding) and getattr(module, option):
            yield f"{where} an Embedding with {option}, which cannot be sharded"


def _own_splits(style: ParallelStyle | None, module: nn.Module) -> Mapping[str, Split]:
    """Returns how a style shards the parameters of a module."""
    kind = kind_of(module)
    if kind is None:
        return {}
    if isinstance(style, ColwiseParallel):
        parts = getattr(style, "parts", 1)
        return {"weight": Split(kind.outputs, parts), "bias": Split(0, parts)}
    return {"weight": Split(kind.inputs)} if isinstance(style, RowwiseParallel) else {}


def _splits(module: nn.Module, entries: _Entries, axis: str) -> dict[str, Split | None]:
    """Returns how each parameter is sharded.

    Raises:
        SpecError: names all that modules share and would shard differently.
    """
    names = {id(value): name for name, value in module.named_parameters()}
    splits: dict[str, Split | None] = dict(entries.parameters)
    owners: dict[str, str] = {}
    problems: dict[str, str] = {}
    modules = dict(module.named_modules())
    for path in sorted(modules, key=lambda path: path not in entries.styles):  # styles first
        target = modules[path]
        own = _own_splits(entries.styles.get(path), target)
        for local, value in target._parameters.items():
            if value is None or names[id(value)] in entries.parameters:
                continue
            name, split = names[id(value)], own.get(local)
            owner = owners.setdefault(name, path)
            if path not in entries.styles and kind_of(target) is None and name in splits:
                continue  # it may hold the parameter without a use of it, and its use is checked
            if splits.setdefault(name, split) != split:
                users = {path: split, owner: splits[name]}
                one, other = (repr(spec_of_split(each, axis)) for each in users.values())
                shown = f"{path!r} needs it by {one}, and {owner!r} by {other}"
                problems[f"{name}: is shared; {shown}"] = _alike(modules, users)
    if problems:
        head = "parallelize: modules that share a parameter must shard it alike:"
        fixes = dict.fromkeys(filter(None, problems.values()))
        raise SpecError("\n".join([listing(head, [*problems]), *fixes]))
    return splits


def _alike(modules: Mapping[str, nn.Module], users: Mapping[str, Split | None]) -> str:
    """Advises the style by which one of two modules shards their weight as the other does.

    One without a style, or else an Embedding, gets it.
    """
    for path in sorted(users, key=lambda path: users[path] is not None):
        (wanted,) = (split for other, split in users.items() if other != path)
        is_free = users[path] is None or isinstance(modules[path], nn.Embedding)
        for word in (*_OF_EMBEDDINGS, *_OF_LINEARS) if is_free else ():
            is_own = (word in _OF_EMBEDDINGS) == isinstance(modules[path], nn.Embedding)
            if is_own and _own_splits(WORDS[word].style, modules[path]).get("weight") == wanted:
                return f"Fix: {{{path!r}: {word!r}}} in the plan, which shards it alike."
    return ""


_OF_EMBEDDINGS: Final = ("embedding_rowwise", "embedding_colwise")
_OF_LINEARS: Final = ("colwise_gather_output", "rowwise_split_input")
