"""The race detector refuses what would go wrong on a GPU, and nothing that would not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardmap_torch.kernels.lanes import Lane
from tests.kernels.support.races import RaceDetector, RaceError
from tests.support.golden import told

COMPUTE, TRANSFER, HOST = Lane.COMPUTE, Lane.TRANSFER, Lane.HOST


def order(d: RaceDetector, later: Lane, earlier: Lane) -> None:
    d.wait(later, d.record(earlier))


def write_on_transfer(d: RaceDetector, x: Tensor) -> None:
    d.keep(TRANSFER, x)
    with d.on(TRANSFER):
        x.fill_(1)


def watched(detector: RaceDetector, program: Callable[[], None]) -> None:
    with detector:
        program()
    detector.finish()


def allocated_after_the_mark(d: RaceDetector, x: Tensor) -> None:
    order(d, TRANSFER, COMPUTE)
    y = x.new_empty(3)
    write_on_transfer(d, y)


def freed_while_it_is_used(d: RaceDetector, x: Tensor) -> None:
    y = x + 1
    order(d, TRANSFER, COMPUTE)
    with d.on(TRANSFER):
        y.fill_(1)
    del y
    x.add_(1)


def host_waits(d: RaceDetector, x: Tensor) -> None:
    order(d, HOST, COMPUTE)


def asks_for_a_value(d: RaceDetector, x: Tensor) -> None:
    x.sum().item()


def copies_at_once(d: RaceDetector, x: Tensor) -> None:
    with d.issuing_to(2):
        buffer = torch.empty_like(x)
    x.copy_(buffer)


@pytest.mark.parametrize(
    "program",
    [
        allocated_after_the_mark,
        freed_while_it_is_used,
        host_waits,
        asks_for_a_value,
        copies_at_once,
    ],
)
def test_what_would_go_wrong_is_refused(program: Callable[[RaceDetector, Tensor], None]) -> None:
    x, detector = torch.zeros(4, 3), RaceDetector(rank=5)
    with told(RaceError):
        watched(detector, lambda: program(detector, x))


def test_the_host_may_wait_where_it_is_allowed_to() -> None:
    x, detector = torch.zeros(4, 3), RaceDetector(host_may_wait=True)
    with detector:
        order(detector, TRANSFER, COMPUTE)
        write_on_transfer(detector, x)
        order(detector, HOST, TRANSFER)
        x.add_(1)  # Issued after the host has seen the write's end.
    detector.finish()
