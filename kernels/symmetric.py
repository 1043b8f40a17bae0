"""torch's fused operators on symmetric memory: used where a group's GPUs offer them, never needed.

Symmetric memory lets a GPU read its peers' memory, so a block is pulled straight to where it is
multiplied. torch has operators of the `symm_mem` namespace that do it, without derivatives; here
they get the arguments that they expect, and the backward passes that the kernels have.
"""

import importlib
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.kernels.algorithms import ChunkedDim
from shardmap_torch.kernels.planner import Options, Plan, Problem
from shardmap_torch.kernels.planning.cost import Fabric
from shardmap_torch.kernels.transports.executor import Choice

CHOICE: Final = Choice("symmetric memory", 1)

SIGNATURES: Final[Mapping[str, Mapping[str, str]]] = {
    "fused_all_gather_matmul": {
        "A": "Tensor",
        "Bs": "List[Tensor]",
        "gather_dim": "int",
        "group_name": "str",
        "return_A": "bool",
    },
    "fused_matmul_reduce_scatter": {
        "A": "Tensor",
        "B": "Tensor",
        "reduce_op": "str",
        "scatter_dim": "int",
        "group_name": "str",
    },
}
"""The arguments that `Symmetric` passes, by name and type; torch may have others with defaults."""

OVERLAPPING: Final = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch's switch for several ranks on one GPU, as tests have them."""


