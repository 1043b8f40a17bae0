"""`loss_parallel`: cross-entropy of logits that stay sharded over the classes."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardmap_torch.boundary.placements import spec_of
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.modes import FunctionMode
from shardmap_torch.errors import SpecError
from shardmap_torch.mesh import Mesh, as_mesh
from shardmap_torch.nn import vocab_parallel_cross_entropy
from shardmap_torch.ops.body import mesh_of_body
from shardmap_torch.parallel.module import resolve_axis
from shardmap_torch.spec import Entry, P
from shardmap_torch.transform import shard_map


@contextmanager
def loss_parallel(
    mesh: Mesh | DeviceMesh | None = None, *, axis: str | None = None
) -> Iterator[None]:
    """Makes `cross_entropy` keep logits sharded over the classes; a context manager.

    Within it, `torch.nn.functional.cross_entropy` and `torch.nn.CrossEntropyLoss` of a DTensor
    whose class dim is sharded over one mesh axis compute the loss without gathering it, checked as
    any `shard_map`. All their arguments work, `weight` and `label_smoothing` included, with class
    numbers as targets. Other dims of the logits may be sharded over other axes: sums and means are
    those of the global batch. The backward may run outside of it, and an exception inside leaves
    nothing behind. Everything else runs as it would outside.

    Shape: a scalar, or the targets' for `reduction="none"`. The result is a plain tensor, equal on
    all ranks; with "none" and a sharded batch a DTensor, sharded as the batch. Moves: three
    all-reduces of one number per position, backward nothing; two scalars per sharded batch.

    Args:
        mesh: with it plain logits are global ones, to be sharded over `axis`, so that a simulated
            mesh runs what processes would run. Without it they are left to torch.
        axis: the axis of the classes for plain logits; may be left out if the mesh has one axis.

    Raises:
        SpecError: in `cross_entropy`: logits whose class dim is not sharded over one axis, targets
            that are no class numbers, or a plain target beside a sharded batch.

    Source: `torch.distributed.tensor.parallel.loss_parallel`, which has no label smoothing, no mean
    on meshes of several axes, and stays on after an exception.

    Example:
        >>> from torch.nn import functional
        >>> from shardmap_torch import loss_parallel, make_mesh
        >>> logits, target = torch.zeros(3, 4), torch.tensor([0, 3, 1])
        >>> with loss_parallel(make_mesh((2,), ("tp",), kind="simulated")):
        ...     functional.cross_entropy(logits, target)
        tensor(1.3863)
    """
    if mesh is None and axis is not None:
        raise SpecError("loss_parallel: axis is for plain logits on a mesh; pass the mesh too.")
    on = None if mesh is None else as_mesh(mesh)
    with _CrossEntropyMode(on, "" if on is None else resolve_axis("loss_parallel", on, axis)):
        yield


class _CrossEntropyMode(FunctionMode):
    def __init__(self, mesh: Mesh | None, axis: str) -> None:
        super().__init__()
        self._mesh, self._axis = mesh, axis

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is functional.cross_entropy and mesh_of_body() is None:
            bound = _SIGNATURE.bind(*args, **kwargs)
            bound.apply_defaults()
            logits = bound.arguments["input"]
            if isinstance(logits, DTensor):
                return _cross_entropy(**bound.arguments, **_layout_of(logits))
            if self._mesh is not None and isinstance(logits, Tensor):
                spec = P(*[None] * _class_dim(logits), self._axis)
                return _cross_entropy(**bound.arguments, mesh=self._mesh, spec=spec)
        return func(*args, **kwargs)


_SIGNATURE: Final = inspect.signature(functional.cross_entropy)


def _class_dim(logits: Tensor) -> int:
    return 1 if logits.ndim > 1 else 0


def _layout_of(logits: DTensor) -> dict[str, Any]:
    mesh = as_mesh(logits.device_mesh)
    spec = spec_of(logits, mesh)
    if not isinstance(spec, P) or spec.partial:
        raise SpecError(f"loss_parallel: logits cannot be sharded by {logits.placements}.")
    return {"mesh": mesh, "spec": spec}


def _cross_entropy(
    *,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    size_average: bool | None,
    ignore_index: int,
    reduce: bool | None,
    reduction: Any,
    label_smoothing: float,
    mesh: Mesh,
    spec: P,
) -> Tensor:
    class_dim = _class_dim(input)
    entries: list[Entry] = [*spec.entries, *[None] * (input.ndim - len(spec.entries))]
    axis = entries.pop(class_dim)
    batch = P(*entries)
    if axis is None:
        raise SpecError(
            f"loss_parallel: the classes, dim {class_dim} of the logits {list(input.shape)}, must "
            f"be sharded over a mesh axis, but their spec is {spec!r}. Give the last layer "
            "output_layouts=Shard(-1), use_local_output=False, or leave loss_parallel."
        )
    _check(input, target, batch, size_average, reduce, reduction, label_smoothing)
    dtype = torch.promote_types(
        torch.float32 if torch.is_autocast_enabled(input.device.type) else input.dtype, input.dtype
    )
    body = _Body(axis, class_dim, batch, reduction, ignore_index, float(label_smoothing), dtype)
    mapped = _MAPPED.get((id(mesh), mesh, spec, body), lambda: _map(mesh, body, spec))
    loss: Tensor = mapped(input, target, weight)
    return loss


@dataclass(frozen=True)
class _Body:
    """The loss on one rank, with the arguments of torch's function.

    Attributes:
        axis: over which classes are sharded.
        class_dim: their dim.
        batch: spec of the positions.
        reduction: as torch's, as are the next two.
        ignore_index: positions with this target do not count.
        label_smoothing: this part of each target is spread evenly over all classes.
        dtype: of the result.
    """

    axis: str | tuple[str, ...]
    class_dim: int
    batch: P
    reduction: Any
    ignore_index: int
    label_smoothing: float
    dtype: torch.dtype

    def __call__(self, logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        loss = vocab_parallel_cross_entropy(
            logits.movedim(self.class_dim, -1),
            target,
            self.axis,
            reduction=self.reduction,
            batch_axis=tuple(axis for _, axes in self.batch.sharded_dims for axis in axes),
            ignore_index=self.ignore_index,
            class_weight=weight,
            label_smoothing=self.label_smoothing,
        )
        return loss.to(self.dtype)


_MAPPED: Final = Memo[Callable[..., Any]]()


def _map(mesh: Mesh, body: _Body, spec: P) -> Callable[..., Any]:
    out = body.batch if body.reduction == "none" else P()
    specs = (spec, body.batch, P())
    return shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check="global")


def _check(
    logits: Tensor,
    target: Any,
    batch: P,
    size_average: bool | None,
    reduce: bool | None,
    reduction: Any,
    label_smoothing: float,
) -> None:
    problems = []
    expected = [size for dim, size in enumerate(logits.shape) if dim != _class_dim(logits)]
    if not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.uint8):
        problems.append("targets are class numbers, of int64; probabilities are not supported")
    elif list(target.shape) != expected:
        problems.append(f"targets have shape {expected} here, not {list(target.shape)}")
    elif batch.sharded_dims and isinstance(logits, DTensor) and not isinstance(target, DTensor):
        problems.append(
            f"the batch is sharded by {batch!r}, so the target is a DTensor sharded alike; make it "
            "by from_local or device_put"
        )
    if size_average is not None or reduce is not None:
        problems.append("size_average and reduce are not supported; use reduction")
    if reduction not in (names := ("none", "sum", "mean")):
        problems.append(f"reduction={reduction!r} is none of {', '.join(names)}")
    if not 0 <= label_smoothing <= 1:
        problems.append(f"label_smoothing={label_smoothing} is not within 0 and 1")
    if problems:
        raise SpecError(f"loss_parallel: {'; '.join(problems)}.")
