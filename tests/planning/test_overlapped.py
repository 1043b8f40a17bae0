"""Overlapped kernels send their chunks beside the matmuls of others, as their schedules say."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, P, ShapeDtype, make_mesh, shard_map
from shardmap_torch.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from shardmap_torch.planning import Estimate, Hardware, estimate

UNIT = Hardware(
    "unit", {torch.float32: 1e3}, memory=10**9, bandwidth=inf, matmul_efficiency=0.5, launch=0.0,
    inside=100.0, between=100.0, latency=0.0, latency_between=0.0,
)  # fmt: skip
"""A device on which 5 rows of 10 features times 10 x 10 take 2 s, and 2 s to be sent."""

Overlap = Literal["require", "off"]


def gather(x: Tensor, w: Tensor, overlap: Overlap) -> Tensor:
    return all_gather_matmul(x, w, "tp", dim=0, overlap=overlap, chunks=1)


def scatter(x: Tensor, w: Tensor, overlap: Overlap) -> Tensor:
    return matmul_reduce_scatter(x, w, "tp", dim=0, overlap=overlap, chunks=1)


def reduce(x: Tensor, w: Tensor, overlap: Overlap) -> Tensor:
    return matmul_all_reduce(x, w, "tp", dst=I, overlap=overlap, chunks=1)


def found(
    kernel: Callable[..., Any], num_ranks: int, link: float, overlap: Overlap, grad: bool = False
) -> Estimate:
    """Estimates a kernel whose blocks have 5 rows on every rank, over a link of bytes a second."""
    mesh = make_mesh((num_ranks,), ("tp",), kind="abstract")
    rows, features = (5 * num_ranks, 10) if kernel is gather else (5 * num_ranks, 10 * num_ranks)
    sharded = P("tp") if kernel is gather else P(None, "tp")
    weights = P() if kernel is gather else P("tp")
    f = shard_map(
        lambda x, w: kernel(x, w, overlap),
        mesh=mesh,
        in_specs=(sharded, weights),
        out_specs=P("tp") if kernel is scatter else P(),
    )
    x, w = (ShapeDtype(shape, requires_grad=grad) for shape in ((rows, features), (features, 10)))
    return estimate(f, x, w, hardware=replace(UNIT, inside=link))


@pytest.mark.parametrize(
    ("kernel", "num_ranks", "link", "overlapped", "composed"),
    [
        # Four products of 2 s; the first needs no message, and three of 2 s arrive under others.
        (gather, 4, 100.0, 8.0, 6.0 + 8.0),
        # Messages of 4 s are slower: the last product begins when all three have arrived.
        (gather, 4, 50.0, 12.0 + 2.0, 12.0 + 8.0),
        # The other rank's addend is sent while the own one is computed.
        (scatter, 2, 100.0, 4.0, 4.0 + 2.0),
        (scatter, 2, 50.0, 2.0 + 4.0, 4.0 + 4.0),
        # Then each sends its finished rows; a sum at once sends the same around a ring.
        (reduce, 2, 100.0, 4.0 + 2.0, 4.0 + 4.0),
    ],
)
def test_messages_of_a_kernel_hide_behind_its_products(
    kernel: Callable[..., Any], num_ranks: int, link: float, overlapped: float, composed: float
) -> None:
    with_overlap, without = (found(kernel, num_ranks, link, o) for o in ("require", "off"))
    assert with_overlap.seconds == pytest.approx(overlapped)
    assert without.seconds == pytest.approx(composed)
    assert with_overlap.flops == without.flops
    assert with_overlap.sent == without.sent


def test_a_chunk_is_forwarded_as_it_arrives_and_not_after_the_product_that_runs() -> None:
    spans = found(gather, 4, 400.0, "require").spans
    messages = [(span.start, span.end) for span in spans if span.lane == "messages"]
    assert messages == [(0.0, 0.5), (0.5, 1.0), (1.0, 1.5)]


def test_an_addend_is_sent_when_it_is_computed() -> None:
    spans = found(scatter, 4, 400.0, "require").spans
    messages = [(span.start, span.end) for span in spans if span.lane == "messages"]
    assert messages == [(2.0, 2.5), (4.0, 4.5), (6.0, 6.5)]


def test_the_backward_sends_beside_the_gradient_of_the_weight() -> None:
    plan = found(gather, 2, 50.0, "require", grad=True)
    # Forward: 2 s, the rest of a message of 4 s, 2 s. Backward: the addend of the other rank in
    # 2 s, sent in 4 s while the own one, 2 s, and the gradient of the weight, 4 s, are computed.
    # The sum of the weight's gradients, of 400 bytes, waits for all of it.
    assert plan.seconds == pytest.approx(6.0 + 2.0 + 2.0 + 4.0 + 8.0)
    assert plan.exposed["tp"] == pytest.approx(2.0 + 8.0)
