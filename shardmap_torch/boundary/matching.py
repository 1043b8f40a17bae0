"""Matches the leaves of arguments and results with their specs, and reports every mismatch."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from numbers import Number
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from shardmap_torch.boundary.casts import entry_casts, exit_casts
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.caching import lazy
from shardmap_torch.core.dtensors import dtensor_class, is_dtensor
from shardmap_torch.core.functorch import base_of, can_receive_gradient
from shardmap_torch.core.torch_private.engine import (
    FakeTensor,
    are_transforms_active,
    dispatch_mode_stack,
    functorch,
)
from shardmap_torch.core.tree import NAMESPACE, Mismatch, Placed, Tree, broadcast_prefix
from shardmap_torch.errors import SpecError, counted, listing, show
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P, expanded, longer, mismatches

Spec = P | None
"""The spec of one leaf; None passes any Python value as it is."""


def crosses(leaf: Placed[Spec]) -> bool:
    """Returns whether the leaf is a tensor with a spec, rather than static."""
    return leaf.spec is not None and isinstance(leaf.value, Tensor)


def spec_of(leaf: Placed[Spec]) -> P:
    """Returns the spec of a leaf that crosses."""
    assert leaf.spec is not None
    return leaf.spec


def is_spec(value: Any) -> bool:
    """Returns whether `value` is a leaf of a spec tree."""
    return value is None or isinstance(value, P)


@dataclass(frozen=True, eq=False)
class Match:
    """The leaves of a tree with their specs; one object for all calls of one signature.

    Attributes:
        paths: the path of each leaf, in the caller's names.
        specs: the spec of each leaf; None for static ones.
        crossing: positions of the leaves that are tensors and have a spec.
        static: positions of those that are no tensors.
        resized_from: one object for all that differ in sizes only; None where none is known.
        crossings: caches of runtimes, by mesh.
    """

    paths: tuple[str, ...]
    specs: tuple[Spec, ...]
    crossing: tuple[int, ...]
    static: tuple[int, ...] = ()
    resized_from: "Match | None" = field(default=None, repr=False)
    crossings: dict[int, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(placed: Sequence[Placed[Spec]]) -> "Match":
        """Makes one from placed leaves, without their values."""
        return Match(
            tuple(leaf.path for leaf in placed),
            tuple(leaf.spec for leaf in placed),
            tuple(position for position, leaf in enumerate(placed) if crosses(leaf)),
            tuple(i for i, leaf in enumerate(placed) if not isinstance(leaf.value, Tensor)),
        )

    def resized(self, leaves: Sequence[Any], mesh: Mesh) -> "Match | None":
        """Returns the match of leaves that differ in sizes only; None where a spec refuses one."""
        ranks = mesh.shape
        if any([mismatches(self.spec(at), leaves[at].shape, ranks) for at in self.crossing]):
            return None
        return Match(self.paths, self.specs, self.crossing, self.static, self)

    def spec(self, position: int) -> P:
        """Returns the spec of a leaf that crosses."""
        spec = self.specs[position]
        assert spec is not None
        return spec

    @lazy
    def entries(self) -> "tuple[tuple[int, tuple[Collective, ...]], ...]":
        """The positions and casts of the leaves that have some, if these are arguments."""
        casts = ((position, entry_casts(self.spec(position))) for position in self.crossing)
        return tuple(each for each in casts if each[1])

    @lazy
    def exits(self) -> "tuple[tuple[int, tuple[Collective, ...]], ...]":
        """The positions and casts of the leaves that have some, if these are results."""
        casts = ((position, exit_casts(self.spec(position))) for position in self.crossing)
        return tuple(each for each in casts if each[1])

    def place(self, leaves: Sequence[Any]) -> tuple[Placed[Spec], ...]:
        """Gives other leaves of the same signature their paths and specs."""
        return tuple(map(Placed, self.paths, leaves, self.specs))


def place_arguments(
    signature: inspect.Signature | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    in_specs: Tree,
) -> list[Placed[Spec] | Mismatch]:
    """Finds the path, in the caller's names, and the spec of every argument leaf."""
    leaves: list[Placed[Spec] | Mismatch] = []
    names = _positional_names(signature, len(args))
    if isinstance(in_specs, tuple) and len(in_specs) < len(args) and not kwargs:
        have = counted(len(in_specs), "spec", "specs")
        passed = counted(len(args), "argument", "arguments")
        leaves.append(Mismatch("in_specs", f"has {have} for {passed}"))
        return leaves
    for position, (name, value) in enumerate(zip(names, args, strict=True)):
        leaves += _place(in_specs, position, name, value)
    positions = {name: i for i, name in enumerate(signature.parameters)} if signature else {}
    for name in sorted(kwargs):
        leaves += _place(in_specs, positions.get(name), name, kwargs[name])
    leaves += _unused(in_specs, signature, len(args), kwargs)
    return leaves