class Fused(Protocol):
    """The two operators, or what stands in for them while a body is checked."""

    def gather_matmul(
        self, x: Tensor, ws: Sequence[Tensor], dim: int
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The x gathered along `dim`, and its products."""

    def matmul_scatter(self, x: Tensor, w: Tensor, dim: int) -> Tensor:
        """This rank's block, along `dim`, of the sum of x @ w."""


@dataclass(frozen=True, slots=True)
class Operators:
    """Those of torch, on one group.

    Attributes:
        group_name: The group's name in torch's registry.
    """

    group_name: str

    def gather_matmul(
        self, x: Tensor, ws: Sequence[Tensor], dim: int
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The x gathered along `dim`, and its products."""
        with torch.cuda.device_of(x):  # Where torch makes the operator's workspace.
            full, products = torch.ops.symm_mem.fused_all_gather_matmul(
                _outermost(x, dim), list(ws), dim, self.group_name, return_A=True
            )
        return full, products

    def matmul_scatter(self, x: Tensor, w: Tensor, dim: int) -> Tensor:
        """This rank's block, along `dim`, of the sum of x @ w."""
        with torch.cuda.device_of(x):
            block: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
                _outermost(x, dim), w, "sum", dim, self.group_name
            )
        return block


@dataclass(frozen=True, slots=True)
class Symmetric:
    """The engine made of them."""

    operators: Fused

    def plan(
        self, problem: Problem, fabric: Callable[[], Fabric], chunks: int | None, *, forced: bool
    ) -> Plan:
        """Always; torch's operators know no schedules."""
        return Plan(problem.op, problem.axis, CHOICE, "required, and the GPUs share memory")

    def gather(
        self,
        x: Tensor,
        ws: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        dim: int,
        choice: Choice,
    ) -> tuple[list[Tensor], Tensor]:
        """The products with the gathered x, and its cut matrix."""
        full, products = self.operators.gather_matmul(x, ws, dim)
        outs = [
            product.contiguous() if bias is None else (product + bias).contiguous()
            for product, bias in zip(products, biases, strict=True)
        ]
        return outs, ChunkedDim.of(dim, x.ndim).matrix(full)

    def gather_backward(
        self,
        x: Tensor,
        gathered: Tensor | None,
        ws: Sequence[Tensor],
        dys: Sequence[Tensor],
        needs_grad: Sequence[bool],
        dim: int,
        choice: Choice,
        again: Choice,
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """(dx, the wanted dws); the sum over weights is one product of all of them side by side."""
        chunked = ChunkedDim.of(dim, x.ndim)
        dy, w = (dys[0], ws[0]) if len(ws) == 1 else (torch.cat([*dys], -1), torch.cat([*ws], -1))
        dx = self.scatter(dy, w.t(), dim, choice)
        dws = [
            gathered.t() @ chunked.tokens(dy) if want and gathered is not None else None
            for dy, want in zip(dys, needs_grad, strict=True)
        ]
        return dx, dws

    def scatter(self, x: Tensor, w: Tensor, dim: int, choice: Choice) -> Tensor:
        """This rank's block of the sum of x @ w."""
        return self.operators.matmul_scatter(x, w, dim).contiguous()

    def scatter_backward(
        self,
        x: Tensor,
        w: Tensor,
        dy: Tensor,
        needs_grad: tuple[bool, bool],
        dim: int,
        choice: Choice,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The wanted of (dx, dw); one gather feeds both, but only dx is computed as it arrives."""
        full, (dx,) = self.operators.gather_matmul(dy, [w.t()], dim)
        chunked = ChunkedDim.of(dim, x.ndim)
        dw = chunked.tokens(x).t() @ chunked.tokens(full) if needs_grad[1] else None
        return dx if needs_grad[0] else None, dw


def _outermost(x: Tensor, dim: int) -> Tensor:
    """`x` with `dim` outermost in memory: the operators refuse other layouts, or copy."""
    return x.movedim(dim, 0).contiguous().movedim(0, dim)


def unsuited(op: str, by_features: bool, options: Options) -> str | None:
    """Why a call is none for the operators, or None."""
    reasons = (
        ("it has no operator for matmul_all_reduce", op == "matmul_all_reduce"),
        ("the last dim is sharded", by_features),
        ("save_gathered=False gathers twice", not options.save_gathered),
        ("a schedule is asked for", options.schedule is not None or options.chunks is not None),
    )
    return next((why for why, holds in reasons if holds), None)


def refusal(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the GPUs of a group share no memory, or None.

    Every rank of the group must ask; it communicates, and waits on the host. All get one answer:
    a rank that ran another path than its peers would wait for them for ever.
    """
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: lacking(device.type),
        lambda: unreachable(device, everywhere(group, Place.of(device)), dist.get_rank(group)),
        lambda: failing(str(group.group_name), device),
    )
    # One after the other: a rendezvous that a rank does not join hangs, or crashes the others.
    for check in checks:
        said: list[str | None] = everywhere(group, check())
        if any(said):
            return next(why for why in said if why)
    return None


def everywhere(group: dist.ProcessGroup, own: Any) -> list[Any]:
    """Gathers what every rank of the group reports, by rank."""
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, own, group=group)
    return said


def lacking(device_type: str) -> str | None:
    """Names the operators that this torch lacks."""
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError:
        return "this torch has none"
    for name, arguments in SIGNATURES.items():
        overload = getattr(getattr(torch.ops.symm_mem, name, None), "default", None)
        if overload is None or not accepts(overload._schema, arguments):
            return f"this torch has no operator symm_mem::{name}({', '.join(arguments)})"
        key = device_type.upper()
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", key):
            return f"symm_mem::{name} does not run on {device_type}"
    return None


def accepts(schema: Any, arguments: Mapping[str, str]) -> bool:
    """Returns whether an operator can be called with these arguments, in this order."""
    ours = list(arguments.items())
    theirs = [(argument.name, str(argument.type)) for argument in schema.arguments]
    rest = schema.arguments[len(ours) :]
    return theirs[: len(ours)] == ours and all(each.has_default_value() for each in rest)


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a rank's GPU."""

    host: str
    gpu: str

    @classmethod
    def of(cls, device: torch.device) -> "Place":
        """The place of this rank's device."""
        return cls(f"{socket.gethostname()}/{uuid.getnode()}", _gpu(device.index))


def _gpu(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def unreachable(device: torch.device, places: Sequence[Place], rank: int) -> str | None:
    """Names a GPU that this rank cannot read, or must not share; None if there is none."""
    own = places[rank]
    visible = {_gpu(index): index for index in range(torch.cuda.device_count())}
    for peer, place in enumerate(places):
        if peer == rank:
            continue
        if place.host != own.host:
            return f"ranks {rank} and {peer} are on different hosts"
        if place.gpu == own.gpu:
            if os.environ.get(OVERLAPPING) != "1":
                return f"ranks {rank} and {peer} share a GPU, and {OVERLAPPING} is not 1"
        elif place.gpu not in visible:
            return f"rank {rank} does not see the GPU of rank {peer}"
        elif not torch.cuda.can_device_access_peer(device.index, visible[place.gpu]):
            return f"the GPU of rank {rank} cannot read that of rank {peer}"
    return None


def failing(group_name: str, device: torch.device) -> str | None:
    """Returns the error of making the operators' workspace in a small size; None without one."""
    module: Any = importlib.import_module("torch.distributed._symmetric_memory")
    try:
        with torch.cuda.device(device):
            module.get_symm_mem_workspace(group_name, min_size=1024)
    except RuntimeError as error:
        return f"its workspace cannot be made: {str(error).splitlines()[0]}"
    return None
