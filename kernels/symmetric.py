"""Engine of torch's fused operators on symmetric memory, used where a group's GPUs offer them.

Symmetric memory lets a GPU read its peers' memory, so a block is pulled straight to where it is
multiplied. torch has operators in the `symm_mem` namespace that do it, without derivatives; this
module calls them, and adds the backward passes.
"""

import importlib
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.core.torch_private.engine import has_kernel
from shardmap_torch.kernels.algorithms import ChunkedDim
from shardmap_torch.kernels.executor import Choice
from shardmap_torch.kernels.planner import Fabric, Options, Plan, Problem

CHOICE: Final = Choice("symmetric memory", 1)

OPERATORS: Final = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")

OVERLAPPING: Final = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch's switch for several ranks on one GPU, as tests have them."""


@dataclass(frozen=True, slots=True)
class Operators:
    """torch's fused operators on one group.

    Attributes:
        group_name: The group's name in torch's registry.
    """

    group_name: str

    def gather_matmul(
        self, x: Tensor, ws: Sequence[Tensor], dim: int
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns the x gathered along `dim`, and its products."""
        with torch.cuda.device_of(x):  # torch makes the operator's workspace on this device.
            full, products = torch.ops.symm_mem.fused_all_gather_matmul(
                _outermost(x, dim), list(ws), dim, self.group_name, return_A=True
            )
        return full, products

    def matmul_scatter(self, x: Tensor, w: Tensor, dim: int) -> Tensor:
        """Returns this rank's block, along `dim`, of the sum of x @ w."""
        with torch.cuda.device_of(x):
            block: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
                _outermost(x, dim), w, "sum", dim, self.group_name
            )
        return block


@dataclass(frozen=True, slots=True)
class Symmetric:
    """Runs the kernels' operations by fused operators.

    Its methods are those of `engine.Scheduled`; `dim` is the sharded dim.
    """

    operators: Operators

    def plan(
        self, problem: Problem, fabric: Callable[[], Fabric], chunks: int | None, *, forced: bool
    ) -> Plan:
        """Always overlaps; torch's operators have no schedules."""
        return Plan(problem.op, problem.axis, CHOICE, "required, and the GPUs share memory")

    def gather(
        self,
        x: Tensor,
        ws: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        dim: int,
        choice: Choice,
    ) -> tuple[list[Tensor], Tensor]:
        """Returns the products with the gathered x, and its chunked matrix."""
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
        """Returns dx and the needed dws; dx is one product with the concatenated weights."""
        chunked = ChunkedDim.of(dim, x.ndim)
        dy, w = (dys[0], ws[0]) if len(ws) == 1 else (torch.cat([*dys], -1), torch.cat([*ws], -1))
        dx = self.scatter(dy, w.t(), dim, choice)
        dws = [
            gathered.t() @ chunked.tokens(dy) if want and gathered is not None else None
            for dy, want in zip(dys, needs_grad, strict=True)
        ]
        return dx, dws

    def scatter(self, x: Tensor, w: Tensor, dim: int, choice: Choice) -> Tensor:
        """Returns this rank's block of the sum of x @ w."""
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
        """Returns the needed (dx, dw) from one gather of dy, which only dx overlaps."""
        full, (dx,) = self.operators.gather_matmul(dy, [w.t()], dim)
        chunked = ChunkedDim.of(dim, x.ndim)
        dw = chunked.tokens(x).t() @ chunked.tokens(full) if needs_grad[1] else None
        return dx if needs_grad[0] else None, dw


def _outermost(x: Tensor, dim: int) -> Tensor:
    """Returns `x` with `dim` outermost in memory: the operators refuse other layouts, or copy."""
    return x.movedim(dim, 0).contiguous().movedim(0, dim)


def unsuited(op: str, by_features: bool, options: Options) -> str | None:
    """Returns why a call cannot use the operators, or None."""
    reasons = (
        ("it has no operator for matmul_all_reduce", op == "matmul_all_reduce"),
        ("the last dim is sharded", by_features),
        ("save_gathered=False gathers twice", not options.save_gathered),
        ("chunks are asked for", options.chunks is not None),
    )
    return next((why for why, holds in reasons if holds), None)


def refusal(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Returns why the GPUs of a group share no memory, or None.

    Every rank of the group must call it; it communicates, and waits on the host. All get the same
    answer: a rank that ran another path than its peers would wait for them for ever.
    """
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: lacking(device.type),
        lambda: unreachable(device, everywhere(group, GpuId.of(device)), dist.get_rank(group)),
        lambda: failing(str(group.group_name), device),
    )
    # One after the other: a rendezvous that a rank does not join hangs, or crashes the others.
    for check in checks:
        reasons: list[str | None] = everywhere(group, check())
        if any(reasons):
            return next(why for why in reasons if why)
    return None


def everywhere(group: dist.ProcessGroup, own: Any) -> list[Any]:
    """Gathers a Python object of every rank of the group, by rank."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, own, group=group)
    return values


def lacking(device_type: str) -> str | None:
    """Returns the first operator that this torch lacks, as a reason, or None."""
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError:
        return "this torch has none"
    for name in OPERATORS:
        if not hasattr(torch.ops.symm_mem, name):
            return f"this torch has no operator symm_mem::{name}"
        if not has_kernel(f"symm_mem::{name}", device_type.upper()):
            return f"symm_mem::{name} does not run on {device_type}"
    return None


@dataclass(frozen=True, slots=True)
class GpuId:
    """Identity of a rank's GPU: its host and its UUID."""

    host: str
    gpu: str

    @classmethod
    def of(cls, device: torch.device) -> "GpuId":
        """Identifies this rank's device."""
        return cls(f"{socket.gethostname()}/{uuid.getnode()}", _gpu(device.index))


def _gpu(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def unreachable(device: torch.device, gpus: Sequence[GpuId], rank: int) -> str | None:
    """Returns why this rank cannot read the GPU of some peer, or None."""
    own = gpus[rank]
    visible = {_gpu(index): index for index in range(torch.cuda.device_count())}
    for peer, other in enumerate(gpus):
        if peer == rank:
            continue
        if other.host != own.host:
            return f"ranks {rank} and {peer} are on different hosts"
        if other.gpu == own.gpu:
            if os.environ.get(OVERLAPPING) != "1":
                return f"ranks {rank} and {peer} share a GPU, and {OVERLAPPING} is not 1"
        elif other.gpu not in visible:
            return f"rank {rank} does not see the GPU of rank {peer}"
        elif not torch.cuda.can_device_access_peer(device.index, visible[other.gpu]):
            return f"the GPU of rank {rank} cannot read that of rank {peer}"
    return None


def failing(group_name: str, device: torch.device) -> str | None:
    """Tries to make a small workspace for the operators; returns the error as a reason, or None."""
    module: Any = importlib.import_module("torch.distributed._symmetric_memory")
    try:
        with torch.cuda.device(device):
            module.get_symm_mem_workspace(group_name, min_size=1024)
    except RuntimeError as error:
        return f"its workspace cannot be made: {str(error).splitlines()[0]}"
    return None
