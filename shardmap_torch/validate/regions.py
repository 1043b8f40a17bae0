"""Tests that a `local_region` has the same values and gradients on many ranks as on one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.boundary.matching import is_spec
from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.core.tree import (
    Mismatch,
    Placed,
    Structure,
    Tree,
    broadcast_prefix,
    flatten,
    unflatten,
)
from shardmap_torch.errors import SpecError, listing
from shardmap_torch.mesh import Mesh, make_mesh
from shardmap_torch.ops import reinterpret
from shardmap_torch.spec import P, mismatches
from shardmap_torch.transform import shard_map
from shardmap_torch.types import Partial, V
from shardmap_torch.validate.numbers import tolerance_of, unequal
from shardmap_torch.validate.report import Findings

Region: TypeAlias = tuple[Callable[..., Any], Tree, Tree]
"""A function, and the types of its arguments and results, as `local_region` keeps them."""

Outcome: TypeAlias = list[tuple[str, Tensor]]
"""Claims with the values that they are about."""


def try_region(
    name: str,
    region: Region,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    num_ranks: Sequence[int],
    seed: int,
) -> Findings:
    """Compares each number of ranks with one rank."""
    function, in_types, out_types = region
    call = _Call(name, partial(function, **kwargs), in_types, out_types, args, seed)
    axes = call.axes()
    expected, findings = call.outcome(_mesh(axes, 1)), Findings(name)
    for count in num_ranks:
        findings.tried += 1
        mesh = _mesh(axes, count)
        ranks = " x ".join([str(count)] * len(axes))
        reason = f"with {ranks} ranks it is not what it is with one"
        for (claim, value), (_, reference) in zip(call.outcome(mesh), expected, strict=True):
            findings.note(claim, unequal(value, reference, _TOLERANCE, reason))
    return findings


_TOLERANCE: Final = tolerance_of([torch.float64])


def _mesh(axes: Sequence[str], count: int) -> Mesh:
    return make_mesh((count,) * len(axes), tuple(axes), kind="simulated", simulate="ranks")


class _Call:
    """A region with global arguments, floating ones in float64."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        in_types: Tree,
        out_types: Tree,
        args: Sequence[Any],
        seed: int,
    ) -> None:
        self._name, self._function, self._out_types, self._seed = name, function, out_types, seed
        leaves, self._structure = flatten(tuple(args))
        self._leaves = [_widest(leaf) for leaf in leaves]
        self._specs, self._paths = self._broadcast(in_types, tuple(args))

    def _broadcast(self, in_types: Tree, args: tuple[Any, ...]) -> tuple[list[P | None], list[str]]:
        """Returns the spec and the path of every leaf."""
        matched = list(broadcast_prefix(in_types, args, "argument", is_spec))
        problems = [str(leaf) for leaf in matched if isinstance(leaf, Mismatch)]
        placed = [leaf for leaf in matched if isinstance(leaf, Placed)]
        problems += [
            f"{leaf.path}: is a tensor, which needs a P"
            for leaf in placed
            if isinstance(leaf.value, Tensor) and leaf.spec is None
        ]
        problems += [
            f"{leaf.path}: is a sum over {sorted(leaf.spec.partial)}, and not floating"
            for leaf in placed
            if leaf.spec is not None and leaf.spec.partial and not is_smooth(leaf.value)
        ]
        self._reject(problems)
        return [leaf.spec for leaf in placed], [leaf.path for leaf in placed]

    def _reject(self, problems: Sequence[str]) -> None:
        if problems:
            raise SpecError(
                listing(f"validate_rule: {self._name}: the arguments do not match:", problems)
            )

    def axes(self) -> list[str]:
        """Returns the axis names in the types, in order of appearance."""
        specs = [*self._specs, *flatten(self._out_types)[0]]
        named = [
            axis for s in specs if isinstance(s, P) for axis in (*s.mentioned, *sorted(s.named))
        ]
        if not named:
            raise SpecError(f"validate_rule: {self._name}: its types name no axis.")
        return list(dict.fromkeys(named))

    def outcome(self, mesh: Mesh) -> Outcome:
        """Computes every result, and the gradient of every floating argument."""
        self._check_sizes(mesh)
        generator = torch.Generator().manual_seed(self._seed)
        inputs = [x.detach().requires_grad_() if is_smooth(x) else x for x in self._leaves]
        crossing = [_split(x, s, mesh, generator) for x, s in zip(inputs, self._specs, strict=True)]
        specs = tuple(None if s is None else _stacked(s) for s in self._specs)
        body = _body_of(self._function, self._specs, self._structure)
        body.__name__ = self._name
        mapped = shard_map(body, mesh=mesh, in_specs=specs, out_specs=self._out_types)
        with torch.enable_grad():
            matched = broadcast_prefix(self._out_types, mapped(*crossing), "result", is_spec)
        results = [y for y in matched if isinstance(y, Placed) and isinstance(y.value, Tensor)]
        values = [(f"{y.path} is {y.spec!r}", y.value.detach()) for y in results]
        return values + self._gradients([y.value for y in results], inputs)

    def _check_sizes(self, mesh: Mesh) -> None:
        """Requires that sizes divide, before the ranks do, whose arguments are stacked."""
        placed = zip(self._leaves, self._specs, self._paths, strict=True)
        self._reject(
            [
                f"{path}: {problem}"
                for leaf, spec, path in placed
                if isinstance(leaf, Tensor) and spec is not None
                for problem in mismatches(spec, tuple(leaf.shape), mesh.shape)
            ]
        )

    def _gradients(self, results: Sequence[Tensor], inputs: Sequence[Any]) -> Outcome:
        """Computes gradients for random cotangents, the same on every mesh."""
        generator = torch.Generator().manual_seed(self._seed + 1)
        differentiable = [y for y in results if y.requires_grad]
        leaves = zip(self._paths, self._specs, inputs, strict=True)
        inputs_by_claim = [
            (f"gradient of {path}, {spec!r}", x) for path, spec, x in leaves if is_smooth(x)
        ]
        # Drawn for every result: one that has no gradient on one mesh may have it on another.
        drawn = [torch.randn(y.shape, dtype=torch.float64, generator=generator) for y in results]
        cotangents = [c.to(y) for c, y in zip(drawn, results, strict=True) if y.requires_grad]
        if not differentiable or not inputs_by_claim:
            return [(claim, torch.zeros_like(x)) for claim, x in inputs_by_claim]
        gradients = torch.autograd.grad(
            differentiable, [x for _, x in inputs_by_claim], cotangents, materialize_grads=True
        )
        return [(claim, g) for (claim, _), g in zip(inputs_by_claim, gradients, strict=True)]


