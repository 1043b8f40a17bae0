"""The programs of `docs/field_bugs.md` under the checker of spmd_types, by its own API.

`python -m benchmarks.field_bugs_spmd_types` with spmd_types 0.3.1 on the path. The bodies are those
of `tests/checker/end_to_end/test_field_bugs.py`, reported and mended; their collectives become
those of spmd_types, with the layouts of the arguments and global typing. It types the forward and
gives each collective its transpose; the update after a gradient, which it does not type, is left
out.
Where it refuses the mended program too, what it says is about an annotation that is missing.
"""

from collections.abc import Callable
from typing import Any

import spmd_types as spmd
import torch
from spmd_types.checker import typecheck
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardmap_torch import P
from tests.checker.end_to_end import test_field_bugs as bugs

TYPES = {"I": spmd.I, "R": spmd.R, "V": spmd.V, "Partial": spmd.P}


def all_reduce(x: Tensor, axis: str, *, dst: Any, op: str = "sum") -> Tensor:
    total: Tensor = spmd.all_reduce(x, axis, src=spmd.P, dst=TYPES[str(dst)])
    return total / 2 if op == "mean" else total


def all_gather(x: Tensor, axis: str, *, dim: int, dst: Any) -> Tensor:
    whole: Tensor = spmd.all_gather(x, axis, src=spmd.S(dim), dst=TYPES[str(dst)])
    return whole


def reduce_scatter(x: Tensor, axis: str, *, dim: int) -> Tensor:
    part: Tensor = spmd.reduce_scatter(x, axis, src=spmd.P, dst=spmd.S(dim))
    return part


def convert(x: Tensor, axis: str, *, src: Any, dst: Any, dim: int | None = None) -> Tensor:
    # Arguments that are equal on all ranks are I here, so that this is what a user writes.
    to = TYPES[str(dst)] if dim is None else spmd.S(dim)
    found: Tensor = spmd.convert(x, axis, src=spmd.I, dst=to)
    return found


class DoneError(Exception):
    """Ends a step after its loss has been differentiated."""


def value_and_grad(loss: Callable[[Any], Tensor]) -> Callable[[Any], Any]:
    def run(params: Any) -> Any:
        loss(params).sum().backward()
        raise DoneError

    return run


ADAPTED: dict[str, Any] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "convert": convert,
    "value_and_grad": value_and_grad,
    "axis_index": lambda axis: spmd.reinterpret(
        torch.tensor(0), axis, src=spmd.R, dst=spmd.V, expert_mode=True
    ),
    "axis_size": lambda axis: 2,
}


def shard_of(x: Tensor, spec: P) -> tuple[Tensor, dict[str, Any]]:
    """Returns this rank's shard of an argument, and its types."""
    types = {"dp": spmd.I, "tp": spmd.I}
    for dim, axes in spec.sharded_dims:
        for axis in axes:
            x, types[axis] = x.chunk(2, dim)[0], spmd.S(dim)
    local = x.detach().clone()
    local.requires_grad_(x.is_floating_point())
    return local, types


def verdict(bug: Any, right: bool, mesh: DeviceMesh) -> str:
    """Returns what spmd_types says of a program."""
    shards = [shard_of(x, spec) for x, spec in zip(bug.args(), bug.in_specs, strict=True)]
    try:
        with spmd.set_current_mesh(mesh), typecheck(local=False):
            args = [spmd.assert_type(x, types) for x, types in shards]
            out = bug.program(right)(*args)
            out.sum().backward()
    except DoneError:
        return "accepted"
    except spmd.SpmdTypeError as error:
        return "refused: " + str(error).splitlines()[0]
    except Exception as error:  # what it has no rule for
        return f"cannot: {type(error).__name__}: {str(error).splitlines()[0]}"
    return "accepted"


def main() -> None:
    """Prints the verdicts on all programs."""
    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    for name, function in ADAPTED.items():
        setattr(bugs, name, function)
    for bug in bugs.BUGS:
        print(bug.name)
        for word, right in (("reported", False), ("mended", True)):
            print(f"  {word}: {verdict(bug, right, mesh)}")


if __name__ == "__main__":
    main()
