"""Random loops over microbatches under global strictness: right ones, and their mutants."""

import random

import pytest
import torch

from tests.checker.support.accumulations import SIZES, Accumulation, drawn, mutant, run
from tests.support.fuzzing import sampled, sized

SEEDS = range(sized(4, 200))


def is_that_of_one_device(program: Accumulation, sizes: tuple[int, int]) -> bool | None:
    """Compares ranks with the same loop on one rank; None where the checker refuses it."""
    found = run(program, sizes, "global")
    if found is None:
        return None
    expected = run(program, (1, 1), "local")
    assert expected is not None
    # Ranks add the same float64 numbers in another order.
    return torch.allclose(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("sizes", sampled(SIZES, (2, 2)))
def test_a_right_loop_over_microbatches_is_accepted_and_that_of_one_device(
    sizes: tuple[int, int],
) -> None:
    for seed in SEEDS:
        program = drawn(random.Random(seed))
        assert is_that_of_one_device(program, sizes) is True, program


@pytest.mark.sample(1)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_mutant_is_refused_or_that_of_one_device(sizes: tuple[int, int]) -> None:
    refused = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        program = mutant(drawn(rng), rng)
        verdict = is_that_of_one_device(program, sizes)
        assert verdict is not False, program
        refused += verdict is None
    assert refused
