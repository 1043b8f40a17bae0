"""Transports name what is wrong, and hand out tags in order."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.errors import KernelError
from shardmap_torch.kernels import transport as module
from shardmap_torch.kernels.executor import Choice, Gather
from shardmap_torch.kernels.planner import Fabric
from shardmap_torch.kernels.schedule import Chunk, Message
from shardmap_torch.kernels.transport import Channel, GlooTransport, TagCounter
from tests.kernels.support.virtual_network import VirtualNetwork
from tests.support.golden import told

TO_PEER = Message(source=0, target=1, chunk=Chunk(owner=0, part=3), step=2)


class Broken:
    """A process group whose peer is gone: at once, or when it is waited for."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> "Broken":
        if self.at_once:
            self.wait()
        return self

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


@pytest.fixture
def gloo_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "network_of", lambda group, device_type: "gloo")
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)


@pytest.mark.usefixtures("gloo_rank_0")
@pytest.mark.parametrize("at_once", [True, False])
def test_a_failed_transfer_names_axis_step_chunk_and_peer(at_once: bool) -> None:
    group: Any = Broken(at_once)
    channel = Channel.open(GlooTransport(group, "tp"), "all_gather_matmul", num_parts=4)
    with told(KernelError) as caught:
        channel.send(torch.zeros(1), TO_PEER).wait()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_group_that_is_not_gloo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "network_of", lambda group, device_type: "nccl")
    group: Any = object()
    with told(KernelError):
        GlooTransport(group, "tp")


def test_tags_of_calls_in_flight_do_not_meet_and_start_again_below_the_limit() -> None:
    tags = TagCounter()
    assert [tags.reserve_tags(10), tags.reserve_tags(5), tags.reserve_tags(1)] == [0, 10, 15]
    assert tags.reserve_tags(TagCounter.LIMIT - 16) == 16
    assert tags.reserve_tags(1) == 0


def virtual() -> VirtualNetwork:
    return VirtualNetwork(2, Fabric(latency=1.0, bandwidth=1.0, flops=1.0))


def test_a_gather_has_nothing_to_add() -> None:
    transport = virtual().transports[0]
    gather = Gather(transport, "op", torch.ones(1, 1), lambda *_: None, Choice("gather/ring", 1))
    with pytest.raises(NotImplementedError):
        gather.combine(Chunk(0, 0))
