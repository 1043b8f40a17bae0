"""Devices get the right transport, and say what keeps a call on a GPU from overlapping."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.kernels import endpoint
from shardmap_torch.kernels.endpoint import OBSTACLES, Situation, endpoint_of, obstacle
from shardmap_torch.kernels.transport import (
    GlooTransport,
    NcclTransport,
    StagedTransport,
    network_of,
)
from shardmap_torch.mesh import make_mesh
from tests.support.pool import Gloo

GPU = torch.device("cuda", 0)


def operand(device: str = "cuda:0", dtype: torch.dtype = torch.float32) -> Any:
    """Stands in for a tensor, with the attributes that are looked at."""
    return SimpleNamespace(device=torch.device(device), dtype=dtype)


def first_obstacle(
    *operands: Any, overlap: Any = "require", network: str = "nccl", captured: bool = False
) -> str | None:
    mesh = SimpleNamespace(axis_names=("tp",), num_ranks=lambda axes: 2)
    backend = mock.create_autospec(ProcessGroupBackend, instance=True)
    backend.mesh = mesh
    with (
        mock.patch.object(endpoint, "_network", return_value=network),
        mock.patch.object(endpoint, "is_captured", return_value=captured),
    ):
        return obstacle(Situation("all_gather_matmul", backend, ("tp",), overlap, operands))


UNTRIED = 'on a GPU the kernels have never run, and only overlap="require" takes them'


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (lambda: first_obstacle(operand(), operand()), None),
        (lambda: first_obstacle(operand(), network="gloo"), None),
        (lambda: first_obstacle(operand(), captured=True), None),
        (lambda: first_obstacle(operand(), overlap="auto"), UNTRIED),
        (lambda: first_obstacle(operand("cpu"), overlap="auto", network="gloo"), None),
        (
            lambda: first_obstacle(operand(), operand("cuda:1")),
            "the operands are not all on the CPU, nor all on one GPU",
        ),
        (
            lambda: first_obstacle(operand(), operand("cpu")),
            "the operands are not all on the CPU, nor all on one GPU",
        ),
        (
            lambda: first_obstacle(operand("meta")),
            "the operands are not all on the CPU, nor all on one GPU",
        ),
        (
            lambda: first_obstacle(operand(), operand(dtype=torch.float64)),
            "the operands are not of one floating dtype",
        ),
        (
            lambda: first_obstacle(operand(), network="ucc"),
            "the process group has neither gloo nor, for a GPU, NCCL",
        ),
        (
            lambda: first_obstacle(operand("cpu"), network="nccl"),
            "the process group has neither gloo nor, for a GPU, NCCL",
        ),
        (
            lambda: first_obstacle(operand(), network="gloo", captured=True),
            "a CUDA graph is captured, and gloo would wait on the host",
        ),
    ],
)
def test_what_keeps_a_call_on_a_gpu_from_overlapping(found: Any, why: str | None) -> None:
    assert found() == why
    assert why is None or why in [reason for reason, _ in OBSTACLES]


def test_autocast_of_the_operands_device_is_an_obstacle_that_of_another_is_none() -> None:
    backend = object.__new__(ProcessGroupBackend)
    backend.mesh = mock.Mock(kind="process_group")
    assert endpoint.place_of(backend, "auto") is backend
    with torch.autocast("cpu", torch.bfloat16):
        assert first_obstacle(operand()) is None
        assert first_obstacle(operand("cpu"), network="gloo") == "autocast is active"
        assert endpoint.place_of(backend, "auto") is None
        assert endpoint.place_of(backend, "off") is backend  # the composition, whatever is active


def transports() -> list[str]:
    backend = ProcessGroupBackend(make_mesh((dist.get_world_size(),), ("tp",)))
    found = [network_of(backend.mesh.group(("tp",)), "cpu")]
    with mock.patch.object(endpoint, "CudaLanes", return_value=mock.sentinel.lanes) as made:
        on_host = endpoint_of(backend, ("tp",)).transport
        assert isinstance(on_host, GlooTransport)
        staged = endpoint_of(backend, ("tp",), GPU).transport
        assert isinstance(staged, StagedTransport)
        assert isinstance(staged.network, GlooTransport)
        assert staged.lanes is mock.sentinel.lanes
        assert endpoint_of(backend, ("tp",), GPU).transport is staged
        with mock.patch.object(endpoint, "network_of", return_value="nccl"):
            nccl = endpoint_of(backend, ("tp",), torch.device("cuda", 1)).transport
        assert isinstance(nccl, NcclTransport)
        assert (nccl.rank, nccl.num_ranks) == (dist.get_rank(), dist.get_world_size())
        assert made.call_args_list == [mock.call(GPU), mock.call(torch.device("cuda", 1))]
    return found


def test_each_device_of_a_rank_has_a_transport_that_suits_it(gloo: Gloo) -> None:
    assert gloo(2).run(transports) == [["gloo"]] * 2


def test_a_backend_that_a_group_does_not_have_is_no_network() -> None:
    group = mock.Mock()
    group._get_backend.side_effect = RuntimeError("No backend type associated with device type")
    assert network_of(group, "cuda") == ""
