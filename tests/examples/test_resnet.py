"""A ResNet's rows over an axis train as on one device, running statistics included."""

import torch.distributed as dist

from examples.resnet import main
from tests.support.fuzzing import sized
from tests.support.pool import Gloo


def test_a_resnet_on_simulated_ranks_is_that_of_one_device() -> None:
    assert main(sized(6, 20)) < 1e-12


def train() -> None:
    assert dist.get_world_size() == 2
    assert main(3) < 1e-12


def test_a_resnet_on_processes_is_that_of_one_device(gloo: Gloo) -> None:
    gloo(2).run(train, timeout=120)
