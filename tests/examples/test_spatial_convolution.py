"""The example of a convolution whose rows are sharded, and that its region keeps its promise."""

import torch

from examples.spatial_convolution import convolve, main
from shardmap_torch import validate_rule


def test_shards_of_rows_are_convolved_as_on_one_device() -> None:
    assert main() < 1e-12


def test_the_region_keeps_its_promise() -> None:
    x, weight = torch.randn(1, 2, 12, 4), torch.randn(3, 2, 3, 3)
    validate_rule(convolve, x, weight)
