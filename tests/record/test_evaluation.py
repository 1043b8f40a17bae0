"""A record evaluated on numbers computes what its body computes, results and gradients."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    all_gather,
    all_reduce,
    axis_index,
    axis_size,
    checkpoint,
    convert,
    make_mesh,
    reduce_scatter,
    shard_map,
    shift,
)
from shardmap_torch.checker.ir.repairs import NONE
from shardmap_torch.checker.verify.verdict import Verdict, attempt
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.record.evaluation import Computer, Evaluation
from shardmap_torch.record.program import Record
from shardmap_torch.record.recorder import ProgramRecorder
from shardmap_torch.run.trials.draws import Like
from shardmap_torch.run.trials.runs import Program

TABLE: Final = torch.randn(4, 4, dtype=torch.float64)


def ring(x: Tensor, w: Tensor) -> Tensor:
    total, held = torch.zeros_like(x), x
    for _ in range(axis_size("b")):
        total += (x @ held.T).tanh() @ held
        held = shift(held, "b", 1)
    return total @ w


def written(x: Tensor, w: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0] + 1, 4, dtype=x.dtype)
    y[1:] = x
    y.mul_(2.0)[0].add_(w[0])
    return (y[1:] + y[:1]).T.contiguous().T * axis_index("b")


def closed(x: Tensor, w: Tensor) -> Tensor:
    return x @ TABLE + (x @ TABLE.T) @ w + torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype)


def moved(x: Tensor, w: Tensor) -> Tensor:
    rows = all_gather(x, "b", dst=R)
    return reduce_scatter(rows @ w * axis_index("b"), "b") + all_reduce(
        x.sum(0), "b", op="mean", dst=R
    )


def extreme(x: Tensor, w: Tensor) -> Tensor:
    largest = all_reduce(x.amax(0), "b", op="max", dst=R)
    y: Tensor = checkpoint(lambda x: (x - largest).exp(), x)
    return y @ w


def own_gradient(x: Tensor, w: Tensor) -> Tensor:
    w = convert(w, "b", src=I, dst=R)
    gradient: Tensor = torch.func.grad(lambda x: ((x @ w) ** 3).sum())(x)
    return gradient


BODIES: Final = (ring, written, closed, moved, extreme, own_gradient)


def recorded(f: Callable[..., Any], *args: Any) -> tuple[Any, Verdict, Record]:
    call = f._shardmap_call(args)  # type: ignore[attr-defined]
    verdict = attempt(call, NONE, "local", observe=ProgramRecorder)
    return call, verdict, verdict.observers[0].record


def example(
    body: Callable[..., Any], sizes: tuple[int, ...] = (2, 2)
) -> tuple[Callable[..., Any], Tensor, Tensor]:
    mesh = make_mesh(sizes, ("a", "b"), kind="simulated", simulate="ranks")
    f = shard_map(body, mesh=mesh, in_specs=(P(("a", "b")), P()), out_specs=P(("a", "b")))
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    return f, x, torch.randn(4, 4, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("body", BODIES)
def test_an_evaluation_has_the_results_and_gradients_of_a_run(body: Callable[..., Any]) -> None:
    f, *args = example(body)
    call, verdict, record = recorded(f, *args)
    likes = {at: Like(x.shape, x.dtype, x.device, True) for at, x in enumerate(args)}
    program = Program(call, verdict, likes)
    evaluation = program.evaluation(dict(enumerate(args)), Computer())
    y = f(*args)
    [(path, found)] = program.results(evaluation).items()
    assert torch.equal(found, y)
    for seed in (torch.randn_like(y), torch.ones_like(y)):  # the second after the first
        expected = torch.autograd.grad(y, args, seed, allow_unused=True, retain_graph=True)
        gradients = program.gradients(evaluation, {path: seed})
        for at, g in enumerate(expected):
            torch.testing.assert_close(gradients.get(at), g)
    assert record.lacks == ""


def test_a_record_says_which_steps_autograd_derives_and_where_the_others_are() -> None:
    f, *args = example(ring)
    _, _, record = recorded(f, *args)
    operators = [step for step in record.backward if isinstance(step.run, OpOverload)]
    assert operators
    assert all(step.is_derived for step in operators)
    assert not any(step.is_derived for step in record.steps)
    assert {step.site.place.partition(":")[0] for step in record.steps if step.site} == {
        "test_evaluation.py"
    }


def test_a_number_taken_from_a_tensor_leaves_no_record() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        return x * w.sum().item()

    f, *args = example(body)
    _, _, record = recorded(f, *args)
    assert record.lacks.startswith("item may have pieces that random inputs do not reach, at test_")


def test_an_evaluation_does_not_write_into_its_inputs() -> None:
    f, x, w = example(written)
    _, verdict, record = recorded(f, x, w)
    before = x.detach().clone()
    specs = [verdict.match.spec(at) for at in (0, 1)]
    mesh = make_mesh((2, 2), ("a", "b"), kind="simulated")
    Evaluation(record, mesh, Computer(), specs, [x, w])
    assert torch.equal(x, before)
