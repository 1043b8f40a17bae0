"""Propagates placements through global-view code by DTensor's own rules, without processes.

The code runs on fake tensors of global shapes. A dispatch mode asks DTensor's sharding propagation
for the placements that each operation needs of its operands, and records those that differ. It uses
torch's private interface, as the checker does (`checker/spmd/ops/dtensor_rules.py`).
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from shardmap_torch.automatic.report import Redistribution, bytes_sent
from shardmap_torch.boundary.placements import placements_of
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.core.torch_private.dtensor import (
    DTensorSpec,
    OpSchema,
    TensorMeta,
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
from shardmap_torch.errors import ShardMapError
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P

RESULT: Final = "result"
GRADIENT: Final = "gradient"
"""Names, in reports, of the redistributions of gradients (above: of results)."""

Placements: TypeAlias = tuple[Placement, ...]


class RedistributionRecorder(TorchDispatchMode):
    """Dispatch mode that records redistributions with the user's lines."""

    def __init__(self) -> None:
        """Starts without redistributions."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.moves: list[Redistribution] = []
        self._sites: dict[int, Site | None] = {}

    def note_site(self) -> None:
        """Notes the line of the operation that comes now, which its backward will ask for."""
        self._sites.setdefault(sequence_number() - 1, call_site())

    def site(self) -> tuple[Site | None, bool]:
        """Returns the user's line (in a backward the forward's), and whether it is a backward."""
        node = current_autograd_node()
        if node is None:
            return call_site(), False
        return self._sites.get(node._sequence_nr()), True

    def record(
        self,
        op: str,
        x: Tensor,
        placements: tuple[Placements, Placements],
        mesh: tuple[Sequence[int], Sequence[str]],
        is_implicit: bool,
    ) -> None:
        """Records that `x` goes from some placements to others on a mesh of these sizes and axes.

        Results and gradients, which are so named, belong to no line.
        """
        (src, dst), (sizes, axes) = placements, mesh
        if src == dst:
            return
        site, in_backward = self.site()
        if op in (RESULT, GRADIENT) and not axes:
            site, in_backward = None, op == GRADIENT
        sent = bytes_sent(x.shape, x.dtype, src, dst, sizes)
        what = op, site, in_backward, tuple(x.shape), x.dtype
        self.moves.append(Redistribution(*what, src, dst, sent, is_implicit, tuple(axes)))


class Propagation(RedistributionRecorder):
    """Dispatch mode that tracks the placements of values while global-view code runs."""

    def __init__(self, mesh: Mesh) -> None:
        """Starts without placements: a value that `place` was not called for is replicated."""
        super().__init__()
        self.mesh = mesh
        self._replicated: Placements = tuple(Replicate() for _ in mesh.axis_sizes)
        ranks = torch.arange(mesh.size).reshape(mesh.axis_sizes)
        names = mesh.axis_names
        self._device_mesh = DeviceMesh(
            "cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0
        )
        self._layouts: dict[object, Placements] = {}
        self._alive: list[Tensor] = []  # keys are addresses, which must not be used again

    def place(self, x: Tensor, placements: Placements) -> None:
        """Records the placements of a value."""
        self._layouts[_key(x)] = placements
        self._alive.append(x)

    def placements(self, x: Tensor) -> Placements:
        """Returns the placements of a value."""
        return self._layouts.get(_key(x), self._replicated)

    def redistribute(self, x: Tensor, dst: Placements, op: str, is_implicit: bool) -> None:
        """Records that a value is redistributed from its placements to `dst`, if they differ."""
        self.record(op, x, (self.placements(x), dst), (self.mesh.axis_sizes, ()), is_implicit)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs an operation, and derives the placements of its results."""
        kwargs = dict(kwargs or {})
        if func.namespace == "prim":  # asks for the device of a fake tensor
            return func(*args, **kwargs)
        self.note_site()
        operands = [x for x in flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        placed = [self.placements(x) for x in operands]
        out = func(*args, **kwargs)
        if all(p == self._replicated for p in placed):
            return out
        sharding = self._propagate(func, args, kwargs)
        if sharding.needs_redistribute:
            self._record_moves(func, operands, sharding.redistribute_schema)
        specs = sharding.output_spec
        results = out if isinstance(out, list | tuple) else [out]
        specs = specs if isinstance(specs, list | tuple) else [specs]
        for result, spec in zip(results, specs, strict=False):
            if isinstance(result, Tensor) and spec is not None:
                self.place(result, tuple(spec.placements))
        return out

    def _propagate(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            return propagated(func, args, kwargs, self._spec)
        except Exception as error:
            site, _ = self.site()
            raise ShardMapError(
                f"auto: torch's sharding propagation cannot place {func}"
                + (f" at {site}" if site is not None else "")
                + f": {error}"
            ) from error

    def _spec(self, x: Tensor) -> DTensorSpec:
        meta = TensorMeta(x.shape, x.stride(), x.dtype)
        return DTensorSpec(self._device_mesh, self.placements(x), tensor_meta=meta)

    def _record_moves(self, func: OpOverload, operands: Sequence[Tensor], schema: Any) -> None:
        for x, placements in zip(operands, needed_placements(schema), strict=False):
            self.redistribute(x, placements, func._schema.name.split("::")[1], True)


def propagated(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    spec_of: Callable[[Any], DTensorSpec],
) -> Any:
    """Asks torch how it places an operation, given the DTensorSpecs of its operands."""
    propagator = sharding_propagator()
    schema = OpSchema(
        func,
        map_tensors(spec_of, tuple(args)),
        map_tensors(spec_of, dict(kwargs)),
        schema_info=propagator.op_to_schema_info.get(func),
    )
    with DisableTorchFunction(), disable_current_modes():
        return propagator.propagate_op_sharding_non_cached(schema)


def needed_placements(schema: Any) -> list[Placements]:
    """Returns the placements that an operation needs of its operands, in the order of `flatten`."""
    leaves, _ = flatten((tuple(schema.args_schema), dict(schema.kwargs_schema)))
    return [tuple(leaf.placements) for leaf in leaves if isinstance(leaf, DTensorSpec)]


def _key(x: Tensor) -> object:
    return x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), x.stride()


class _Current(threading.local):
    def __init__(self) -> None:
        self.propagation: Propagation | None = None


_CURRENT: Final = _Current()


def current_propagation() -> Propagation | None:
    """Returns the propagation that is active on this thread, or None."""
    return _CURRENT.propagation


@contextmanager
def following(propagation: Propagation) -> Any:
    """Activates `propagation` for the code of the block."""
    _CURRENT.propagation = propagation
    try:
        with propagation:
            yield
    finally:
        _CURRENT.propagation = None


def without_partial(placements: Placements) -> Placements:
    """Returns the placements of a gradient: where the value is a pending sum, it is replicated."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


class Mark(torch.autograd.Function):
    """Autograd Function of `mark_sharding`: redistributes the value, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, propagation: Propagation, spec: P) -> Tensor:
        """Records the redistribution to the placements that the user asks for."""
        ctx.before, ctx.propagation = propagation.placements(x), propagation
        placements = placements_of(propagation.mesh, spec)
        propagation.redistribute(x, placements, "mark_sharding", False)
        y = x.clone()
        propagation.place(y, placements)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Records the redistribution of the gradient to the placements of the operand."""
        dst = without_partial(ctx.before)
        ctx.propagation.redistribute(grad, dst, "mark_sharding", False)
        back = grad.clone()
        ctx.propagation.place(back, dst)
        return back, None, None
