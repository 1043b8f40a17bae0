"""The boundary of a shard_mapped function: checking values against specs, and crossing it.

Every way of running a call goes through `run_body`; what differs between meshes is only how global
values are cut into local ones and put together again.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Number
from typing import Any

import optree
import torch
from torch import Tensor

from shardmap_torch.backend import Backend, Scope, enter_scope
from shardmap_torch.errors import ShardTypeError, SpecError, listing
from shardmap_torch.mesh import Mesh
from shardmap_torch.rule import Collective, bind
from shardmap_torch.spec import P, misfits
from shardmap_torch.tree import NAMESPACE, Misfit, Placed, Tree, flatten, spread
from shardmap_torch.types import I, Partial, R, V

Spec = P | None
"""How one leaf crosses; None passes any Python value as it is."""


@dataclass(frozen=True)
class Call:
    """One call of a shard_mapped function, its arguments checked.

    Attributes:
        function: the body.
        name: what errors call it.
        mesh: the mesh of this call.
        bound: all axes bound in the body, those of outer bodies included.
        mapped: the axes that this call binds.
        inputs: every argument leaf with its path and spec, in flattening order.
        structure: puts leaves back into `(args, kwargs)`.
        out_specs: prefix tree of the specs of the result.
    """

    function: Callable[..., Tree]
    name: str
    mesh: Mesh
    bound: frozenset[str]
    mapped: tuple[str, ...]
    inputs: tuple[Placed[Spec], ...]
    structure: optree.PyTreeSpec
    out_specs: Tree

    @property
    def crossing(self) -> list[int]:
        """Positions of the leaves that are tensors and cross by a spec."""
        return [i for i, leaf in enumerate(self.inputs) if crosses(leaf)]


@dataclass(frozen=True)
class Result:
    """What one run of a body returned: leaves with their specs, and their structure."""

    outputs: tuple[Placed[Spec], ...]
    structure: optree.PyTreeSpec

    def rebuild(self, leaves: Sequence[Any]) -> Tree:
        """Puts other leaves in the places of these."""
        return optree.tree_unflatten(self.structure, leaves)


def crosses(leaf: Placed[Spec]) -> bool:
    """Whether the leaf is a tensor that is cut by a spec, rather than static."""
    return leaf.spec is not None and isinstance(leaf.value, Tensor)


def spec_of(leaf: Placed[Spec]) -> P:
    """The spec of a leaf that crosses."""
    assert leaf.spec is not None
    return leaf.spec


def is_spec(value: Any) -> bool:
    """Whether `value` is a leaf of a spec tree."""
    return value is None or isinstance(value, P)


# ------------------------------------------------------------------------------ arguments


def place_arguments(
    function: Callable[..., Tree],
    signature: inspect.Signature | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    in_specs: Tree,
) -> tuple[list[Placed[Spec] | Misfit], optree.PyTreeSpec]:
    """Gives every argument leaf its path, by the caller's names, and its spec."""
    found: list[Placed[Spec] | Misfit] = []
    names = _positional_names(signature, len(args))
    if isinstance(in_specs, tuple) and len(in_specs) < len(args) and not kwargs:
        found.append(Misfit("in_specs", f"has {len(in_specs)} specs for {len(args)} arguments"))
        return found, flatten((args, dict(kwargs)))[1]
    for position, (name, value) in enumerate(zip(names, args, strict=True)):
        found += _place(in_specs, position, name, value)
    positions = {name: i for i, name in enumerate(signature.parameters)} if signature else {}
    for name in sorted(kwargs):
        found += _place(in_specs, positions.get(name), name, kwargs[name])
    found += _unused(in_specs, signature, len(args), kwargs)
    return found, flatten((args, dict(kwargs)))[1]


def _place(
    in_specs: Tree, position: int | None, name: str, value: Any
) -> Iterator[Placed[Spec] | Misfit]:
    if is_spec(in_specs):
        yield from spread(in_specs, value, name, is_spec)
    elif isinstance(in_specs, dict) and name in in_specs:
        yield from spread(in_specs[name], value, name, is_spec)
    elif isinstance(in_specs, tuple) and position is not None and position < len(in_specs):
        yield from spread(in_specs[position], value, name, is_spec)
    else:
        yield Misfit(name, f"in_specs={in_specs!r} has no spec for this argument")


def _positional_names(signature: inspect.Signature | None, count: int) -> list[str]:
    names: list[str] = []
    for parameter in signature.parameters.values() if signature else ():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(count - len(names))]
        elif parameter.kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            names.append(parameter.name)
    names += [f"argument {i}" for i in range(len(names), count)]
    return names[:count]


