"""Plan: the style of each module below a root, and the spec of each parameter."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Final

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from shardmap_torch.errors import SpecError, listing, show
from shardmap_torch.mesh import Mesh
from shardmap_torch.parallel.styles import Layouts, layouts_of, mistakes
from shardmap_torch.spec import P, mismatches

ROOT: Final = ""
"""The key of a plan that stands for the module itself."""

_STYLES: Final = (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    PrepareModuleInputOutput,
)

_SPECS: Final[Mapping[tuple[type, type], Mapping[str, Callable[[str], P]]]] = {
    (ColwiseParallel, nn.Linear): {"weight": P, "bias": P},
    (ColwiseParallel, nn.Embedding): {"weight": lambda axis: P(None, axis)},
    (RowwiseParallel, nn.Linear): {"weight": lambda axis: P(None, axis), "bias": lambda axis: P()},
    (RowwiseParallel, nn.Embedding): {"weight": P},
}
"""Specs of the parameters that a style shards; all others are replicated."""


@dataclass(frozen=True)
class Plan:
    """The resolved plan of one module.

    Attributes:
        axis: the mesh axis of its placements.
        styles: styles and their layouts, by the path of the module.
        specs: specs of the parameters, by name; a shared one is under its first name.
    """

    axis: str
    styles: Mapping[str, Layouts]
    specs: Mapping[str, P]

    @property
    def root(self) -> Layouts | None:
        """The style of the module itself."""
        return self.styles.get(ROOT)

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


def make_plan(
    module: nn.Module,
    mesh: Mesh,
    styles: ParallelStyle | Mapping[str, ParallelStyle],
    axis: str,
) -> Plan:
    """Resolves the module of each entry, and the spec of each parameter.

    Raises:
        SpecError: names all entries that match nothing, or modules they cannot parallelize; or all
            parameters that do not divide, or that modules share but shard differently.
    """
    resolved = _resolve(module, styles)
    specs = _parameter_specs(module, resolved, axis)
    problems = [
        f"{name}: {problem}"
        for name, value in module.named_parameters()
        for problem in mismatches(specs[name], tuple(value.shape), mesh.shape)
    ]
    if problems:
        head = f"parallelize: these parameters cannot be sharded on the {mesh}:"
        raise SpecError(listing(head, problems))
    modules = {path: each for path, each in module.named_modules()}
    layouts = {path: layouts_of(style, modules[path]) for path, style in resolved.items()}
    return Plan(axis, MappingProxyType(layouts), MappingProxyType(specs))


def _resolve(
    module: nn.Module, styles: ParallelStyle | Mapping[str, ParallelStyle]
) -> dict[str, ParallelStyle]:
    if isinstance(styles, ParallelStyle):
        styles = {ROOT: styles}
    _check_entries(styles)
    resolved: dict[str, ParallelStyle] = {}
    keys: dict[str, str] = {}
    problems: list[str] = []
    paths = {id(target): path for path, target in module.named_modules()}
    for key, style in styles.items():
        matched = list(_matches(module, key))
        if not matched:
            problems.append(f"{key!r} matches no module{_hint(module, key)}")
        for target in matched:
            path = paths[id(target)]
            if keys.get(path, key) != key:
                problems.append(f"{path!r} is matched by {keys[path]!r} and by {key!r}")
            found = [*_unsupported(style, path, target), *mistakes(layouts_of(style, target))]
            problems += [f"{key!r}: {problem}" for problem in found]
            resolved[path], keys[path] = style, key
    if problems:
        raise SpecError(
            listing(f"parallelize: the plan does not match {type(module).__name__}:", problems)
        )
    return resolved


def _check_entries(styles: object) -> None:
    if not isinstance(styles, Mapping):
        raise SpecError(
            "parallelize takes a plan: a style, or a dict from module names to styles, not a "
            f"{type(styles).__name__}."
        )
    wrong = [
        f"{show(key)}: {type(style).__module__}.{type(style).__name__}"
        for key, style in styles.items()
        if not (isinstance(key, str) and isinstance(style, _STYLES))
    ]
    if wrong:
        names = ", ".join(each.__name__ for each in _STYLES)
        head = f"parallelize: a plan has styles by module name, which are {names}:"
        raise SpecError(listing(head, wrong))


def _matches(module: nn.Module, key: str) -> Iterator[nn.Module]:
    """Yields the modules that a key matches; each part of it may have wildcards, as in torch."""
    if key == ROOT:
        yield module
        return
    tokens = key.split(".")
    for path, target in module.named_modules(remove_duplicate=False):
        parts = path.split(".")
        if path and len(parts) == len(tokens) and all(map(fnmatchcase, parts, tokens)):
            yield target


def _hint(module: nn.Module, key: str) -> str:
    """Lists the names of modules at the level where a key stops matching."""
    tokens = key.split(".")
    for length in range(len(tokens) - 1, -1, -1):
        path = ".".join(tokens[:length])
        for parent in _matches(module, path):
            names = ", ".join(repr(name) for name, _ in parent.named_children()) or "none"
            return f"; the modules in {path or type(module).__name__!r} are {names}"
    return ""


def _unsupported(style: ParallelStyle, path: str, module: nn.Module) -> Iterator[str]:
    """Yields reasons for which a style cannot parallelize a module."""
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    name, kind = type(style).__name__, type(module).__name__
    where = f"{path!r} is" if path else "the module is"
    if _sharding(style, module) is None:
        yield f"{name} shards nn.Linear and nn.Embedding, and {where} a {kind}"
    elif isinstance(style, RowwiseParallel) and type(module).forward not in _REWRITTEN:
        yield (
            f"{name} adds up what a Linear or an Embedding computes itself, and {where} a {kind} "
            "with its own forward"
        )
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if isinstance(module, nn.Embedding) and getattr(module, option):
            yield f"{where} an Embedding with {option}, which cannot be sharded"


_REWRITTEN: Final = (nn.Linear.forward, nn.Embedding.forward)


def _sharding(style: ParallelStyle, module: nn.Module) -> Mapping[str, Callable[[str], P]] | None:
    for (style_type, module_type), specs in _SPECS.items():
        if isinstance(style, style_type) and isinstance(module, module_type):
            return specs
    return None


def _parameter_specs(
    module: nn.Module, styles: Mapping[str, ParallelStyle], axis: str
) -> dict[str, P]:
    names = {id(value): name for name, value in module.named_parameters()}
    specs: dict[str, P] = {}
    problems: dict[str, None] = {}
    modules = dict(module.named_modules(remove_duplicate=False))
    for path in sorted(modules, key=lambda path: path not in styles):  # those with a style first
        style, target = styles.get(path), modules[path]
        sharding: Mapping[str, Any] = (style and _sharding(style, target)) or {}
        for own, value in target._parameters.items():
            if value is None:
                continue
            name = names[id(value)]
            spec = sharding[own](axis) if own in sharding else P()
            if style is not None and specs.setdefault(name, spec) != spec:
                problems[
                    f"{name}: is shared; {path!r} needs it by {spec!r}, and another module by "
                    f"{specs[name]!r}"
                ] = None
            specs.setdefault(name, spec)
    if problems:
        raise SpecError(
            listing("parallelize: modules that share a parameter must shard it alike:", [*problems])
        )
    return specs
