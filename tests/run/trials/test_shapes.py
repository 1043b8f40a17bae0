"""Trials compare shapes before they call kernels of torch that trust them."""

import pytest
import torch
from torch import Tensor

from shardmap_torch.run.trials import shapes

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
QUERY = torch.randn(2, 8, 6, 4)


def given(**operands: Tensor | None) -> dict[str, Tensor | None]:
    return {"query": QUERY, "key": QUERY, "value": QUERY, **operands}


@pytest.mark.parametrize(
    "operands",
    [
        {},
        {"key": QUERY[:, :2], "value": QUERY[:, :2]},
        {"key": QUERY[:, :, :3], "value": QUERY[:, :, :3]},
        {"value": QUERY[..., :2], "out": QUERY[..., :2]},
        {"attn_mask": torch.zeros(6, 6)},
        {"attn_mask": torch.zeros(2, 1, 1, 6)},
        {"attn_mask": None},
    ],
)
def test_operands_that_the_public_function_takes_fit(operands: dict[str, Tensor | None]) -> None:
    shapes.compare(FLASH, given(**operands))


@pytest.mark.parametrize(
    "operands",
    [
        {"key": QUERY[:, :, :3]},
        {"key": QUERY[:, :3], "value": QUERY[:, :3]},
        {"key": QUERY[:1], "value": QUERY[:1]},
        {"key": QUERY[..., :2]},
        {"query": QUERY[0]},
        {"attn_mask": torch.zeros(5, 6)},
        {"grad_out": QUERY[:, :4]},
    ],
)
def test_other_operands_do_not(operands: dict[str, Tensor | None]) -> None:
    with pytest.raises(RuntimeError, match=r"does not fit|heads of queries"):
        shapes.compare(FLASH + "_backward", given(**operands))


def test_scales_of_a_batch_norm_have_a_number_a_channel() -> None:
    x = torch.randn(2, 4, 3)
    shapes.compare("native_batch_norm", {"input": x, "weight": x[0, :, 0], "bias": None})
    with pytest.raises(RuntimeError, match=r"weight of shape \[3\]"):
        shapes.compare("native_batch_norm", {"input": x, "weight": x[0, 0]})


def test_gradients_of_a_softmax_have_the_shape_of_its_result() -> None:
    x = torch.randn(2, 4)
    shapes.compare("_log_softmax_backward_data", {"grad_output": x, "output": x})
    with pytest.raises(RuntimeError, match="does not fit"):
        shapes.compare("_log_softmax_backward_data", {"grad_output": x[:1], "output": x})
