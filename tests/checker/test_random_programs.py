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
from tests.checker.programs import AXES, Program, generate, inputs


def run(
    program: Program, strategy: Strategy, sizes: Sequence[int], seed: int
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    mesh = make_mesh(sizes, AXES, kind="simulated", simulate=strategy)
    # An in-place write of a varying value is nothing for vmap.
    program.functional = strategy == "vmap"
    xs = inputs(sizes, seed)
    ys = program.mapped(mesh)(*xs)
    loss = torch.zeros(())
    for number, y in enumerate(ys):
        weights = torch.cos(torch.arange(y.numel(), dtype=y.dtype) + number).reshape(y.shape)
        loss = loss + (weights * y).sum()
    if not loss.requires_grad:
        return ys, [None] * len(xs)
    grads = torch.autograd.grad(loss, xs, allow_unused=True, materialize_grads=True)
    return [y.detach() for y in ys], grads


def check(seed: int, num_steps: int, sizes: Sequence[int]) -> None:
    program, _ = generate(seed, num_steps, sizes)
    actual, truth = run(program, "ranks", sizes, seed), run(program, "vmap", sizes, seed)
    torch.testing.assert_close(actual, truth, msg=lambda text: f"{program}\n{text}")


SIZES = [(2, 2), (3, 1), (2, 3), (1, 4)]


@pytest.mark.parametrize("seed", range(4))
def test_an_accepted_program_is_right_on_ranks(seed: int) -> None:
    check(seed, 6, SIZES[seed % len(SIZES)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_accepted_programs_are_right_on_ranks(seed: int) -> None:
    check(seed, 12, SIZES[seed % len(SIZES)])


def test_the_generator_makes_the_checker_accept_and_refuse() -> None:
    """Refusing is no way out: most of the steps drawn find a type."""
    results = [generate(seed, 6, (2, 2)) for seed in range(3)]
    assert sum(len(program.steps) for program, _ in results) >= 9
    assert sum(refused for _, refused in results) >= 3
