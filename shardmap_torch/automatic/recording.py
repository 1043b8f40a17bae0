"""`redistributions`: records what DTensors redistribute while code runs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from shardmap_torch.boundary.placements import Placements
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.core.torch_private.dtensor import (
    DTensorSpec,
    OpSchema,
    sharding_propagator,
)
from shardmap_torch.core.torch_private.engine import (
    DisableTorchFunction,
    OpOverload,
    TorchDispatchMode,
    current_autograd_node,
    disable_current_modes,
    sequence_number,
)
from shardmap_torch.core.tree import flatten, map_tensors
from shardmap_torch.errors import show_shape
from shardmap_torch.mixing.values import OBSERVERS


@dataclass(frozen=True)
class Redistribution:
    """A tensor that is redistributed because an operation needs other placements.

    Attributes:
        op: the operation, `mark_sharding`, "result" or "gradient".
        site: the user's line; in a backward that of the forward.
        in_backward: whether it happens in the backward.
        shape: the global shape.
        dtype: of the tensor.
        src: the placements before, one for each mesh axis.
        dst: the placements after.
        num_bytes: bytes that each rank sends.
        is_implicit: whether the user has not asked for it.
        axes: names of the mesh axes of the placements, if these are not all of the mesh.
    """

    op: str
    site: Site | None
    in_backward: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    src: tuple[Placement, ...]
    dst: tuple[Placement, ...]
    num_bytes: int
    is_implicit: bool
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Formats it as `mm: float32[8, 4] (S(0)) -> (R), sends 96 B  # model.py:3: y = x @ w`."""
        layouts = f"({shown(self.src)}) -> ({shown(self.dst)})"
        layouts += f" over {', '.join(self.axes)}" * bool(self.axes)
        where = f"  # {self.site}" if self.site is not None else ""
        is_named = self.in_backward and self.site is not None
        name = self.op + " backward" * is_named + " (asked for)" * (not self.is_implicit)
        shape = show_shape(self.dtype, self.shape)
        return f"{name}: {shape} {layouts}, sends {self.num_bytes} B{where}"


@dataclass(frozen=True)
class Redistributions:
    """Redistributions in order.

    Attributes:
        moves: those that send something or change placements.
    """

    moves: list[Redistribution]

    @property
    def num_bytes(self) -> int:
        """Counts the bytes that each rank sends, forward and backward."""
        return sum(move.num_bytes for move in self.moves)

    @property
    def implicit(self) -> tuple[Redistribution, ...]:
        """The redistributions that the user has not asked for."""
        return tuple(move for move in self.moves if move.is_implicit)

    def __str__(self) -> str:
        """A line for each redistribution, and the sum."""
        lines = [f"  {move}" for move in self.moves] or ["  nothing is redistributed"]
        return "\n".join([*lines, f"each rank sends {self.num_bytes} B"])


def shown(placements: Sequence[Placement]) -> str:
    """Formats placements as `S(0), R, P`."""
    return ", ".join(map(_short, placements))


