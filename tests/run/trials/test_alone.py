"""Verdicts of trials alone: right programs are accepted, wrong ones are not."""

from typing import Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import P, axis_size, make_mesh, shard_map
from shardmap_torch.run.trials.comparison import RefutedError
from shardmap_torch.run.trials.watch import UntriedError
from tests.run.trials.support.alone import CASES, Case, decide

WRONG: Final = [(case, wrong) for case in CASES for wrong in case.wrong.split(",") if wrong]


def named(value: object) -> str | None:
    return value.body.__name__ if isinstance(value, Case) else None


@pytest.mark.sample(4, "scan")
@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_right_program_is_accepted_by_trials_alone(case: Case) -> None:
    torch.manual_seed(0)
    case.decide()


@pytest.mark.sample(7)
@pytest.mark.parametrize(("case", "wrong"), WRONG, ids=named)
def test_a_wrong_program_is_refused_by_trials_alone(case: Case, wrong: str) -> None:
    torch.manual_seed(0)
    # What one device has no numbers for is not tried; all others are refuted.
    error = UntriedError if wrong == "masks of each rank" else RefutedError
    with pytest.raises(error):
        case.decide(wrong)


def test_the_gradient_of_a_weight_outside_is_compared() -> None:
    weight = torch.randn(2, requires_grad=True)
    mesh = make_mesh((2,), ("a",), kind="simulated")

    def body(x: Tensor, is_detached: bool) -> Tensor:
        return x * (weight.detach() if is_detached and axis_size("a") > 1 else weight)

    f = shard_map(body, mesh=mesh, in_specs=(P("a"), None), out_specs=P("a"), check="global")
    decide(f, torch.randn(4, 2), False)
    with pytest.raises(RefutedError, match="the gradient of"):
        decide(f, torch.randn(4, 2), True)
