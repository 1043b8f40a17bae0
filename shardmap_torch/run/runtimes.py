"""Runtimes of the kinds of mesh: one module each, loaded when first used."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.core.caching import constant
from shardmap_torch.core.tree import Tree
from shardmap_torch.mesh import PROCESS_KINDS, Kind, Mesh
from shardmap_torch.spec import P


class Runtime(Protocol):
    """Runs calls on meshes of one kind; each module named in `MODULES` is one.

    `run_local`, `join` and `gather_shards` are for `PROCESS_KINDS` only.

    Attributes:
        has_data: whether values have data; without data a call returns shapes.
    """

    has_data: bool

    def run(self, call: Call) -> Tree:
        """Runs a call."""
        ...

    def run_local(self, call: Call) -> Tree:
        """Runs the body of a call whose leaves are local already; returns local values."""
        ...

    def place(self, mesh: Mesh, spec: P, x: Tensor, as_dtensor: bool) -> Tensor:
        """Places a global value on the mesh; see `device_put`."""
        ...

    def join(self, mesh: Mesh, spec: P, x: Tensor) -> Tensor:
        """Makes a global value from local ones; see `from_local`."""
        ...

    def gather_shards(self, mesh: Mesh, x: Tensor) -> Tensor:
        """Gathers a DTensor to a plain global value, differentiably; see `full`."""
        ...


MODULES: Final[Mapping[Kind, str]] = {
    "simulated": "shardmap_torch.run.simulated",
    "process_group": "shardmap_torch.run.process_group",
    "abstract": "shardmap_torch.run.abstract",
}
"""The runtime of each kind of mesh."""

_LOADED: dict[str, Any] = {}


def runtime_of(mesh: Mesh) -> Runtime:
    """Returns the runtime of a mesh."""
    if torch.compiler.is_dynamo_compiling() or mesh.kind not in _LOADED:
        _load(mesh.kind)
    runtime: Runtime = _LOADED[mesh.kind]
    return runtime


def is_simulated(mesh: Mesh) -> bool:
    """Returns whether this process runs all ranks."""
    return mesh.kind not in PROCESS_KINDS and runtime_of(mesh).has_data


# A constant, so that Dynamo calls it instead of tracing an import.
@constant
def _load(kind: Kind) -> None:
    if kind not in _LOADED:
        _LOADED[kind] = import_module(MODULES[kind])
