"""Norms of sharded positions equal one device, and sum the gradient of their weights."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import I, LayerError, P, R, ShardTypeError, convert, make_mesh
from shardmap_torch.nn import batch_norm, layer_norm, rms_norm
from tests.nn.support.cases import Case, budget, on_mesh, over_dp, random
from tests.support.golden import told

X, W, B = random(4, 6, 8), random(8), random(8, seed=1)


def rms(x: Tensor, w: Tensor, axis: str | None) -> Tensor:
    return rms_norm(x, over_dp(w), axis)


def rms_converted(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(x, convert(w, ("dp", "tp"), src=I, dst=R), "tp", weight_type=R)


def rms_one_device(x: Tensor, w: Tensor) -> Tensor:
    return functional.rms_norm(x, (8,), w, 1e-6)


def layer(x: Tensor, w: Tensor, b: Tensor, axis: str | None) -> Tensor:
    return layer_norm(x, over_dp(w), axis, bias=over_dp(b))


def layer_one_device(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.layer_norm(x, (8,), w, b)


def batch(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y, mean, var = batch_norm(x, w.detach(), b.detach().exp(), w, b, "dp", momentum=0.3)
    return y + over_dp(mean + 2 * var)[:, None]


def batch_one_device(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean, var = w.detach().clone(), b.detach().exp()
    y = functional.batch_norm(x, mean, var, w, b, True, 0.3)
    return y + (mean + 2 * var)[:, None]


SEQUENCE = P("dp", "tp")
MEAN, VAR = random(6), random(6, seed=1).exp()
CASES = {
    "rms": Case(partial(rms, axis="tp"), rms_one_device, (SEQUENCE, P()), SEQUENCE, (X, W)),
    "rms of all positions": Case(
        partial(rms, axis=None), rms_one_device, (P("dp"), P()), P("dp"), (X, W)
    ),
    "rms with a converted weight": Case(
        rms_converted, rms_one_device, (SEQUENCE, P()), SEQUENCE, (X, W)
    ),
    "layer": Case(
        partial(layer, axis="tp"), layer_one_device, (SEQUENCE, P(), P()), SEQUENCE, (X, W, B)
    ),
    "batch": Case(
        batch,
        batch_one_device,
        (P("dp"), P(), P()),
        P("dp"),
        (random(4, 6, 3), random(6, seed=2), random(6, seed=3)),
    ),
    "layer of all positions": Case(
        partial(layer, axis=None), layer_one_device, (P("dp"), P(), P()), P("dp"), (X, W, B)
    ),
}


def test_nothing_is_sent_forward_and_the_weights_gradient_is_summed_once() -> None:
    assert budget(CASES["rms"]) == ({}, {"all_reduce": 1})
    assert budget(CASES["rms of all positions"]) == ({}, {})


def test_a_norm_of_sharded_positions_without_its_axis_is_refused() -> None:
    case = Case(
        partial(rms, axis=None), rms_one_device, (SEQUENCE, P(invariant="tp")), SEQUENCE, (X, W)
    )
    with pytest.raises(ShardTypeError, match="the I operand's gradient would differ"):
        on_mesh(case, make_mesh((2, 2), ("dp", "tp"), kind="simulated"), check="local")


def test_a_batch_norm_of_one_entry_a_channel_or_of_other_channels_is_refused() -> None:
    with pytest.raises(LayerError) as error:
        batch_norm(torch.ones(1, 6), MEAN, VAR)
    assert str(error.value) == "batch_norm: the batch has one entry a channel, [1, 6]."
    with told(LayerError):
        batch_norm(torch.ones(4, 5), MEAN, VAR)


def test_a_batch_norm_of_half_precision_has_statistics_in_float32() -> None:
    x, running = random(8, 6).half() * 200, (torch.zeros(6), torch.ones(6))
    found, mean, var = batch_norm(x, *running)
    exact = running[0].clone(), running[1].clone()
    expected = functional.batch_norm(x.float(), exact[0], exact[1], training=True)
    torch.testing.assert_close(found, expected.half())
    torch.testing.assert_close((mean, var), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_half_precision_are_taken_in_float32(dtype: Any) -> None:
    x = (random(4, 64) * 200).to(dtype)  # squares beyond float16
    found = rms_norm(x, torch.ones(64, dtype=dtype))
    assert found.dtype == dtype
    exact = rms_one_device_of(x.double())
    # One rounding of the quotient, of at most 8 in magnitude.
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)


def rms_one_device_of(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=1e-6)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_a_weight_of_another_size_is_refused(norm: Any) -> None:
    with told(LayerError):
        norm(torch.ones(2, 3), torch.ones(4))
