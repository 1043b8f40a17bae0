"""Claims of a type about the numbers that the ranks compute."""

import math

import pytest
import torch

from shardmap_torch import I, Partial, R, ShardTypeError, V
from shardmap_torch.run.trials.draws import random_like
from shardmap_torch.types import AxisType, K, Z
from shardmap_torch.validate.numbers import Fault, Findings, refute, shifted, tolerance_of, total
from tests.support.golden import hold_own, told


def column(*values: float) -> list[torch.Tensor]:
    return [torch.tensor([value], dtype=torch.float64) for value in values]


@pytest.mark.parametrize("axis_type", [I, R, K])
def test_equal_types_claim_that_the_ranks_agree(axis_type: AxisType) -> None:
    assert refute(axis_type, column(2, 2, 2), None, None, 1e-9) is None
    assert refute(axis_type, column(math.nan, math.nan), None, None, 1e-9) is None
    fault = refute(axis_type, column(2, 2, 2.5), None, None, 1e-9)
    assert str(fault) == "the ranks differ; the worst difference is 0.5, where values reach 2"
    fault = refute(axis_type, column(2, math.nan), None, None, 1e-9)
    assert fault is not None
    assert fault.reason == "the ranks differ in what is finite"
    first, second = torch.tensor([1 + 1j]), torch.tensor([1 + 2j])
    assert refute(axis_type, [first, first], None, None, 1e-9) is None
    assert refute(axis_type, [first, second], None, None, 1e-9) is not None


def test_varying_claims_nothing() -> None:
    assert refute(V, column(1, 2), column(3, 4), column(9)[0], 1e-9) is None


def test_zero_claims_zeros_but_not_of_what_is_no_number() -> None:
    assert refute(Z, column(0, math.nan), None, None, 0) is None
    for value in (1e-9, math.inf):
        fault = refute(Z, column(0, value), None, None, 0)
        assert fault is not None
        assert fault.reason == "it is not zero"


def test_partial_claims_that_the_sum_is_that_of_the_operands() -> None:
    assert refute(Partial, column(1, 2), column(-1, 4), column(3)[0], 1e-9) is None
    split = refute(Partial, column(1, 2), column(-1, 5), column(3)[0], 1e-9)
    hold_own(str(split))
    whole = refute(Partial, column(1, 2), column(-1, 4), column(5)[0], 1e-9)
    hold_own(str(whole), 2)


def test_shifted_addends_are_others_of_the_same_sum() -> None:
    addends = column(1, 2, 3)
    others = shifted(addends, torch.Generator().manual_seed(0))
    torch.testing.assert_close(total(others), total(addends))
    assert not torch.equal(others[0], addends[0])


def test_tolerance_is_that_of_the_coarsest_dtype() -> None:
    assert tolerance_of([torch.int64]) == 0
    assert tolerance_of([torch.float64, torch.bfloat16]) == tolerance_of([torch.bfloat16])
    assert tolerance_of([torch.float64]) < 1e-12 < tolerance_of([torch.float32])


def test_integers_stay_in_range() -> None:
    drawn = random_like(torch.tensor([2, 7]).expand(50, 2), torch.Generator().manual_seed(0))
    assert set(drawn.flatten().tolist()) == {2, 3, 4, 5, 6, 7}


def test_the_worst_of_all_runs_is_reported_and_every_wrong_claim_once() -> None:
    findings = Findings("f")
    for worst in (1.0, 3.0, 2.0):
        findings.note("x is P", Fault("wrong", worst, 4.0))
    findings.note("x is P", None)
    findings.note("y is R", Fault("the ranks differ", 1.0, 1.0))
    with told(ShardTypeError):
        findings.report()


def test_claims_that_held_are_reported_in_order() -> None:
    findings = Findings("f", tried=2, refused={"(x: Partial)": None})
    for claim in ("b", "a", "b"):
        findings.note(claim, None)
    assert findings.report().shown == ("b", "a")
    hold_own(str(findings.report()))