def _unused(
    in_specs: Tree,
    signature: inspect.Signature | None,
    num_args: int,
    kwargs: Mapping[str, Any],
) -> list[Misfit]:
    """Specs of arguments that were not passed and have no default."""
    if not isinstance(in_specs, tuple) or signature is None:
        return []
    parameters = list(signature.parameters.values())[: len(in_specs)]
    missing = [
        p.name
        for p in parameters[num_args:]
        if p.name not in kwargs
        and p.default is inspect.Parameter.empty
        and p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    extra = len(in_specs) - max(len(parameters), num_args)
    found = [Misfit(name, "has a spec, but was not passed") for name in missing]
    if extra > 0 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        found.append(Misfit("in_specs", f"has {extra} more specs than there are arguments"))
    return found


def check_inputs(
    name: str,
    mesh: Mesh,
    mapped: Sequence[str],
    found: Sequence[Placed[Spec] | Misfit],
    infers: bool = False,
) -> tuple[Placed[Spec], ...]:
    """Requires that every leaf fits its spec; `infers` says that a checker types unnamed axes.

    Raises:
        SpecError: names every offender.
    """
    problems = [str(leaf) for leaf in found if isinstance(leaf, Misfit)]
    placed = tuple(leaf for leaf in found if isinstance(leaf, Placed))
    device = mesh.device
    for leaf in placed:
        problems += [f"{leaf.path}: {p}" for p in _leaf_problems(leaf, mesh, mapped)]
        if crosses(leaf):
            device = device if device is not None else leaf.value.device
            if leaf.value.device.type != device.type:
                problems.append(f"{leaf.path}: is on {leaf.value.device}, the mesh on {device}")
            if mesh.kind == "simulated" and type(leaf.value).__name__ == "DTensor":
                problems.append(f"{leaf.path}: is a DTensor; a simulated mesh takes plain tensors")
    if problems:
        raise SpecError(
            listing(f"{name}: the arguments do not fit in_specs on the {mesh}:", problems)
        )
    if not infers:
        _require_named(name, mapped, placed)
    return placed


def _leaf_problems(leaf: Placed[Spec], mesh: Mesh, mapped: Sequence[str]) -> list[str]:
    if leaf.spec is None:
        return []
    unknown = sorted(leaf.spec.named - set(mapped))
    if unknown:
        names = ", ".join(map(repr, unknown))
        return [f"{leaf.spec!r} names {names}, but the axes here are {', '.join(mapped)}"]
    if isinstance(leaf.value, Tensor):
        return misfits(leaf.spec, tuple(leaf.value.shape), mesh.shape)
    if isinstance(leaf.value, Number):
        cut = [f"is a number, which {leaf.spec!r} cannot cut"]
        return cut if leaf.spec.cuts or leaf.spec.partial else []
    kind = type(leaf.value).__name__
    return [f"is a {kind}, no tensor; mark static arguments with None in in_specs"]


def _require_named(name: str, mapped: Sequence[str], placed: Sequence[Placed[Spec]]) -> None:
    """Requires a type on every axis of what can receive a gradient.

    Whether its gradient has to be summed over an unmentioned axis depends on the body.
    """
    problems = []
    for leaf in placed:
        if leaf.spec is None or not can_receive_gradient(leaf.value):
            continue
        missing = sorted(set(mapped) - leaf.spec.named)
        if missing:
            axes = "{" + ", ".join(map(repr, missing)) + "}"
            problems.append(
                f"{leaf.path}: {leaf.spec!r} needs replicate={axes} or invariant={axes}"
            )
    if problems:
        head = (
            f"{name}: these inputs can receive a gradient, so their specs must name every axis. "
            "replicate= if the ranks use the value in different ways (gradients are summed over "
            "the axis), invariant= if all repeat one computation (they are equal already):"
        )
        raise SpecError(listing(head, problems))


def can_receive_gradient(value: Any) -> bool:
    """Whether a gradient can flow into `value` in this call, at any functorch level."""
    if not isinstance(value, Tensor) or not torch.is_grad_enabled():
        return False
    functorch = torch._C._functorch
    while True:
        if value.requires_grad:
            return True
        if not functorch.is_functorch_wrapped_tensor(value):
            return False
        value = functorch.get_unwrapped(value)


# ------------------------------------------------------------------------------- the body


def run_body(call: Call, backend: Backend, tensors: Sequence[Tensor]) -> Result:
    """Runs the body on local values: types them, calls the function, checks and types the result.

    Args:
        call: the checked call.
        backend: runs the collectives in it.
        tensors: the local values of the leaves that cross, in order.
    """
    values = [leaf.value for leaf in call.inputs]
    with enter_scope(Scope(backend, call.bound)):
        for position, local in zip(call.crossing, tensors, strict=True):
            casts = entry_casts(spec_of(call.inputs[position]))
            values[position] = apply(backend, casts, local)
        args, kwargs = optree.tree_unflatten(call.structure, values)
        out = call.function(*args, **kwargs)
        placed, structure = place_outputs(call, out)
        outputs = tuple(_leave(backend, leaf) for leaf in placed)
    return Result(outputs, structure)


def _leave(backend: Backend, leaf: Placed[Spec]) -> Placed[Spec]:
    if not crosses(leaf):
        return leaf
    return Placed(leaf.path, apply(backend, exit_casts(spec_of(leaf)), leaf.value), leaf.spec)


def apply(backend: Backend, collectives: Sequence[Collective], x: Tensor) -> Tensor:
    """Applies one collective after the other."""
    for collective in collectives:
        x = bind(backend, collective, x)
    return x


@lru_cache(maxsize=4096)
def entry_cuts(spec: P) -> tuple[Collective, ...]:
    """The conversions that cut a value which is whole on every rank."""
    return tuple(Collective("convert", I, V, axes, dim=dim) for dim, axes in spec.cuts)


@lru_cache(maxsize=4096)
def entry_casts(spec: P) -> tuple[Collective, ...]:
    """The conversions that type the axes which no dim mentions."""
    replicate, partial = tuple(sorted(spec.replicate)), tuple(sorted(spec.partial))
    casts = ((replicate, R), (partial, Partial))
    return tuple(Collective("convert", I, kind, axes) for axes, kind in casts if axes)


@lru_cache(maxsize=4096)
def exit_casts(spec: P) -> tuple[Collective, ...]:
    """The conversion that makes a replicate result invariant."""
    axes = tuple(sorted(spec.replicate))
    return (Collective("convert", R, I, axes),) if axes else ()


@lru_cache(maxsize=4096)
def exit_joins(spec: P) -> tuple[Collective, ...]:
    """The collectives that make a result whole on every rank."""
    joins = [Collective("all_gather", V, I, axes, dim=dim) for dim, axes in reversed(spec.cuts)]
    partial = tuple(sorted(spec.partial))
    if partial:
        joins.insert(0, Collective("all_reduce", Partial, I, partial))
    return tuple(joins)


def place_outputs(call: Call, out: Tree) -> tuple[list[Placed[Spec]], optree.PyTreeSpec]:
    """Gives every leaf of the result its spec.

    Raises:
        SpecError: names every offender.
    """
    found = list(spread(call.out_specs, out, "out", is_spec))
    problems = [str(leaf) for leaf in found if isinstance(leaf, Misfit)]
    placed = [leaf for leaf in found if isinstance(leaf, Placed)]
    for leaf in placed:
        problems += [f"{leaf.path}: {p}" for p in _output_problems(leaf, call.mapped)]
    if problems:
        raise SpecError(
            listing(f"{call.name}: the result does not fit out_specs on the {call.mesh}:", problems)
        )
    return placed, optree.tree_structure(out, namespace=NAMESPACE)


def _output_problems(leaf: Placed[Spec], mapped: Sequence[str]) -> list[str]:
    spec = leaf.spec
    if spec is None:
        return []
    unknown = sorted(spec.named - set(mapped))
    if unknown:
        names = ", ".join(map(repr, unknown))
        return [f"{spec!r} names {names}, but the axes here are {', '.join(mapped)}"]
    if isinstance(leaf.value, Tensor):
        ndim = leaf.value.ndim
        if len(spec.entries) > ndim:
            return [f"{spec!r} has {len(spec.entries)} entries, but the value has {ndim} dims"]
        return []
    if isinstance(leaf.value, Number) and not (spec.cuts or spec.partial):
        return []
    return [f"is a {type(leaf.value).__name__}, no tensor, which {spec!r} cannot place"]


class Untouched:
    """Sees whether a body wrote into its inputs, which views of a slice would carry outside."""

    def __init__(self, call: Call, tensors: Sequence[Tensor]) -> None:
        """Notes the versions of the tensors that cross, before the body runs."""
        self._name = call.name
        paths = [call.inputs[i].path for i in call.crossing]
        self._seen = [(p, x, _version(x)) for p, x in zip(paths, tensors, strict=True)]

    def check(self) -> None:
        """Compares the versions after the body.

        Raises:
            ShardTypeError: names every input that was written to.
        """
        written = [path for path, x, version in self._seen if _version(x) != version]
        if written:
            head = f"{self._name}: the body wrote into its inputs, which are read-only; clone them:"
            raise ShardTypeError(listing(head, written))


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version
