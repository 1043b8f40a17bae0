"""Modules as pure functions: `functional`, and modules bound to other tensors without a change."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import is_
from types import MethodType
from typing import Any, Final

from torch import Tensor, nn

from shardmap_torch.core.source_location import Site
from shardmap_torch.errors import SpecError, listing
from shardmap_torch.parallel.rebound import Rebinding

# `torch.func.functional_call` puts the tensors into the module while it runs, where threads (the
# ranks of a simulated mesh) would overwrite each other's. A copy costs some microseconds a module,
# needs no restoring after an exception, and shows afterwards if the forward has set attributes.

Adapt = Callable[[str, nn.Module], None]
"""Function that changes the copy of the module at a path."""

_OWN: Final = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

_HOOKS: Final = (
    *("_forward_hooks", "_forward_pre_hooks"),
    *("_backward_hooks", "_backward_pre_hooks"),
)


def leave_alone(path: str, copy: nn.Module) -> None:
    """Changes nothing."""


_RECOMPUTED: Final = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes that torch's recurrent modules derive from their parameters in each forward."""


class BoundModule:
    """A copy of a module, and of all modules below it, whose parameters are other tensors.

    Attributes:
        root: the copy of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor] | None = None,
        adapt: Adapt = leave_alone,
    ) -> None:
        """Copies the tree of modules.

        Args:
            module: the module to copy.
            parameters: by the names of `named_parameters`; a shared one under its first name.
            buffers: by the names of `named_buffers`; None keeps the module's own.
            adapt: called with each copy once the modules below it are copied.
        """
        self._modules: dict[int, str] = {}
        self._tensors: dict[int, Tensor] = {}
        for path, each in module.named_modules():  # once: such walks are much of a short call
            self._modules[id(each)] = path
            start = f"{path}." if path else ""
            self._exchange(start, each._parameters, parameters)
            if buffers is not None:
                self._exchange(start, each._buffers, buffers)
        self._adapt = adapt
        self._copies: dict[int, nn.Module] = {}
        self._rebind = Rebinding(self._counterpart)
        self._written: list[tuple[str, type, Mapping[str, Any], Mapping[str, Any]]] = []
        self.root = self._copy(module)

    def _exchange(
        self, start: str, own: Mapping[str, Tensor | None], others: Mapping[str, Tensor]
    ) -> None:
        for name, x in own.items():
            if x is not None and id(x) not in self._tensors:  # a shared one is under its first name
                self._tensors[id(x)] = others[start + name]

    def paths(self) -> dict[int, str]:
        """Returns the path of each copy of a module, by its identity."""
        return {id(copy): self._modules[own] for own, copy in self._copies.items()}

    def check_unwritten(self) -> None:
        """Requires that the forward has not set attributes, which would be lost.

        Raises:
            SpecError: names every attribute that was set.
        """
        names = [
            (f"{path}.{name}" if path else name) + _place_of(kind, name)
            for path, kind, now, before in self._written
            if len(now) != len(before) or not all(map(is_, now.values(), before.values()))
            for name in _changed(now, before)
            if name not in _RECOMPUTED
        ]
        if names:
            head = "The forward sets attributes of the module, and here it runs on a copy of it:"
            raise SpecError(
                listing(head, sorted(names))
                + "\nFix: set them before the module is called, or return the values."
            )

    def _copy(self, module: nn.Module) -> nn.Module:
        known = self._copies.get(id(module))
        if known is not None:
            return known
        copy = self._copies[id(module)] = object.__new__(type(module))
        state = vars(copy)
        state.update(vars(module))
        for table in ("_parameters", "_buffers"):
            state[table] = {k: self._tensors.get(id(x), x) for k, x in state[table].items()}
        state["_modules"] = {
            name: child if child is None else self._copy(child)
            for name, child in module._modules.items()
        }
        for name in vars(module).keys() - _OWN | {hooks for hooks in _HOOKS if state[hooks]}:
            state[name] = self._rebind(state[name])
        if state.get("forward") == MethodType(type(copy).forward, copy):
            del state["forward"]  # a cycle would keep the tensors
        path = self._modules[id(module)]
        self._adapt(path, copy)
        kind = type(module)
        self._written += [(path, kind, each, dict(each)) for each in (state, copy._buffers)]
        return copy

    def _counterpart(self, item: Any) -> Any:
        if isinstance(item, nn.Module) and id(item) in self._modules:
            return self._copy(item)
        return self._tensors.get(id(item), item)


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[str]:
    missing = object()
    for name in now.keys() | before.keys():
        if now.get(name, missing) is not before.get(name, missing):
            yield name


Params = dict[str, Tensor]


def functional(module: nn.Module) -> tuple[Params, Callable[..., Any]]:
    """Splits a module into its parameters and a pure function of them.

    `apply(params, *args, **kwargs)` computes what `module(*args, **kwargs)` would compute if its
    parameters were `params`. It may be called in the body of a `shard_map`, where `params` are this
    rank's shards, under `torch.func` transforms, and on several threads at once: it runs a shallow
    copy of the module, so the module itself neither changes nor keeps anything.

    Args:
        module: any module. Buffers are constants of the function; `train()` and `eval()` on the
            module decide what later calls do.

    Returns:
        `params`, by the names of `named_parameters`, detached and sharing memory with the module's
        (a shared parameter stands there once), and `apply`.

    Raises:
        SpecError: not a module; or, in a call of `apply`, names that are missing or unknown, a
            forward that sets attributes of the module, or one that writes into its buffers (as
            BatchNorm in training).

    Source: `torch.func.functional_call`; `haiku.transform`.

    Example:
        >>> import torch
        >>> from shardmap_torch import functional
        >>> params, apply = functional(torch.nn.Linear(2, 1, bias=False))
        >>> loss = lambda params, x: apply(params, x).sum()
        >>> torch.func.grad(loss)(params, torch.tensor([[3.0, 4.0]]))
        {'weight': tensor([[3., 4.]])}
    """
    if not isinstance(module, nn.Module):
        raise SpecError(f"functional takes a torch.nn.Module, not a {type(module).__name__}.")
    params = {name: value.detach() for name, value in module.named_parameters()}
    # A partial, not a closure: the checker looks through it at the module and its code.
    return params, partial(_apply, module)


def _apply(module: nn.Module, params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
    _check_names(module, params)
    bound = BoundModule(module, params)
    versions = [(name, x, x._version) for name, x in module.named_buffers()]
    out = bound.root(*args, **kwargs)
    bound.check_unwritten()
    written = [name for name, x, version in versions if x._version != version]
    if written:
        head = f"{type(module).__name__}: the forward wrote into its buffers, which are constants:"
        raise SpecError(listing(head, written) + "\nFix: module.eval(), or a layer without them.")
    return out


def _check_names(module: nn.Module, params: Mapping[str, Tensor]) -> None:
    if not isinstance(params, Mapping):
        raise SpecError(
            f"{type(module).__name__}: apply takes the parameters first, by name, not "
            f"a {type(params).__name__}."
        )
    names = dict(module.named_parameters())
    problems = [f"{name}: is missing" for name in names if name not in params]
    problems += [f"{name}: is not a parameter of it" for name in params if name not in names]
    if problems:
        raise SpecError(listing(f"{type(module).__name__}: params do not match:", problems))


def _place_of(kind: type, name: str) -> str:
    """Returns where a class sets an attribute last, as ` at FILE:LINE: SOURCE`, if its code shows.

    The forward comes after `__init__`, and an attribute is mostly set in one of the two.
    """
    try:
        lines, start = inspect.getsourcelines(kind)
        file = inspect.getsourcefile(kind) or ""
    except (OSError, TypeError):
        return ""
    sets = re.compile(rf"\bself\.{re.escape(name)}\b[^=]*[^=!<>]=(?!=)")
    found = [at for at, line in enumerate(lines, start) if sets.search(line)]
    return f" at {Site(file, found[-1])}" if found else ""
