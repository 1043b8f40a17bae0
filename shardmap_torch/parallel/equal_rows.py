"""A warning where all ranks of the data axes get the same rows, so that they train alike."""

import warnings
from collections.abc import Mapping
from math import prod

from torch import Tensor

from shardmap_torch.core.hashing import Bits, has_bits
from shardmap_torch.core.source_location import call_site, warned_at
from shardmap_torch.errors import show_shape
from shardmap_torch.mesh import Mesh
from shardmap_torch.placing import compared, control_of


def warn_of_equal_rows(
    name: str, mesh: Mesh, axes: tuple[str, ...], rows: Mapping[str, Tensor]
) -> None:
    """Compares the rows that the processes of `axes` have; rank 0 warns if they are the same.

    A batch of one number, such as ones in a first trial, is no reason for a warning. The ranks
    exchange a hash, so all of them must call it. Source: torch's DistributedSampler, without which
    each process reads all rows.
    """
    of_use = {path: x.detach() for path, x in rows.items() if has_bits(x) and _differs_within(x)}
    control = control_of(mesh)
    if control is None:
        return
    digest = Bits([*of_use.values()], None).digest()
    is_same = compared(name, mesh, list, lambda none: none, lambda _: control.is_common(digest))
    if not (is_same and of_use and mesh.rank == 0):
        return
    (path, x), size = next(iter(of_use.items())), prod(mesh.shape[axis] for axis in axes)
    shown, axis = show_shape(x.dtype, x.shape), ", ".join(axes)
    spec = f"P({axes[0]!r})" if len(axes) == 1 else f"P({axes!r})"
    message = (
        f"{name}: all {size} ranks of {axis} got the same rows, as {path}, {shown}: each row of "
        f"the batch counts {size} times.\nFix: give each rank rows of its own, as by "
        f"DistributedSampler(data, num_replicas={size}, rank=...) with its position along {axis}; "
        f"or, where each rank reads the whole batch, device_put(batch, mesh, {spec})."
    )
    warnings.warn_explicit(message, UserWarning, *warned_at(call_site()), registry={})


def _differs_within(x: Tensor) -> bool:
    first, *_ = [*x.detach().flatten()[:1]] or [None]
    return first is not None and bool((x != first).any())
