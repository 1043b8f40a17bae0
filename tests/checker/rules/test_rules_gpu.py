"""The rows of kernels that only a GPU has."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch.checker.rules.registry import TABLE
from shardmap_torch.checker.rules.rule import Row
from tests.checker.support.calls import Call
from tests.checker.support.validate import missing, validate

aten = torch.ops.aten


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def heads(dtype: torch.dtype, count: int, last: bool = False) -> list[Tensor]:
    """Queries, keys, values and their like: batch, heads, length, width, or heads before last."""
    shape = (2, 64, 2, 64) if last else (2, 2, 64, 64)
    return [t(*shape, dtype=dtype) for _ in range(count)]


def flash() -> Sequence[Call]:
    q, k, v, grad = heads(torch.float16, 4)
    out = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, True)
    return [((grad, q, k, v, *out[:2], *out[2:6], 0.0, True, *out[6:8]), {})]


def flash_plain() -> Sequence[Call]:
    q, k, v, grad = heads(torch.float16, 4, last=True)
    given = (q, k, v, None, None, 64, 64, 0.0, True, False)
    out = aten._flash_attention_forward.default(*given)
    return [((grad, q, k, v, *out[:2], None, None, 64, 64, 0.0, True, *out[2:4]), {})]


def efficient() -> Sequence[Call]:
    q, k, v, grad = heads(torch.float32, 4)
    bias = t(2, 2, 64, 64)
    out = aten._scaled_dot_product_efficient_attention.default(q, k, v, bias, True)
    return [((grad, q, k, v, bias, *out, 0.0, [True] * 4, False), {})]


def efficient_plain() -> Sequence[Call]:
    q, k, v, grad = heads(torch.float32, 4, last=True)
    given = (q, k, v, None, None, None, None, None, 0.0, 0, True)
    out = aten._efficient_attention_forward.default(*given)
    after = (out[0], None, None, 64, 64, out[1], 0.0, out[2], out[3], 0, False)
    return [((grad, q, k, v, None, *after), {})]


def cudnn() -> Sequence[Call]:
    q, k, v, grad = heads(torch.float16, 4)
    out = aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True)
    bias = torch.empty(0, device="cuda", dtype=torch.float16)
    sizes = (out[2], out[3], out[4], out[5])
    return [((grad, q, k, v, out[0], out[1], out[6], out[7], bias, *sizes, 0.0, False), {})]


def rms_norm() -> Sequence[Call]:
    return [((t(4, 8), t(4, 8), [8], t(4, 1), t(8), [True, True]), {})]


def batch_norm() -> Sequence[Call]:
    x, grad, weight = t(4, 3, 2, 2), t(4, 3, 2, 2), t(3)
    out = aten.cudnn_batch_norm.default(x, weight, t(3), None, None, True, 0.1, 1e-5)
    return [((x, grad, weight, None, None, out[1], out[2], 1e-5, out[3]), {})]


BACKWARD: Final[list[tuple[str, Callable[[], Sequence[Call]]]]] = [
    ("_scaled_dot_product_flash_attention_backward", flash),
    ("_flash_attention_backward", flash_plain),
    ("_scaled_dot_product_efficient_attention_backward", efficient),
    ("_efficient_attention_backward", efficient_plain),
    ("_scaled_dot_product_cudnn_attention_backward", cudnn),
    ("_fused_rms_norm_backward", rms_norm),
    ("cudnn_batch_norm_backward", batch_norm),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "calls"), BACKWARD, ids=[each[0] for each in BACKWARD])
def test_backward_row_holds_on_a_gpu(name: str, calls: Callable[[], Sequence[Call]]) -> None:
    op = getattr(aten, name).default
    row = TABLE[op]
    findings = validate(op, row, calls())
    assert findings.wrong == []
    assert missing(op, row, findings) == set()


FORWARD: Final[list[tuple[str, torch.dtype, bool, tuple[Any, ...]]]] = [
    ("_scaled_dot_product_flash_attention", torch.float16, False, ()),
    ("_scaled_dot_product_efficient_attention", torch.float32, False, (None, True)),
    ("_scaled_dot_product_cudnn_attention", torch.float16, False, (None, True)),
    ("_flash_attention_forward", torch.float16, True, (None, None, 64, 64)),
    ("_efficient_attention_forward", torch.float32, True, (None, None, None, None, None)),
]
AFTER: Final = {"_flash_attention_forward": (False, False), "_efficient_attention_forward": (0,)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "dtype", "last", "given"), FORWARD, ids=[each[0] for each in FORWARD]
)
def test_attention_draws_only_where_it_drops(
    name: str, dtype: torch.dtype, last: bool, given: tuple[Any, ...]
) -> None:
    op = getattr(aten, name).default
    assert TABLE[op] == Row(draws=TABLE[op].draws)
    operands = heads(dtype, 3, last)
    outputs: list[Tensor] = []
    for dropout, seed in itertools.product((0.0, 0.5), (0, 1)):
        torch.manual_seed(seed)
        outputs.append(op(*operands, *given, dropout, *AFTER.get(name, ()))[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[2], outputs[3])