def _place(
    in_specs: Tree, position: int | None, name: str, value: Any
) -> Iterator[Placed[Spec] | Mismatch]:
    if is_spec(in_specs):
        yield from broadcast_prefix(in_specs, value, name, is_spec)
    elif isinstance(in_specs, dict) and name in in_specs:
        yield from broadcast_prefix(in_specs[name], value, name, is_spec)
    elif isinstance(in_specs, tuple) and position is not None and position < len(in_specs):
        yield from broadcast_prefix(in_specs[position], value, name, is_spec)
    else:
        yield Mismatch(name, f"in_specs={show(in_specs)} has no spec for this argument")


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
) -> list[Mismatch]:
    """Reports specs of arguments that were not passed and have no default."""
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
    problems = [Mismatch(name, "has a spec, but was not passed") for name in missing]
    if extra > 0 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        more = counted(extra, "spec", "specs")
        problems.append(Mismatch("in_specs", f"has {more} more than there are arguments"))
    return problems


def input_signature(leaf: Any) -> Any:
    """Returns the properties of a leaf that `check_inputs` and the checker depend on."""
    if not isinstance(leaf, Tensor):
        return type(leaf)
    try:
        return leaf.shape, leaf.dtype, leaf.layout, leaf.device, can_receive_gradient(leaf)
    except RuntimeError:  # a nested tensor has no shape; `check_inputs` refuses it
        return type(leaf), leaf.layout


def kinds_of(leaves: Sequence[Any], runs: bool = True) -> tuple[Any, ...] | None:
    """Returns what `check_inputs` depends on beside sizes; None where it looks more closely.

    That is at fake tensors too, unless nothing runs.
    """
    if torch.compiler.is_dynamo_compiling() or are_transforms_active():
        return None
    kinds: list[Any] = []
    tracked, known = torch.is_grad_enabled(), [Tensor, Parameter, dtensor_class()]
    known += [] if runs else [FakeTensor]
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            kinds.append(type(leaf))
        elif type(leaf) not in known or leaf.is_nested:
            return None
        else:
            grad = tracked and leaf.requires_grad
            kinds.append((type(leaf), leaf.ndim, leaf.dtype, leaf.layout, leaf.device, grad))
    return tuple(kinds)


def check_inputs(
    name: str,
    mesh: Mesh,
    mapped: Sequence[str],
    leaves: Sequence[Placed[Spec] | Mismatch],
    infers: bool,
    runs: bool = True,
) -> tuple[Placed[Spec], ...]:
    """Requires that every leaf matches its spec.

    With `infers` a checker types unnamed axes; without `runs` shapes are enough.

    Raises:
        SpecError: names every offender.
    """
    problems = [str(leaf) for leaf in leaves if isinstance(leaf, Mismatch)]
    placed = tuple(in_finest(mesh, leaf) for leaf in leaves if isinstance(leaf, Placed))
    device = mesh.device
    for leaf in placed:
        problems += [f"{leaf.path}: {p}" for p in _leaf_problems(leaf, mesh, mapped)]
        if crosses(leaf):
            if runs and _is_stray_fake(leaf.value):
                problems.append(f"{leaf.path}: {_STRAY}")
            device = device if device is not None else leaf.value.device
            if leaf.value.device.type != device.type:
                problems.append(f"{leaf.path}: is on {leaf.value.device}, the mesh on {device}")
            if mesh.device_mesh is None and is_dtensor(leaf.value):
                problems.append(dtensor_problem(mesh, leaf.path))
    reject_inputs(name, mesh, problems)
    if not infers:
        _require_named(name, mapped, placed)
    return placed


