"""A fixed fortieth of op_db under check="global", and that the fuzzing sees wrong rules."""

import random
from collections.abc import Mapping
from typing import Any, Final

import pytest
import torch
from torch._ops import OpOverload
from torch.testing._internal.common_methods_invocations import op_db

from shardmap_torch.checker.spmd import operations
from shardmap_torch.checker.spmd.layout import UnrelatedError
from shardmap_torch.checker.spmd.ops import aten_rules
from shardmap_torch.checker.spmd.sharded import Rule, Sharded, Step
from tests.checker.support.fuzz_all import name_of, runs_here
from tests.checker.support.global_fuzz import fuzz, is_drawn
from tests.checker.support.kept import kept
from tests.support.fuzzing import sized

pytestmark = pytest.mark.usefixtures("quiet")
RUNNABLE: Final = [info for info in op_db if runs_here(info) and not is_drawn(info)]
SAMPLE: Final = random.Random(2).sample(RUNNABLE, len(RUNNABLE) // 40)
BY_NAME: Final = {name_of(info): info for info in RUNNABLE}

aten = torch.ops.aten


@pytest.mark.sample(5)
@pytest.mark.parametrize("info", SAMPLE, ids=name_of)
def test_what_is_accepted_is_what_one_device_computes(info: Any) -> None:
    assert fuzz(info, samples=2, draws=4).wrong == []


def summed(step: Step) -> list[Sharded]:
    """Says that any reduction of one operand to a number is a sum."""
    (x,) = step.shards
    if any(whole for _, whole in step.results):
        raise UnrelatedError("no number")
    return [Sharded((), frozenset(x.axes)) for _ in step.results]


WRONG: Final[Mapping[str, tuple[OpOverload, Rule]]] = {
    "softmax with_dtype": (aten._softmax.default, kept),
    "cumsum": (aten.cumsum.default, kept),
    "flip": (aten.flip.default, kept),
    "mean": (aten.mean.default, summed),
    "amax": (aten.amax.default, summed),
    "sort": (aten.sort.default, kept),
    "tril": (aten.tril.default, kept),
}


@pytest.mark.parametrize("name", sized(tuple(WRONG)[:3], tuple(WRONG)))
def test_fuzzing_sees_a_wrong_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, rule = WRONG[name]
    monkeypatch.setattr(aten_rules, "RULES", {**aten_rules.RULES, op: rule})
    assert fuzz(BY_NAME[name], samples=6, draws=40, until_wrong=True).wrong


@pytest.mark.fuzz  # 3 s
def test_fuzzing_sees_a_rule_without_negative_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.14, DTensor's rule for cumsum was one."""

    def positive(step: Step) -> list[Sharded]:
        dim, (x,) = step.arguments["dim"], step.shards
        if dim >= 0 and any(axis for axis, _ in x.dims[dim]):
            raise UnrelatedError("sharded along the dim of the sums")
        return kept(step)

    assert fuzz(BY_NAME["cumsum"], samples=2, draws=4).wrong == []
    monkeypatch.setattr(aten_rules, "RULES", {**aten_rules.RULES, aten.cumsum.default: positive})
    assert fuzz(BY_NAME["cumsum"], samples=2, draws=4).wrong == []
    monkeypatch.setattr(operations, "counted_from_front", lambda op, arguments, results: arguments)
    assert fuzz(BY_NAME["cumsum"], samples=2, draws=4, until_wrong=True).wrong
