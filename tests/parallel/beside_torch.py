"""One plan, twice: by torch's `parallelize_module` and by `parallelize`, on the same processes."""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.debug import CommDebugMode

from shardmap_torch import Mesh, parallel
from tests.programs.support.harness import global_value, random

Plan = Callable[[ModuleType], Any]
"""Makes the plan of the styles of one of the two packages, which have the same names."""


@dataclass(frozen=True)
class Row:
    """A module, a plan, and what each process passes.

    Attributes:
        module: makes it, in float64.
        plan: of the styles of a package.
        inputs: shapes of this process' tensors; or ids, as lists of ints.
        kwargs: the same by name.
        is_sum: whether the output is a sum over the processes, whose addends may differ.
    """

    module: Callable[[], nn.Module]
    plan: Plan
    inputs: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_sum: bool = False


@dataclass(frozen=True)
class Outcome:
    """A module's result on one process, and the gradients of a weighted sum of it.

    Attributes:
        placements: of the results.
        values: the results.
        parameters: gradients by name.
        inputs: gradients.
        moves: collectives of the forward and of the backward.
        pending: how many gradients of parameters are pending sums.
    """

    placements: list[tuple[Placement, ...] | None]
    values: list[Tensor]
    parameters: dict[str, Tensor | None]
    inputs: list[Tensor | None]
    moves: tuple[int, int] = (0, 0)
    pending: int = 0


def by_torch(row: Row, mesh: Mesh, rank: int, **options: Any) -> Outcome:
    def prepare(module: nn.Module) -> nn.Module:
        return torch_parallel.parallelize_module(module, mesh.device_mesh, row.plan(torch_parallel))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _run(row, prepare, rank, **options)


def by_us(row: Row, mesh: Mesh, rank: int, **options: Any) -> Outcome:
    # Each rank has inputs of its own here, replicated ones too, which torch lets pass.
    with mock.patch.dict(os.environ, SHARDMAP_DEBUG="0"):
        prepare = partial(parallel.parallelize, mesh=mesh, plan=row.plan(parallel))
        return _run(row, prepare, rank, **options)


def assert_same(name: str, actual: Outcome, expected: Outcome, biases: int | None = None) -> None:
    """Compares two outcomes, and numbers of collectives if it is said how many biases are summed.

    Those that are added here to shards of a sum, and by torch to its addends.
    """
    if biases is not None:
        assert actual.moves[0] == expected.moves[0], name
        # Gradients are finished here; torch leaves some pending, which its optimizer then sums.
        assert actual.moves[1] <= expected.moves[1] + expected.pending + biases, name
    assert actual.placements == expected.placements, name
    assert len(actual.values) == len(expected.values)
    for ours, theirs in zip(actual.values, expected.values, strict=True):
        _assert_close(f"{name}: value", ours, theirs)
    assert actual.parameters.keys() == expected.parameters.keys()
    for key, grad in actual.parameters.items():
        _assert_close(f"{name}: gradient of {key}", grad, expected.parameters[key])
    for i, (mine, other) in enumerate(zip(actual.inputs, expected.inputs, strict=True)):
        _assert_close(f"{name}: gradient of input {i}", mine, other)


def _assert_close(name: str, actual: Tensor | None, expected: Tensor | None) -> None:
    assert (actual is None) == (expected is None), name
    if actual is not None and expected is not None:
        note = partial("{}: {}".format, name)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10, msg=note)


def _run(
    row: Row,
    prepare: Callable[[nn.Module], nn.Module],
    rank: int,
    frozen: Callable[[str], bool] = lambda name: False,
    rounds: int = 1,
    lr: float = 0.0,
) -> Outcome:
    """Returns the outcome of the last round; each one before it is followed by a step of SGD."""
    torch.manual_seed(0)
    module = prepare(row.module())
    for name, p in module.named_parameters():
        p.requires_grad_(not frozen(name))
    args = [_input(like, 10 * i + rank) for i, like in enumerate(row.inputs)]
    kwargs = {k: _input(x, 100 + rank) for k, x in row.kwargs.items()}
    inputs = [x for x in (*args, *kwargs.values()) if x.is_floating_point()]
    outputs, moves = _round(module, args, kwargs)
    for _ in range(rounds - 1):
        for p in module.parameters():
            if p.grad is not None:
                torch.optim.SGD([p], lr, foreach=False).step()
        for x in (*module.parameters(), *inputs):
            x.grad = None
        outputs, moves = _round(module, args, kwargs)
    parameters = [*module.parameters()]
    local = [y.to_local() if isinstance(y, DTensor) else y for y in outputs]
    if row.is_sum:
        local = [y.detach().clone() for y in local]
        for y in local:
            dist.all_reduce(y)
    return Outcome(
        [y.placements if isinstance(y, DTensor) else None for y in outputs],
        [y.detach() for y in local],
        {name: _grad(p) for name, p in module.named_parameters()},
        [_grad(x) for x in inputs],
        moves,
        sum(any(x.is_partial() for x in getattr(p.grad, "placements", ())) for p in parameters),
    )


def _round(module: nn.Module, args: Any, kwargs: Any) -> tuple[list[Tensor], tuple[int, int]]:
    """Returns the outputs after a backward, and the numbers of collectives."""
    # A hook of CommDebugMode warns where no input of a module needs a gradient.
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    with CommDebugMode() as forward:
        out = module(*args, **kwargs)
    outputs = [y for y in (out if isinstance(out, tuple) else (out,)) if isinstance(y, Tensor)]
    local = [y.to_local() if isinstance(y, DTensor) else y for y in outputs]
    # What follows a replicated output is the same on all ranks, what follows a shard is not.
    parts = [(y * random(y.shape, 1000)).sum() for y in local]
    with CommDebugMode() as backward:
        if any(part.requires_grad for part in parts):
            torch.stack(parts).sum().backward()
    return outputs, (forward.get_total_counts(), backward.get_total_counts())


def _input(like: Any, seed: int) -> Tensor:
    if isinstance(like, list):
        return torch.tensor(like)
    return random(like, seed).requires_grad_()


def _grad(x: Tensor) -> Tensor | None:
    return None if x.grad is None else global_value(x.grad)
