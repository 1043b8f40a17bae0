"""Gradients in a batched body, by autograd on the stacked values of all ranks.

Autograd under the levels of vmap differentiates the program of all ranks at once, as it does for
gradients that are taken outside. A rank's own gradient needs a copy of the value for each rank
where the gradient differs from rank to rank; the checker tells along which axes that is so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shardmap_torch.backends import folding
from shardmap_torch.backends.vmap import BatchedBackend
from shardmap_torch.checker.rules.lattice import plain
from shardmap_torch.collectives.protocol import Note
from shardmap_torch.collectives.scope import Scope
from shardmap_torch.core.functorch import base_of, batched_at, dims_of
from shardmap_torch.core.torch_private.engine import temporarily_clear_interpreter_stack
from shardmap_torch.types import AxisType, K, Partial, R, V, Z

Body = Callable[[list[Tensor]], tuple[Tensor, list[Tensor]]]
"""Makes the value that is differentiated, and other tensors, from leaves."""

_APART: Final = (V, Partial, R)
"""Types of values of which each rank has its own, as operands, gradients or results."""

_OPEN: Final = (K, Z)
"""Types of gradients that are each rank's own where that is so of the value."""


@dataclass(frozen=True)
class Ranks:
    """The levels of vmap that are open around a body, all of them its axes'.

    Attributes:
        sizes: the number of ranks at each level, outermost first.
        apart: for each leaf, the levels at which its gradient is each rank's own.
        summed: the levels at which the value that is differentiated is each rank's own.
    """

    sizes: dict[int, int]
    apart: tuple[frozenset[int], ...]
    summed: frozenset[int]

    @torch.enable_grad()
    def gradients(
        self, run: Body, leaves: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Calls a function: its value, its other tensors, and the gradients."""
        with temporarily_clear_interpreter_stack():
            values = [
                self._stacked(x, apart).detach().requires_grad_()
                for x, apart in zip(leaves, self.apart, strict=True)
            ]
        own = [self._unstacked(x, apart) for x, apart in zip(values, self.apart, strict=True)]
        out, aux = run(own)
        folding.finish()
        with temporarily_clear_interpreter_stack():
            y = self._stacked(out, self.summed)
            found = (
                torch.autograd.grad(y.sum(), values, materialize_grads=True)  # no symbols imported
                if y.requires_grad
                else [torch.zeros_like(x) for x in values]
            )
        gradients = [self._unstacked(g, apart) for g, apart in zip(found, self.apart, strict=True)]
        return out.detach(), [x.detach() for x in aux], gradients

    def _stacked(self, x: Tensor, levels: frozenset[int]) -> Tensor:
        """Returns the values of all ranks, with a leading dim for each of these levels.

        At others, where all ranks' values are equal, it takes the first one's.
        """
        dims, own = dims_of(x)
        order = [level for level in self.sizes if level in own]
        value = base_of(x).permute([*[own[level] for level in order], *dims])
        position = 0
        for level, size in self.sizes.items():
            if level in own and level not in levels:
                value = value.select(position, 0)
            elif level in levels and level not in own:
                value = value.unsqueeze(position)
                shape = list(value.shape)
                shape[position] = size
                value = value.expand(shape)
            position += level in levels
        return value

    def _unstacked(self, x: Tensor, levels: frozenset[int]) -> Tensor:
        """Returns what the body has of such values."""
        return batched_at(x, [level for level in self.sizes if level in levels])


def ranks_of(scope: Scope | None, note: Note | None, leaves: Sequence[Tensor]) -> Ranks | None:
    """Returns the levels of a batched body that autograd may differentiate; None elsewhere."""
    if scope is None or note is None or note.value or not note.types:
        return None
    if torch.compiler.is_dynamo_compiling() or torch.is_inference_mode_enabled():
        return None
    backend, axes = scope.backend, scope.backend.mesh.axis_names
    if not isinstance(backend, BatchedBackend) or not backend.is_alone():
        return None
    if len(note.types) != len(axes) * (2 * len(leaves) + 1):
        return None
    levels = backend.levels
    of = [base_of(x) for x in leaves]
    if not levels.keys() <= set(axes) or any(x.requires_grad or x.is_inference() for x in of):
        return None

    def where(at: int, types: tuple[AxisType, ...]) -> frozenset[int]:
        """The levels at which the types of number `at` are some of these."""
        row = dict(zip(axes, note.types[at * len(axes) :], strict=False))
        return frozenset(level for axis, level in levels.items() if plain(row[axis]) in types)

    count = len(leaves)
    summed = where(2 * count, _APART)
    apart = tuple(
        where(at, _APART) | where(count + at, _APART) | (summed & where(count + at, _OPEN))
        for at in range(count)
    )
    by_level = sorted((level, axis) for axis, level in levels.items())
    sizes = {level: backend.mesh.shape[axis] for level, axis in by_level}
    return Ranks(sizes, apart, summed)
