"""Fixtures for the tests of the checker."""

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def quiet() -> Iterator[None]:
    """Sets one thread, which suits small tensors, and drops warnings of the operators tried."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)
