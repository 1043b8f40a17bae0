"""Random programs that the checker accepts compute, on real ranks, what their types promise.

The batched strategy gives the gradients that types promise: autograd sums the cotangents of a value
that all ranks share by itself. Ranks as threads give those that real ranks compute.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shardmap_torch import make_mesh
from shardmap_torch.mesh import Strategy
from tests.checker.programs import AXIS, Program, generate, inputs


def run(
    program: Program, strategy: Strategy, num_ranks: int, seed: int
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    mesh = make_mesh((num_ranks,), (AXIS,), kind="simulated", simulate=strategy)
    # An in-place write of a varying value is nothing for vmap.
    program.functional = strategy == "vmap"
    xs = inputs(num_ranks, seed)
    ys = program.mapped(mesh)(*xs)
    loss = torch.zeros(())
    for number, y in enumerate(ys):
        weights = torch.cos(torch.arange(y.numel(), dtype=y.dtype) + number).reshape(y.shape)
        loss = loss + (weights * y).sum()
    if not loss.requires_grad:
        return ys, [None] * len(xs)
    grads = torch.autograd.grad(loss, xs, allow_unused=True, materialize_grads=True)
    return [y.detach() for y in ys], grads


def check(seed: int, num_ranks: int) -> None:
    program, _ = generate(seed, 8, num_ranks)
    actual, truth = run(program, "ranks", num_ranks, seed), run(program, "vmap", num_ranks, seed)
    torch.testing.assert_close(actual, truth, msg=lambda text: f"{program}\n{text}")


@pytest.mark.parametrize("seed", range(8))
def test_an_accepted_program_is_right_on_ranks(seed: int) -> None:
    check(seed, num_ranks=2 + seed % 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_accepted_programs_are_right_on_ranks(seed: int) -> None:
    check(seed, num_ranks=2 + seed % 3)


def test_the_generator_makes_the_checker_accept_and_refuse() -> None:
    """Refusing is no way out: of the steps drawn, half find a type."""
    results = [generate(seed, 8, 2) for seed in range(4)]
    steps = sum(len(program.steps) for program, _ in results)
    assert steps >= 16
    assert sum(refused for _, refused in results) >= 8
