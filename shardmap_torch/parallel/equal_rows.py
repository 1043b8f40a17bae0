"""Ranks that are given the same rows of a batch, or the same shards of a saved state."""

from collections.abc import Mapping
from math import prod

from torch import Tensor

from shardmap_torch.core.hashing import Bits, has_bits
from shardmap_torch.core.source_location import call_site, warn_at
from shardmap_torch.errors import SpecError, show_shape
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
    found = _equal(name, mesh, rows)
    if found is None or mesh.rank != 0:
        return
    (path, x), size = found, prod(mesh.shape[axis] for axis in axes)
    shown, axis = show_shape(x.dtype, x.shape), ", ".join(axes)
    spec = f"P({axes[0]!r})" if len(axes) == 1 else f"P({axes!r})"
    message = (
        f"{name}: all {size} ranks of {axis} got the same rows, as {path}, {shown}: each row of "
        f"the batch counts {size} times.\nFix: give each rank rows of its own, as by "
        f"DistributedSampler(data, num_replicas={size}, rank=...) with its position along {axis}; "
        f"or, where each rank reads the whole batch, device_put(batch, mesh, {spec})."
    )
    warn_at(call_site(), message)


def reject_equal_shards(name: str, mesh: Mesh, shards: Mapping[str, Tensor]) -> None:
    """Requires that ranks load shards of their own, and not all of them those of one rank.

    Nothing is asked where there are no shards; otherwise all ranks must call it.

    Raises:
        SpecError: all shards that have several numbers are the same on all ranks.
    """
    found = _equal(f"{name}.load_state_dict", mesh, shards) if shards else None
    if found is not None:
        path, x = found
        raise SpecError(
            f"{name}: load_state_dict got the same shards on all ranks, as {path}, "
            f"{show_shape(x.dtype, x.shape)} on each: they are those of one rank, whose "
            "state_dict() has no others.\n"
            "Fix: save by shardmap_torch.saving or torch.distributed.checkpoint; or let all ranks "
            "call get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)), "
            "one save what it returns, and all load it by set_model_state_dict with these options. "
            "With the states of an optimizer, which have the same shards: get_state_dict(module, "
            "optimizer, options=...) and set_state_dict."
        )


def _equal(name: str, mesh: Mesh, tensors: Mapping[str, Tensor]) -> tuple[str, Tensor] | None:
    """Returns the first of the tensors that have several numbers, if ranks have the same."""
    of_use = {path: x.detach() for path, x in tensors.items() if has_bits(x) and _differs_within(x)}
    control = control_of(mesh)
    if control is None:
        return None
    digest = Bits([*of_use.values()], None).digest()
    is_same = compared(name, mesh, list, lambda none: none, lambda _: control.is_common(digest))
    return next(iter(of_use.items()), None) if is_same else None


def _differs_within(x: Tensor) -> bool:
    first, *_ = [*x.detach().flatten()[:1]] or [None]
    return first is not None and bool((x != first).any())
