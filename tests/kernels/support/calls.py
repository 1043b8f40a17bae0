"""Calls of the kernels that several tests share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch import I, R, make_mesh
from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.collectives.scope import Scope, enter_scope
from shardmap_torch.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from shardmap_torch.kernels.endpoint import endpoint_of
from shardmap_torch.kernels.planner import Fabric

# Communication about as long as computation for the shapes of `plans`, whatever this host does.
BALANCED = Fabric(latency=1e-6, bandwidth=1e8, flops=6e9)


@contextmanager
def body(fabric: Fabric = BALANCED) -> Iterator[ProcessGroupBackend]:
    """A body over axis 'tp' of all processes, with a fabric that is assumed, not measured."""
    mesh = make_mesh((dist.get_world_size(),), ("tp",))
    backend = ProcessGroupBackend(mesh)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        endpoint_of(backend, ("tp",))._fabrics[dtype] = fabric
    with enter_scope(Scope(backend, frozenset(("tp",)))):
        yield backend


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Different on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# Leading dims, features, gathered or scattered dim of a rank's block; three chunks are uneven.
SHAPES = [
    ((6,), 4, 0),
    ((5, 2), 3, 0),
    ((2, 5), 3, 1),
    ((2, 2, 3), 2, -2),
    ((4,), 5, -1),
    ((2, 3), 4, 2),
]
Run = Callable[..., tuple[Tensor, ...]]


def gather_call(shape: Any, overlap: Any, chunks: int, save: bool) -> tuple[Run, list[Tensor]]:
    leading, features, dim = shape
    size = dist.get_world_size()
    inner = features * size if dim in (-1, len(leading)) else features
    operands = [normal(1, *leading, features)]
    operands += [normal(2, inner, 3), normal(3, inner, 2), normal(4, 3), normal(5, 2)]

    def call(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> tuple[Tensor, ...]:
        return all_gather_matmul(
            x,
            (w1, w2),
            "tp",
            bias=(b1, b2),
            dim=dim,
            chunks=chunks,
            save_gathered=save,
            overlap=overlap,
        )

    return call, operands


def scatter_call(shape: Any, overlap: Any, chunks: int, save: bool) -> tuple[Run, list[Tensor]]:
    leading, features, dim = shape
    whole = [*leading, features]
    whole[dim] *= dist.get_world_size()
    operands = [normal(1, *whole[:-1], 3), normal(2, 3, whole[-1])]
    bias_size = features if dim in (-1, len(leading)) else whole[-1]
    operands.append(normal(3, bias_size))

    def call(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        options = {"dim": dim, "bias": b, "chunks": chunks, "overlap": overlap}
        return (matmul_reduce_scatter(x, w, "tp", **options),)

    return call, operands


def reduce_call(shape: Any, overlap: Any, chunks: int, save: bool) -> tuple[Run, list[Tensor]]:
    leading, features, _ = shape
    rows = [leading[0] * dist.get_world_size() + 1, *leading[1:]]  # Uneven on purpose.
    operands = [normal(1, *rows, 3), normal(2, 3, features), normal(3, features)]

    def call(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        dst = R if save else I
        return (matmul_all_reduce(x, w, "tp", dst=dst, bias=b, chunks=chunks, overlap=overlap),)

    return call, operands


CALLS: dict[str, Callable[..., tuple[Run, list[Tensor]]]] = {
    "all_gather_matmul": gather_call,
    "matmul_reduce_scatter": scatter_call,
    "matmul_all_reduce": reduce_call,
}


def values_and_gradients(call: Run, operands: list[Tensor], *, twice: bool) -> list[Tensor]:
    """Outputs, first gradients and, if asked, gradients of a function of those."""
    leaves = [operand.clone().requires_grad_() for operand in operands]
    outs = call(*leaves)
    cotangents = [normal(50 + i, *out.shape, dtype=out.dtype) for i, out in enumerate(outs)]
    grads = torch.autograd.grad(outs, leaves, cotangents, create_graph=twice)
    if not twice:
        return [out.detach() for out in outs] + list(grads)
    # A cubic of the outputs would do as well; this one makes every second derivative count.
    second = sum((grad.pow(2).sum() for grad in grads), torch.zeros(()))
    return list(torch.autograd.grad(second, leaves, allow_unused=True, materialize_grads=True))
