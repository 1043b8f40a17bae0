"""PlainInputs: compares plain arguments between processes, on which they must be equal.

A plain tensor that enters a body is a global value, equal on all processes; each takes its shard of
its own copy. If the copies differ, like the batches of a DistributedSampler or parameters from
different seeds, the result would be silently wrong. So processes compare a hash of each copy.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.core.dtensors import is_dtensor
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.hashing import hash_of
from shardmap_torch.core.source_location import call_site
from shardmap_torch.errors import SpecError, listing, show_shape
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P

VARIABLE: Final = "SHARDMAP_DEBUG"


class PlainInputs:
    """Compares the plain inputs of one function's calls."""

    def __init__(self, always: bool) -> None:
        """Compares in each call if `always`, else in the first one of each signature."""
        self._always = always
        self._compared: set[Any] = set()

    def require_equal(self, call: Call, gather: Callable[[Tensor], Tensor]) -> None:
        """Requires that every process passes the same plain tensors; sends 8 bytes per tensor.

        `gather` stacks a tensor of all processes, in rank order.

        All processes compare in a call, or none does, independently of what a process has to check
        again. The environment variable SHARDMAP_DEBUG, if set, decides instead: 1 compares in every
        call, and 0 in none.

        Raises:
            SpecError: values differ; names the arguments and ranks, on every process.
        """
        if call.mesh.size == 1 or not self._compares(call):
            return
        plain = list(_plain_leaves(call))
        if not plain:
            return
        hashes = torch.stack([hash_of(x) for _, x, _ in plain]).to(call.mesh.device or "cpu")
        rows = gather(hashes).tolist()
        problems, repairs = [], set()
        for at, (path, x, spec) in enumerate(plain):
            ranks = _unlike([row[at] for row in rows])
            if ranks:
                problems.append(
                    f"{path}: {show_shape(x.dtype, x.shape)}, {spec!r}, has other values on "
                    f"{ranks} than on rank 0"
                )
                repairs.add(_repair(path, spec, call.mesh))
        if problems:
            site = call_site()
            place = f" at {site}" if site is not None else ""
            head = (
                f"{call.name}: a plain tensor is a global value, equal on all processes, and these "
                f"are not{place}:"
            )
            fixes = [f"Fix: {repair}" for repair in sorted(repairs)]
            raise SpecError("\n".join([listing(head, problems), *fixes]))

    def _compares(self, call: Call) -> bool:
        asked = os.environ.get(VARIABLE)
        if asked is not None:
            return asked not in ("", "0")
        if self._always:
            return True
        shapes = [(x.shape, x.dtype) for x in call.leaves if isinstance(x, Tensor)]
        key = (call.mesh, call.structure, *shapes)
        is_new = key not in self._compared
        self._compared.add(key)
        return is_new


def _plain_leaves(call: Call) -> Iterator[tuple[str, Tensor, P]]:
    """Yields the plain tensor arguments, unwrapped, with their paths and specs."""
    for position in call.crossing:
        base = base_of(call.leaves[position])
        if not is_dtensor(base):
            yield call.match.paths[position], base.detach(), call.match.spec(position)


def _unlike(hashes: Sequence[int]) -> str:
    """Formats the ranks whose value differs from rank 0's."""
    ranks = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
    shown = ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
    return (f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}") if ranks else ""


def _repair(path: str, spec: P, mesh: Mesh) -> str:
    if spec.sharded_dims:
        return f"if {path} is this process' own shard, pass from_local({path}, mesh, {spec!r})."
    return (
        f"make {path} equal, by one seed on all processes or a broadcast of rank 0's; parameters "
        "of unlike seeds are unlike models."
    )