def _widest(leaf: Any) -> Any:
    if not is_smooth(leaf):
        return leaf
    return leaf.detach().to(torch.complex128 if leaf.is_complex() else torch.float64)


def _stacked(spec: P) -> P:
    """Returns the spec of stacked addends, with one leading dim for each axis of a sum."""
    return P(
        *sorted(spec.partial), *spec.entries, replicate=spec.replicate, invariant=spec.invariant
    )


def _split(x: Any, spec: P | None, mesh: Mesh, generator: torch.Generator) -> Any:
    """Makes random addends of `x`, one for each rank of the axes of its sum.

    Each has its own share of the gradient, so that ranks with different gradients do not cancel.
    """
    axes = [] if spec is None else sorted(spec.partial, reverse=True)
    for axis in axes:
        shape = (mesh.shape[axis], *(1,) * x.ndim)
        shares = torch.rand(shape, dtype=x.dtype, generator=generator)
        noise = torch.randn((shape[0], *x.shape), dtype=x.dtype, generator=generator)
        x = x * (shares / shares.sum()).to(x.device) + (noise - noise.mean(0)).to(x.device)
    return x


def _body_of(
    function: Callable[..., Any], specs: Sequence[P | None], structure: Structure
) -> Callable[..., Any]:
    """Makes the body that calls the function on stacked leaves."""

    def body(*leaves: Any) -> Any:
        local = [_addend(x, spec) for x, spec in zip(leaves, specs, strict=True)]
        return function(*unflatten(structure, local))

    return body


def _addend(x: Any, spec: P | None) -> Any:
    for axis in () if spec is None else sorted(spec.partial):
        x = reinterpret(x.squeeze(0), axis, src=V, dst=Partial)
    return x