def _short(placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    dim = getattr(placement, "dim", None)
    return f"S({dim})" if dim is not None else str(placement)


def bytes_sent(
    shape: Sequence[int],
    dtype: torch.dtype,
    src: Sequence[Placement],
    dst: Sequence[Placement],
    sizes: Sequence[int],
) -> int:
    """Counts the bytes that each rank sends by ring algorithms, from the last axis to the first.

    An estimate where several axes change at once: torch may take them in another order.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> bytes_sent([8], torch.float32, [Shard(0)], [Replicate()], [4])  # 3 times 2 entries
        24
    """
    local = prod(shape) * dtype.itemsize
    for placement, size in zip(src, sizes, strict=True):
        local //= size if placement.is_shard() else 1
    total = 0
    for old, new, size in reversed(list(zip(src, dst, sizes, strict=True))):
        if old == new:
            continue
        if old.is_shard() and not new.is_shard():
            total += (size - 1) * local
            local *= size
        elif old.is_shard():
            total += (size - 1) * local // size
        elif old.is_partial():
            total += (size - 1) * local // size * (1 if new.is_shard() else 2)
            local //= size if new.is_shard() else 1
        else:
            local //= size if new.is_shard() else 1
    return total


@contextmanager
def redistributions() -> Iterator[Redistributions]:
    """Records the redistributions of DTensors in a block, by line and bytes, as it runs.

    Among them are those over the automatic axes of `shard_map` and `auto`: where torch's
    propagation needs an operand in another placement, where a collective over a bound axis moves a
    dim that an automatic one shards, and at the boundary; with those of a backward in the block.
    The functions that redistribute because they were asked to are left out, but for
    `mark_sharding` in a body. On simulated meshes there are no DTensors, and nothing is recorded.

    Each operation in the block is propagated twice, which is slow: use it to look, not in training.

    Source: `torch.distributed.tensor.debug.CommDebugMode`, which counts, without lines or bytes.

    Example:
        >>> import torch
        >>> from shardmap_torch import redistributions
        >>> with redistributions() as found:
        ...     y = torch.ones(2) + 1
        >>> print(found)
          nothing is redistributed
        each rank sends 0 B
    """
    recorder = _Recorder()
    OBSERVERS.append(recorder.observe)
    try:
        with recorder:
            yield Redistributions(recorder.moves)
    finally:
        OBSERVERS.remove(recorder.observe)


class _Recorder(TorchDispatchMode):
    """Dispatch mode that asks torch's propagation what each operation on DTensors redistributes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.moves: list[Redistribution] = []
        self._sites: dict[int, Site | None] = {}

    def observe(self, what: str, x: DTensor, dst: Placements) -> None:
        """Records that the library redistributes a value."""
        self._add(what, x, dst, is_implicit=what != "mark_sharding")

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        # Its backward will ask for the line.
        self._sites.setdefault(sequence_number() - 1, call_site())
        shared = [x for x in flatten((args, kwargs))[0] if isinstance(x, DTensor)]
        out = func(*args, **kwargs)
        if shared:
            self._record(func, args, kwargs, shared)
        return out

    def _record(self, func: OpOverload, args: Any, kwargs: Any, shared: list[DTensor]) -> None:
        try:
            sharding = _propagated(func, args, kwargs)
        except Exception:  # torch runs it in another way
            return
        if not sharding.needs_redistribute:
            return
        schema = sharding.redistribute_schema
        leaves, _ = flatten((tuple(schema.args_schema), dict(schema.kwargs_schema)))
        needed = [tuple(leaf.placements) for leaf in leaves if isinstance(leaf, DTensorSpec)]
        for x, placements in zip(shared, needed, strict=False):
            self._add(func._schema.name.split("::")[1], x, placements, True)

    def _add(self, op: str, x: DTensor, dst: Placements, is_implicit: bool) -> None:
        src, mesh = tuple(x.placements), x.device_mesh
        if src == dst:
            return
        site, in_backward = self._site()
        sent = bytes_sent(x.shape, x.dtype, src, dst, tuple(mesh.shape))
        what = op, site, in_backward, tuple(x.shape), x.dtype
        axes = tuple(mesh.mesh_dim_names or ())
        self.moves.append(Redistribution(*what, src, dst, sent, is_implicit, axes))

    def _site(self) -> tuple[Site | None, bool]:
        """Returns the user's line (in a backward the forward's), and whether it is a backward."""
        node = current_autograd_node()
        if node is None:
            return call_site(), False
        return self._sites.get(node._sequence_nr()), True


def _propagated(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Asks torch how it places an operation."""
    propagator = sharding_propagator()
    schema = OpSchema(
        func,
        map_tensors(_spec, tuple(args)),
        map_tensors(_spec, dict(kwargs)),
        schema_info=propagator.op_to_schema_info.get(func),
    )
    with DisableTorchFunction(), disable_current_modes():
        return propagator.propagate_op_sharding_non_cached(schema)


def _spec(x: Tensor) -> Any:
    assert isinstance(x, DTensor)  # DTensor replicates plain scalars, or fails
    return x._spec
