"""Tests that a `local_region` has the same values and gradients on many ranks as on one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from shardmap_torch.run.trials.draws import widened
from shardmap_torch.spec import P, mismatches
from shardmap_torch.transform import shard_map
from shardmap_torch.types import Partial, V
from shardmap_torch.validate.numbers import Findings, gradients_for, tolerance_of, unequal

Region: TypeAlias = tuple[Callable[..., Any], Tree, Tree]
"""A function, and the types of its arguments and results, as `local_region` keeps them."""

_TOLERANCE: Final = tolerance_of([torch.float64])


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
    matched = list(broadcast_prefix(in_types, tuple(args), "argument", is_spec))
    _reject(name, [str(leaf) for leaf in matched if isinstance(leaf, Mismatch)])
    leaves = [leaf for leaf in matched if isinstance(leaf, Placed)]
    call = _Call(name, partial(function, **kwargs), out_types, leaves, flatten(tuple(args))[1])
    specs = [leaf.spec for leaf in leaves] + flatten(out_types)[0]
    axes = [a for s in specs if isinstance(s, P) for a in (*s.mentioned, *sorted(s.named))]
    if not axes:
        raise SpecError(f"validate_rule: {name}: its types name no axis.")
    names, findings = tuple(dict.fromkeys(axes)), Findings(name)
    expected = call.outcome(_mesh(names, 1), seed)
    for count in num_ranks:
        findings.tried += 1
        ranks = " x ".join([str(count)] * len(names))
        reason = f"with {ranks} ranks it is not what it is with one"
        for claim, value in call.outcome(_mesh(names, count), seed).items():
            findings.note(claim, unequal(value, expected[claim], _TOLERANCE, reason))
    return findings


def _mesh(axes: tuple[str, ...], count: int) -> Mesh:
    return make_mesh((count,) * len(axes), axes, kind="simulated", simulate="ranks")


def _reject(name: str, problems: Sequence[str]) -> None:
    if problems:
        raise SpecError(listing(f"validate_rule: {name}: the arguments do not match:", problems))


@dataclass(frozen=True)
class _Call:
    """A call of a region, with the leaves of its global arguments."""

    name: str
    function: Callable[..., Any]
    out_types: Tree
    leaves: Sequence[Placed[P | None]]
    structure: Structure

    def outcome(self, mesh: Mesh, seed: int) -> dict[str, Tensor]:
        """Computes every result, and the gradient of every floating argument, in 64 bits."""
        self._require_divisible(mesh)
        generator = torch.Generator().manual_seed(seed)
        inputs = [_widest(leaf.value) for leaf in self.leaves]
        crossing = [
            _split(x, leaf.spec, mesh, generator)
            for x, leaf in zip(inputs, self.leaves, strict=True)
        ]

        def body(*values: Any) -> Any:
            pairs = zip(values, self.leaves, strict=True)
            return self.function(*unflatten(self.structure, [_addend(x, e.spec) for x, e in pairs]))

        body.__name__ = self.name
        specs = tuple(None if e.spec is None else _stacked(e.spec) for e in self.leaves)
        mapped = shard_map(body, mesh=mesh, in_specs=specs, out_specs=self.out_types, check=True)
        with torch.enable_grad():
            matched = broadcast_prefix(self.out_types, mapped(*crossing), "result", is_spec)
        results = [y for y in matched if isinstance(y, Placed) and isinstance(y.value, Tensor)]
        found = {f"{y.path} is {y.spec!r}": y.value.detach() for y in results}
        named = zip(self.leaves, inputs, strict=True)
        known = {f"gradient of {leaf.path}, {leaf.spec!r}": x for leaf, x in named}
        return found | gradients_for([y.value for y in results], known, seed + 1)

    def _require_divisible(self, mesh: Mesh) -> None:
        """Requires that sizes divide, before the ranks do, whose arguments are stacked."""
        problems: list[str] = []
        for leaf in self.leaves:
            if not isinstance(leaf.value, Tensor):
                continue
            if leaf.spec is None:
                problems.append(f"{leaf.path}: is a tensor, which needs a P")
            elif leaf.spec.partial and not is_smooth(leaf.value):
                axes = sorted(leaf.spec.partial)
                problems.append(f"{leaf.path}: is a sum over {axes}, and not floating")
            else:
                found = mismatches(leaf.spec, tuple(leaf.value.shape), mesh.shape)
                problems += [f"{leaf.path}: {problem}" for problem in found]
        _reject(self.name, problems)


def _widest(leaf: Any) -> Any:
    return leaf.detach().to(widened(leaf.dtype)).requires_grad_() if is_smooth(leaf) else leaf


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


def _addend(x: Any, spec: P | None) -> Any:
    for axis in () if spec is None else sorted(spec.partial):
        x = reinterpret(x.squeeze(0), axis, src=V, dst=Partial)
    return x
