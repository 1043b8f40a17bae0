"""Runs a call for all ranks of a simulated mesh as one batched program."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Final

import torch
from torch import Tensor

from shardmap_torch.backends.batching import add_batching_rules
from shardmap_torch.backends.folding import Folding
from shardmap_torch.backends.vmap import BatchedBackend
from shardmap_torch.boundary.call import Call, Result, Untouched, run_body
from shardmap_torch.boundary.shards import join, split
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.storage import apart
from shardmap_torch.core.torch_private.engine import (
    functorch,
    lazy_load_decompositions,
    warn_of_fallbacks,
)
from shardmap_torch.core.tree import Tree
from shardmap_torch.errors import TransformError
from shardmap_torch.mesh import Mesh
from shardmap_torch.ops.asking import ANSWERING
from shardmap_torch.spec import P

In = dict[str, int | None]
"""The batch dim of one operand at each axis' level: 0 or None."""


def run(call: Call) -> Tree:
    """Runs a checked body under a vmap for each axis; shards and joins with plain operations."""
    if call.rank_only:
        raise rank_only(call.name, call.rank_only)
    axes = [axis for axis in call.mesh.axis_names if axis in call.mapped]
    operands: list[Tensor] = []
    batching: list[In] = []
    for position in call.crossing:
        shards, varying = split(call.leaves[position], call.match.spec(position), call.mesh)
        operands.append(shards)
        batching.append({axis: 0 if axis in varying else None for axis in axes})
    device = operands[0].device if operands else call.mesh.device
    for axis in axes:
        operands.append(torch.arange(call.mesh.shape[axis], device=device))
        batching.append({other: 0 if other == axis else None for other in axes})

    results: list[Result] = []
    folding = _folding(call, axes)

    def body(*values: Tensor) -> tuple[Tensor, ...]:
        markers = dict(zip(axes, values[len(values) - len(axes) :], strict=True))
        backend = BatchedBackend(call.mesh, *_with_outer(markers))
        with folding or nullcontext():
            result = run_body(call, backend, values[: len(values) - len(axes)])
        if folding is not None:
            folding.finish()
        results.append(result)
        return tuple(result.crossing)

    watch = Untouched(call, operands[: len(call.crossing)])
    sizes = {axis: call.mesh.shape[axis] for axis in axes}
    traced = torch.compiler.is_dynamo_compiling()
    if not traced:
        ANSWERING.begin()
    with nullcontext() if traced else _silent_fallbacks():
        stacked = _nest(body, sizes, batching)(*operands)
    watch.check()
    result = results[0]
    joined = [
        join(_repeated(value, spec, call.mesh, axes), spec, call.mesh, axes)
        for spec, value in zip(map(result.match.spec, result.match.crossing), stacked, strict=True)
    ]
    return result.rebuild(apart(joined, call.leaves))


@contextmanager
def _silent_fallbacks() -> Iterator[None]:
    """Keeps torch from warning that it runs an operator for one rank after the other.

    It says so to who has written a vmap, and asks them to file an issue.
    """
    warn_of_fallbacks(False)
    try:
        yield
    finally:
        warn_of_fallbacks(True)


_MANY: Final = 32
"""Ranks from which products are folded: watching the functions of a body costs 2 us for each."""


def _folding(call: Call, axes: Sequence[str]) -> Folding | None:
    """Returns what folds products of a checked body over one axis of many ranks."""
    if torch.compiler.is_dynamo_compiling() or call.follow is None:
        return None
    many = len(axes) == 1 == len(call.bound) and call.mesh.shape[axes[0]] >= _MANY
    return Folding(call.mesh.shape[axes[0]]) if many else None


def _with_outer(markers: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Returns the markers of these axes and of those around them, and their levels."""
    traced = torch.compiler.is_dynamo_compiling()
    levels = {} if traced else {a: functorch.maybe_get_level(x) for a, x in markers.items()}
    scope = current_scope()
    if scope is None or not isinstance(scope.backend, BatchedBackend):
        return markers, levels
    return scope.backend.axis_markers | markers, scope.backend.levels | levels


def _nest(
    body: Callable[..., tuple[Tensor, ...]], axes: dict[str, int], batching: Sequence[In]
) -> Callable[..., tuple[Tensor, ...]]:
    """Nests vmaps around the body, the first axis outermost; batch dims are leading."""
    mapped = body
    for axis in reversed(axes):
        dims = tuple([levels[axis] for levels in batching])
        if torch.compiler.is_dynamo_compiling():  # it knows no other vmap
            mapped = torch.func.vmap(mapped, dims, randomness="different")
        else:
            mapped = _map(mapped, axes[axis], dims)
    return mapped


def _map(
    body: Callable[..., tuple[Tensor, ...]], size: int, dims: Sequence[int | None]
) -> Callable[..., tuple[Tensor, ...]]:
    """Does what `torch.func.vmap` does, of lists of tensors, without its walks of pytrees."""

    def mapped(*values: Tensor) -> tuple[Tensor, ...]:
        lazy_load_decompositions()
        add_batching_rules()
        level = functorch._vmap_increment_nesting(size, "different")
        try:
            outs = body(
                *(
                    value if dim is None else functorch._add_batch_dim(value, dim, level)
                    for value, dim in zip(values, dims, strict=True)
                )
            )
            return tuple(_closed(out, level, size) for out in outs)
        finally:
            functorch._vmap_decrement_nesting()

    return mapped


def _closed(out: Tensor, level: int, size: int) -> Tensor:
    """Returns the values of all ranks along dim 0; of length 1 where they are equal.

    torch would repeat these, and a backward make a cotangent for each rank.
    """
    _, dim = functorch._unwrap_batched(out, level)
    if dim is None:
        return out.unsqueeze(0)
    values: Tensor = functorch._remove_batch_dim(out, level, size, 0)
    return values


def _repeated(value: Tensor, spec: P, mesh: Mesh, axes: Sequence[str]) -> Tensor:
    """Repeats a value that is equal on ranks along the axes that its spec shards or adds over."""
    sizes = [
        mesh.shape[axis] if axis in spec.mentioned or axis in spec.partial else have
        for axis, have in zip(axes, value.shape, strict=False)
    ]
    return value.expand((*sizes, *value.shape[len(sizes) :]))


def rank_only(name: str, what: str) -> TransformError:
    """Builds the error of a batched body that has something that only single ranks run."""
    return TransformError(
        f"{name}: one batched program drops, or cannot run, what single ranks run: {what}\n"
        'Fix: use make_mesh(..., simulate="auto"), which runs such bodies as ranks, or "ranks".'
    )
