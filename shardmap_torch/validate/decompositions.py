"""Compares the results of a decomposition with those of its operator."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.run.trials.draws import random_like
from shardmap_torch.validate.numbers import Fault, tolerance_of, unequal
from shardmap_torch.validate.report import Findings
from shardmap_torch.validate.typings import Operation

_DRAWS: Final = 3


def try_values(
    operation: Operation, meaning: Callable[..., Any], seed: int, findings: Findings
) -> None:
    """Runs both on random operands of the example's shapes, and records if each result is equal.

    Their gradients need not be alike: the checker interprets those that the operator has.
    """
    generator = torch.Generator().manual_seed(seed)
    other = replace(operation, function=meaning)
    for _ in range(_DRAWS):
        operands = [random_like(like, generator) for like in operation.examples]
        findings.tried += 1
        with torch.no_grad():
            _compare(operation.call(operands), other.call(operands), findings)


def _compare(results: list[Tensor], expected: list[Tensor], findings: Findings) -> None:
    if len(results) != len(expected):
        fault = Fault(f"they give {len(results)} and {len(expected)} tensors", torch.inf, 0)
        findings.note("the results are those of the decomposition", fault)
        return
    for place, (mine, theirs) in enumerate(zip(results, expected, strict=True)):
        which = f"result[{place}]" if len(results) > 1 else "result"
        findings.note(f"{which} is that of the decomposition", _differ(mine, theirs))


def _differ(mine: Tensor, theirs: Tensor) -> Fault | None:
    if mine.dtype != theirs.dtype:
        return Fault(f"the dtypes are {mine.dtype} and {theirs.dtype}", torch.inf, 0)
    return unequal(mine, theirs, tolerance_of([mine.dtype]), "the operator gives something else")
