"""DTensors under torch's LocalTensorMode, which holds the shards of all ranks in one process."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.peers.problem import FORWARD, GRADIENTS, NUM_RANKS, mlp
from benchmarks.peers.serving import Contestant, serve

NAME = "LocalTensorMode, DTensor"


def total(values: tuple[Tensor, ...]) -> float:
    """Adds up the magnitudes of DTensors."""
    found = 0.0
    for each in values:
        assert isinstance(each, DTensor)
        value = each.detach().full_tensor().reconcile()  # type: ignore[attr-defined]  # LocalTensor
        found += float(value.double().abs().sum())
    return found


def forward(x: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor]:
    """Computes the MLP; torch propagates the placements."""
    y = torch.relu(x @ w1) @ w2
    assert isinstance(y, DTensor)
    return (y.redistribute(placements=[Replicate()]),)


def gradients(leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Takes the gradients of the sum of the results."""
    return torch.autograd.grad(forward(*leaves)[0].sum(), leaves)


def main() -> None:
    """Serves the forward and the gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    mode = LocalTensorMode(NUM_RANKS)
    placements: list[list[Placement]] = [[Replicate()], [Shard(1)], [Shard(0)]]
    with mode:
        mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
        operands = [
            distribute_tensor(torch.from_numpy(each), mesh, placement)
            for each, placement in zip(mlp(), placements, strict=True)
        ]
        leaves = [each.detach().clone().requires_grad_() for each in operands]
    cases = {
        (FORWARD, NAME): Contestant(partial(forward, *operands), total),
        (GRADIENTS, NAME): Contestant(partial(gradients, leaves), total),
    }
    serve(f"torch {torch.__version__}", cases, lambda: mode)


if __name__ == "__main__":
    main()
