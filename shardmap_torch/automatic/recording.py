"""`redistributions`: records what DTensors redistribute while code runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmap_torch.automatic.propagation import (
    RedistributionRecorder,
    needed_placements,
    propagated,
)
from shardmap_torch.automatic.report import Redistributions
from shardmap_torch.boundary.placements import Placements
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.core.tree import flatten
from shardmap_torch.mixing.values import OBSERVERS


@contextmanager
def redistributions() -> Iterator[Redistributions]:
    """Records the redistributions of DTensors in a block, by line and bytes, as it runs.

    Among them are those over the automatic axes of `shard_map`: where torch's propagation needs an
    operand in another placement, where a collective over a bound axis moves a dim that an
    automatic one shards, and at the boundary; with those of a backward in the block. The functions
    that redistribute because they were asked to are left out, but for `mark_sharding` in a body.
    On simulated meshes there are no DTensors, and nothing is recorded.

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


class _Recorder(RedistributionRecorder):
    """Dispatch mode that asks torch's propagation what each operation on DTensors redistributes."""

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
        """Runs an operation, and records what it redistributes."""
        kwargs = dict(kwargs or {})
        self.note_site()
        shared = [x for x in flatten((args, kwargs))[0] if isinstance(x, DTensor)]
        out = func(*args, **kwargs)
        if shared:
            self._record(func, args, kwargs, shared)
        return out

    def _record(self, func: OpOverload, args: Any, kwargs: Any, shared: list[DTensor]) -> None:
        try:
            sharding = propagated(func, args, kwargs, _spec)
        except Exception:  # torch runs it in another way
            return
        if not sharding.needs_redistribute:
            return
        needed = needed_placements(sharding.redistribute_schema)
        for x, placements in zip(shared, needed, strict=False):
            self._add(func._schema.name.split("::")[1], x, placements, True)

    def _add(self, op: str, x: DTensor, dst: Placements, is_implicit: bool) -> None:
        mesh = tuple(x.device_mesh.shape), tuple(x.device_mesh.mesh_dim_names or ())
        self.record(op, x, (tuple(x.placements), dst), mesh, is_implicit)


def _spec(x: Tensor) -> Any:
    assert isinstance(x, DTensor)  # DTensor replicates plain scalars, or fails
    return x._spec
