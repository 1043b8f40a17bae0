"""Summaries of plans, and gradients of one input of several modules, which are sent once."""

import torch
from torch import Tensor, nn

from shardmap_torch import (
    ColwiseParallel,
    RowwiseParallel,
    ShapeDtype,
    SpecError,
    explain,
    make_mesh,
    parallelize,
)
from shardmap_torch.parallel import parallel_summary
from tests.parallel.support.transformers_models import make_model
from tests.support.golden import hold_own, told

MESH = make_mesh((4,), ("tp",), kind="simulated")


def test_a_summary_lists_styles_shards_bytes_and_what_is_left_out() -> None:
    model = make_model("gpt2").double()
    hold_own(str(parallel_summary(parallelize(model, MESH))))
    unmatched = nn.Sequential(nn.Linear(4, 4))
    unmatched._tp_plan = {"0": "colwise_rep", "1": "rowwise"}  # type: ignore[assignment]
    summary = parallel_summary(parallelize(unmatched, MESH))
    assert (summary.unused, summary.sharded, summary.replicated) == (("1",), 20, {})


def test_a_module_that_is_not_parallelized_has_no_summary() -> None:
    with told(SpecError):
        parallel_summary(nn.Linear(1, 1))


def test_a_model_without_a_plan_is_refused() -> None:
    with told(SpecError):
        parallelize(nn.Sequential(), MESH)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh()
        y: Tensor = self.down(torch.sigmoid(self.gate(x)) * self.up(x))
        return y


def test_the_gradient_of_one_input_of_several_modules_is_summed_once() -> None:
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    report = str(explain(parallelize(Gated(), MESH, plan), ShapeDtype((2, 8), requires_grad=True)))
    assert report.count("backward: all_reduce") == 1
