"""Where a call stands: its axes, the group under them, and what keeps it from overlapping."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from shardmap_torch.backend import Backend
from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.kernels import calibrate
from shardmap_torch.kernels.cost import Fabric
from shardmap_torch.kernels.plan import Overlap
from shardmap_torch.kernels.transport_gloo import GlooTransport
from shardmap_torch.memo import constant

FLOATS: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Endpoint:
    """This rank's end of the network along some axes, and what is known of its speed."""

    transport: GlooTransport
    group: dist.ProcessGroup
    _fabrics: dict[torch.dtype, Fabric] = field(default_factory=dict)

    def fabric(self, dtype: torch.dtype) -> Fabric:
        """Measured at the first call for a dtype, which every rank of the axes makes together."""
        if dtype not in self._fabrics:
            # torch.func.grad may be active; what is measured is none of its business.
            with temporarily_clear_interpreter_stack():
                self._fabrics[dtype] = calibrate.measure(self.transport, dtype)
        return self._fabrics[dtype]

    def assume(self, dtype: torch.dtype, fabric: Fabric) -> None:
        """Takes `fabric` as measured, before the first call; every rank must assume the same."""
        self._fabrics[dtype] = fabric


_ENDPOINTS: dict[tuple[int, tuple[str, ...]], Endpoint] = {}


def endpoint_of(backend: ProcessGroupBackend, axes: tuple[str, ...]) -> Endpoint:
    """The endpoint along `axes` of the backend's mesh, on a process group of the kernels' own."""
    mesh = backend.mesh
    group = mesh.group(axes, "kernels")
    key = (id(mesh), axes)
    endpoint = _ENDPOINTS.get(key)
    if endpoint is None or endpoint.group is not group:
        axis = axes[0] if len(axes) == 1 else str(axes)
        endpoint = _ENDPOINTS[key] = Endpoint(GlooTransport(group, axis), group)
    return endpoint


@dataclass(frozen=True, slots=True)
class Situation:
    """What decides whether a call may overlap, apart from its size."""

    op: str
    backend: Backend
    axes: tuple[str, ...]
    overlap: Overlap
    operands: Sequence[Tensor]


def _is_transformed(s: Situation) -> bool:
    """Under anything but torch.func.grad and vjp, which the kernels' Function knows."""
    if torch.compiler.is_compiling():  # Dynamo cannot read either, and is told below.
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    others = any(level.key() != TransformType.Grad for level in levels)
    return others or forward_ad._current_level >= 0


def _is_left_to_inductor(s: Situation) -> bool:
    return torch.compiler.is_compiling() and s.overlap != "require"


def _has_no_processes(s: Situation) -> bool:
    return not isinstance(s.backend, ProcessGroupBackend)


def _is_out_of_order(s: Situation) -> bool:
    return s.axes != tuple(axis for axis in s.backend.mesh.axis_names if axis in s.axes)


def _is_off_cpu(s: Situation) -> bool:
    return any(operand.device.type != "cpu" for operand in s.operands)


@constant
def _group_backend(backend: Backend, axes: tuple[str, ...]) -> str:
    return str(dist.get_backend(backend.mesh.group(axes)))


def _lacks_gloo(s: Situation) -> bool:
    return _group_backend(s.backend, s.axes) != "gloo"


def _mixes_dtypes(s: Situation) -> bool:
    dtype = s.operands[0].dtype
    return dtype not in FLOATS or any(operand.dtype != dtype for operand in s.operands)


OBSTACLES: Final[tuple[tuple[str, Callable[[Situation], bool]], ...]] = (
    ("overlap is off", lambda s: s.overlap == "off"),
    ("the mesh has no process groups here", _has_no_processes),
    ("the axes have one rank", lambda s: s.backend.mesh.num_ranks(s.axes) == 1),
    ("the axes are not in mesh order", _is_out_of_order),
    ("a transform other than torch.func.grad and vjp is active", _is_transformed),
    ("torch.compile is active, whose own fusions need the composition", _is_left_to_inductor),
    ("autocast is active", lambda s: torch.is_autocast_enabled("cpu")),
    ("the operands are not on the CPU, the one device the kernels were run on", _is_off_cpu),
    ("the operands are not of one floating dtype", _mixes_dtypes),
    ("the process group is not gloo's", _lacks_gloo),
)
"""Why a call runs unfused, first reason first; a later one may rely on those before it."""


def is_checked(backend: Backend) -> bool:
    """Whether the checker interprets the body: it sees the composition, whatever was required.

    A simulated mesh is not meant: there a required overlap is refused while checking already.
    """
    return backend.mesh.kind != "simulated" and not isinstance(backend, ProcessGroupBackend)


def is_ordinary(backend: Backend) -> bool:
    """Whether a call is decided by its arguments alone: eager, on processes, no mode active."""
    return (
        not torch.compiler.is_compiling()
        and type(backend) is ProcessGroupBackend
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
    )


def obstacle(situation: Situation) -> str | None:
    """The first obstacle, if there is one."""
    return next((why for why, holds in OBSTACLES if holds(situation)), None)