def dtensor_problem(mesh: Mesh, path: str) -> str:
    """Says of an argument that a mesh without processes takes no DTensor."""
    return f"{path}: is a DTensor; a {mesh.kind} mesh takes plain tensors"


def reject_inputs(name: str, mesh: Mesh, problems: Sequence[str]) -> None:
    """Refuses arguments, if there are problems with some.

    Raises:
        SpecError: names every offender.
    """
    if problems:
        head = f"{name}: the arguments do not match in_specs on the {mesh}:"
        fix = _UNEVEN if all("does not divide" in problem for problem in problems) else ""
        raise SpecError(listing(head, problems) + fix)


_UNEVEN: Final = (
    "\nFix: drop the last rows of a batch (drop_last=True of a DataLoader), or pad them; of "
    "another dim leave the axis out of its spec, or take a mesh whose axis divides it."
)
"""Advice for sizes that no ranks can share evenly."""


def in_finest(mesh: Mesh, leaf: Placed[Spec]) -> Placed[Spec]:
    """Replaces axes of views in the spec of a leaf; see `make_mesh`."""
    if not mesh.aliases or leaf.spec is None:
        return leaf
    return Placed(leaf.path, leaf.value, expanded(leaf.spec, mesh.aliases))


def unknown_axes(spec: P, axes: Sequence[str]) -> list[str]:
    """Explains that a spec names others than these axes: one sentence, none where it does not."""
    unknown = ", ".join(map(repr, sorted(spec.named - set(axes))))
    here = ", ".join(axes)
    return [f"{spec!r} names {unknown}, but the axes here are {here}"] if unknown else []


def _leaf_problems(leaf: Placed[Spec], mesh: Mesh, mapped: Sequence[str]) -> list[str]:
    if leaf.spec is None:
        return []
    if unknown := unknown_axes(leaf.spec, mapped):
        return unknown
    if isinstance(leaf.value, Tensor):
        odd = unsupported(leaf.value)
        return odd or mismatches(leaf.spec, tuple(leaf.value.shape), mesh.shape)
    if isinstance(leaf.value, Number):
        problem = [f"is a number, which {leaf.spec!r} cannot shard"]
        return problem if leaf.spec.sharded_dims or leaf.spec.partial else []
    kind = type(leaf.value).__name__
    instead = _INSTEAD.get(kind, _DATACLASS if is_dataclass(leaf.value) else _STATIC)
    return [f"is a {kind}, not a tensor; {instead}"]


_STATIC: Final = "mark static arguments with None in in_specs"
_DATACLASS: Final = (
    "pass its tensors as a dict, or register the class with optree, in the namespace "
    f"{NAMESPACE!r}; {_STATIC}"
)
"""Repairs for arguments of other types."""


_INSTEAD: Final = {
    "ndarray": "pass torch.from_numpy(x)",
    "ShapeDtype": "it stands for one in check_program and its like, and on abstract meshes",
}
"""Repairs for arguments of some types."""


def unsupported(x: Tensor) -> list[str]:
    """Returns why a tensor cannot be sharded by any spec."""
    x = x if torch.compiler.is_dynamo_compiling() else base_of(x)
    if x.is_nested:
        return ["is a nested tensor; only dense ones can be sharded"]
    if x.layout != torch.strided:
        layout = str(x.layout).removeprefix("torch.").lstrip("_")
        return [f"is a {layout} tensor; only dense ones can be sharded, as by x.to_dense()"]
    return ["is a quantized tensor; pass x.dequantize()"] if x.is_quantized else []


_STRAY: Final = "is a fake tensor whose FakeTensorMode has ended; it has no values"


