"""The cost model against the virtual clock, the rule of `auto`, and the measured fabric."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.errors import KernelError
from shardmap_torch.kernels.algorithms import (
    gather_backward,
    gather_forward,
    product_backward,
    reduce_forward,
    scatter_forward,
)
from shardmap_torch.kernels.endpoint import _pessimistic, measure
from shardmap_torch.kernels.executor import Choice
from shardmap_torch.kernels.planner import (
    MAX_PARTS,
    MIN_GAIN,
    MIN_ROWS,
    Fabric,
    Problem,
    best,
    candidates,
    check_overlap,
    decide,
    obstructed,
    overlapped_seconds,
    unfused_seconds,
)
from shardmap_torch.kernels.transport import GlooTransport, Steps, Transport
from tests.kernels.support.virtual_network import VirtualNetwork
from tests.support.fuzzing import sampled, sized
from tests.support.golden import told
from tests.support.pool import Pool

ROWS, INNER, COLUMNS = 1024, 512, 2048  # A rank's block, the contracted size, the weight's.
FABRIC = Fabric(latency=2e-6, bandwidth=2e9, flops=1e12, memory=1e13, launch=3e-6)


def meta(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")


def gather(t: Transport, c: Choice) -> Steps[object]:
    return gather_forward(t, meta(ROWS, INNER), [meta(INNER, COLUMNS)], [None], 0, c)


def scatter(t: Transport, c: Choice) -> Steps[object]:
    return scatter_forward(t, meta(ROWS * t.num_ranks, COLUMNS), meta(COLUMNS, INNER), 0, c)


def reduce(t: Transport, c: Choice) -> Steps[object]:
    return reduce_forward(t, meta(ROWS * t.num_ranks, COLUMNS), meta(COLUMNS, INNER), c)


def column(t: Transport, c: Choice) -> Steps[object]:
    tokens = ROWS * t.num_ranks
    gathered, ws, dys = meta(tokens, INNER), [meta(INNER, COLUMNS)], [meta(tokens, COLUMNS)]
    return gather_backward(t, meta(ROWS, INNER), gathered, ws, dys, [True], 0, c, c)


def row(t: Transport, c: Choice) -> Steps[object]:
    x, w = meta(ROWS * t.num_ranks, COLUMNS), meta(COLUMNS, INNER)
    return product_backward(t, x, w, meta(ROWS, INNER), (True, True), 0, c)


def reduced(t: Transport, c: Choice) -> Steps[object]:
    x, w, dy = (
        meta(ROWS * t.num_ranks, COLUMNS),
        meta(COLUMNS, INNER),
        meta(ROWS * t.num_ranks, INNER),
    )
    return product_backward(t, x, w, dy, (True, True), None, c)


# Kernel, schedule, matmuls in the pipeline, matmuls after it, passes.
KERNELS: dict[str, tuple[Callable[[Transport, Choice], Steps[object]], str, int, int, int]] = {
    "gather": (gather, "gather/ring", 1, 0, 1),
    "scatter": (scatter, "scatter/direct", 1, 0, 1),
    "reduce": (reduce, "reduce/direct", 1, 0, 2),
    "column backward": (column, "scatter/direct", 1, 1, 1),
    "row backward": (row, "gather/ring", 2, 0, 1),
    "reduce backward": (reduced, "sum/direct", 2, 0, 2),
}


def problem(name: str, num_ranks: int) -> Problem:
    _, schedule, piped, tail, passes = KERNELS[name]
    flops = 2.0 * ROWS * num_ranks * INNER * COLUMNS
    return Problem(
        op=name,
        axis="'tp'",
        num_ranks=num_ranks,
        schedule=schedule,
        block_rows=ROWS,
        block_bytes=4.0 * ROWS * INNER,
        flops=piped * flops,
        tail_flops=tail * flops,
        passes=passes,
    )


@pytest.mark.sample(18)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("num_ranks", sampled([2, 4, 8], 4))
@pytest.mark.parametrize("slower", [0.25, 1, 4], ids=["comm", "even", "compute"])
@pytest.mark.parametrize("num_parts", sampled([1, 4, 8], 1, 8))
def test_the_formula_predicts_what_the_virtual_clock_shows(
    name: str, num_ranks: int, slower: float, num_parts: int
) -> None:
    """Within 10 %: the formula leaves out the sums and the latency of the last message."""
    fabric = replace(FABRIC, flops=FABRIC.flops / slower)
    kernel, schedule, *_ = KERNELS[name]
    network = VirtualNetwork(num_ranks, fabric)
    network.run(lambda transport: kernel(transport, Choice(schedule, num_parts)))
    predicted = overlapped_seconds(problem(name, num_ranks), fabric, num_parts)
    assert network.seconds == pytest.approx(predicted, rel=0.1)


def test_without_overlap_the_formula_is_the_unfused_one_and_more_launches() -> None:
    alone = replace(FABRIC, overlap=0.0, launch=0.0, latency=0.0)
    for name in KERNELS:
        case = problem(name, 4)
        for parts in (1, 8):
            slow = overlapped_seconds(case, alone, parts)
            assert slow == pytest.approx(unfused_seconds(case, alone))


@pytest.mark.parametrize(
    ("rows", "options"),
    [(127, ()), (128, (1,)), (511, (1, 2)), (1024, (1, 2, 4, 8)), (10**6, (1, 2, 4, 8))],
)
def test_parts_are_powers_of_two_of_at_least_128_rows(rows: int, options: tuple[int, ...]) -> None:
    assert candidates(replace(problem("gather", 2), block_rows=rows), None) == options
    assert all(rows // parts >= MIN_ROWS and parts <= MAX_PARTS for parts in options)


def test_more_parts_are_chosen_only_while_they_shorten_the_prediction() -> None:
    case = problem("gather", 4)
    slow_launch, fast_launch = replace(FABRIC, launch=1e-3), replace(FABRIC, launch=0.0)
    assert best(case, slow_launch, (1, 2, 4, 8))[0].num_parts == 1
    comm_bound = replace(fast_launch, flops=1e13, latency=0.0)
    assert best(case, comm_bound, (1, 2, 4, 8))[0].num_parts == 8


@pytest.mark.parametrize("overlap", [0.0, 0.02, 0.05, 0.5, 1.0])
def test_auto_overlaps_exactly_where_the_predicted_gain_is_3_percent(overlap: float) -> None:
    fabric = replace(FABRIC, overlap=overlap, launch=0.0, latency=0.0)
    plan = decide(problem("gather", 2), lambda: fabric, None, forced=False)
    assert plan.unfused is not None
    assert plan.overlapped is not None
    assert (plan.choice is not None) == (plan.unfused / plan.overlapped - 1 >= MIN_GAIN)


def test_a_fabric_is_not_measured_where_the_block_is_too_small() -> None:
    def never() -> Fabric:
        raise AssertionError

    plan = decide(replace(problem("gather", 2), block_rows=5), never, None, forced=False)
    assert str(plan) == "gather over 'tp': unfused (a rank's block has 5 rows; a chunk needs 128)"


def test_required_overlap_that_is_impossible_raises_with_the_reason() -> None:
    assert obstructed("op", "'tp'", "auto", "it rains").reason == "it rains"
    with told(KernelError):
        obstructed("op", "'tp'", "require", "it rains")
    with pytest.raises(KernelError, match=r"^op: overlap='yes' is none of auto, require, off\.$"):
        check_overlap("op", "yes")


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([0.8, 0.81, 0.79, 0.8], 0.8),  # A quiet machine.
        ([0.9, -0.6, 0.1, 1.4, 0.0, 0.7, -0.1, 0.5], 0.0),  # A busy one: nothing is promised.
        ([1.2, 1.3, 1.1, 1.2], 1.0),
    ],
)
def test_a_share_of_overlap_that_scatters_is_taken_at_its_lower_quartile(
    shares: list[float], expected: float
) -> None:
    assert _pessimistic(shares) == expected


def measured(*dtypes: torch.dtype) -> list[Fabric]:
    transport = GlooTransport(dist.new_group(), "tp")
    return [measure(transport, dtype) for dtype in dtypes]


def test_every_rank_measures_the_same_plausible_fabric(gloo: Callable[[int], Pool]) -> None:
    dtypes = sized([torch.float32], [torch.float32, torch.bfloat16])
    results = gloo(sized(2, 3)).run(measured, *dtypes)
    assert all(found == results[0] for found in results)
    for fabric in results[0]:
        assert 0 <= fabric.overlap <= 1
        assert 1e-6 < fabric.latency < 1
        assert 0 <= fabric.launch < 1
        assert 1e6 < fabric.bandwidth < 1e12
        assert 1e7 < fabric.flops < 1e14
