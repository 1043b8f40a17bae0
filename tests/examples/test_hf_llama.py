"""The Llama of transformers trains and generates as on one device."""

import pytest

from examples.hf_llama import run
from shardmap_torch import make_mesh
from tests.support.pool import Gloo


def agree() -> None:
    ours, expected = run(make_mesh((2,), ("tp",)))
    assert ours == expected


def test_on_simulated_ranks_it_computes_the_numbers_of_one_device() -> None:
    agree()


@pytest.mark.fuzz  # 11 s; tests/parallel/test_transformers.py trains and generates on processes
def test_on_processes_it_computes_the_numbers_of_one_device(gloo: Gloo) -> None:
    gloo(2).run(agree, timeout=100)