def _is_stray_fake(x: Tensor) -> bool:
    if torch.compiler.is_dynamo_compiling():
        return False
    mode = getattr(base_of(x), "fake_mode", None)
    if mode is None:
        return False
    return all(active is not mode for active in dispatch_mode_stack())


def _require_named(name: str, mapped: Sequence[str], placed: Sequence[Placed[Spec]]) -> None:
    """Requires a type on every axis of a leaf that can receive a gradient.

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
            "replicate= if the ranks use the value differently (gradients are summed over "
            "the axis), invariant= if all repeat one computation (they are equal already):"
        )
        raise SpecError(listing(head, problems))


def place_results(
    name: str, mesh: Mesh, mapped: Sequence[str], out_specs: Tree, out: Tree
) -> Match:
    """Matches every leaf of the result with its spec.

    Raises:
        SpecError: names every offender.
    """
    leaves = list(broadcast_prefix(out_specs, out, "out", is_spec))
    problems = [str(leaf) for leaf in leaves if isinstance(leaf, Mismatch)]
    placed = [in_finest(mesh, leaf) for leaf in leaves if isinstance(leaf, Placed)]
    for leaf in placed:
        problems += [f"{leaf.path}: {p}" for p in _result_problems(leaf, mapped)]
    if problems:
        head = f"{name}: the result does not match out_specs on the {mesh}:"
        raise SpecError(listing(head, problems))
    return Match.of(placed)


def _result_problems(leaf: Placed[Spec], mapped: Sequence[str]) -> list[str]:
    spec = leaf.spec
    if spec is None:
        static = "is a tensor, and its spec is None, which is for what is no tensor; write P(...)"
        return [static] if isinstance(leaf.value, Tensor) else []
    if unknown := unknown_axes(spec, mapped):
        return unknown
    if isinstance(leaf.value, Tensor):
        if packed := unsupported(leaf.value):
            return packed
        advice = "; return x[None], so that it has a dim for the ranks" * (leaf.value.ndim == 0)
        return [f"{problem}{advice}" for problem in longer(spec, leaf.value.ndim)]
    if isinstance(leaf.value, Number) and not (spec.sharded_dims or spec.partial):
        return []
    return [f"is a {type(leaf.value).__name__}, not a tensor, which {spec!r} cannot place"]


T = TypeVar("T")


def _are_wrapped(leaves: Sequence[Any]) -> bool:
    """Returns whether torch.func has wrapped any of the leaves that are of torch's own class."""
    tensors = [x for x in leaves if type(x) is Tensor]
    return any(map(functorch.is_functorch_wrapped_tensor, tensors))


class SignatureCache(Generic[T]):
    """Cache of one result, that of the latest signature.

    A training step passes DTensors that have the DTensorSpecs of the step before, each the same
    object: comparing these costs a fifth of comparing shapes, dtypes and the rest. Other specs may
    have the same signature, so that a miss says nothing.
    """

    def __init__(self) -> None:
        self._known: tuple[Any, list[Any], T] | None = None

    def get(self, rest: tuple[Any, ...], leaves: Sequence[Any], make: Callable[[], T]) -> T:
        """Returns the result for these leaves, and the rest of a signature; else calls `make`."""
        if torch.compiler.is_dynamo_compiling():
            return make()
        dtensor: Any = dtensor_class()
        tracked = torch.is_grad_enabled()
        is_plain = Tensor in {*map(type, leaves)} and not _are_wrapped(leaves)
        signature = [
            (x._spec, x.device, tracked and x.requires_grad)
            if type(x) is dtensor
            else (x.shape, x.dtype, x.layout, x.device, tracked and x.requires_grad)
            if type(x) is Tensor and is_plain and not x.is_nested  # as `input_signature`
            else input_signature(x)
            for x in leaves
        ]
        known = self._known
        try:
            if known is not None and known[1] == signature and known[0] == rest:
                return known[2]
        except Exception:  # a user's own pytree node compares as it likes
            return make()
        result = make()
        self._known = rest, signature, result
        return result
