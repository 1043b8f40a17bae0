"""A transformer block sends what Megatron-LM's does, and no more; and it equals one device."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import I, P, S
from shardmap_torch.nn import (
    attention,
    column_linear,
    positions,
    rms_norm,
    rotary,
    row_linear,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)
from tests.nn.support.cases import Case, budget, integers, over_dp, random

IDS, TARGETS = integers(12, 4, 6), integers(12, 4, 6, seed=1)
WEIGHTS = (
    random(12, 8),  # table
    random(8),  # scale of the first norm
    random(8, 4, 3, 2),  # q, k and v
    random(4, 2, 8),  # back from the heads
    random(8, seed=1),  # scale of the second norm
    random(8, 2, 16),  # gate and up
    random(16, 8),  # down
    random(8, 12),  # unembedding
)


def block(x: Tensor, weights: tuple[Tensor, ...], src: Any) -> Tensor:
    """x [b, t or t/tp, d], sharded over "tp" where `src` says so."""
    norm, qkv, out, norm2, gate_up, down = weights
    axis = None if src == I else "tp"
    q, k, v = column_linear(rms_norm(x, norm, axis), qkv, "tp", src=src).unbind(-2)
    at = positions(q.shape[1])
    y = attention(rotary(q, at), rotary(k, at), v, causal=True)
    x = x + row_linear(y, out, "tp", dst=src)
    gate, up = column_linear(rms_norm(x, norm2, axis), gate_up, "tp", src=src).unbind(-2)
    return x + row_linear(functional.silu(gate) * up, down, "tp", dst=src)


def only_block(x: Tensor, *weights: Tensor, src: Any) -> Tensor:
    return block(x, tuple(map(over_dp, weights)), src)


def model(ids: Tensor, targets: Tensor, *weights: Tensor, src: Any) -> Tensor:
    table, *layer, unembedding = map(over_dp, weights)
    x = vocab_parallel_embedding(ids, table, "tp", dst=src)
    x = block(x, tuple(layer), src)
    logits = column_linear(x, unembedding, "tp", src=src)
    return vocab_parallel_cross_entropy(logits, targets, "tp", batch_axis="dp")


def block_one_device(x: Tensor, *weights: Tensor) -> Tensor:
    norm, qkv, out, norm2, gate_up, down = weights
    q, k, v = torch.einsum("btd,dhxk->xbthk", functional.rms_norm(x, (8,), norm, 1e-6), qkv)
    at = torch.arange(6)
    q, k, v = (y.transpose(1, 2) for y in (rotary(q, at), rotary(k, at), v))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + torch.einsum("bhtk,hkd->btd", y, out)
    gate, up = torch.einsum("btd,dxf->xbtf", functional.rms_norm(x, (8,), norm2, 1e-6), gate_up)
    out_of_mlp: Tensor = (functional.silu(gate) * up) @ down
    return x + out_of_mlp


def model_one_device(ids: Tensor, targets: Tensor, *weights: Tensor) -> Tensor:
    x = block_one_device(functional.embedding(ids, weights[0]), *weights[1:-1])
    return functional.cross_entropy((x @ weights[-1]).flatten(0, 1), targets.flatten())


BLOCK_SPECS = P(), P(None, "tp"), P("tp"), P(), P(None, None, "tp"), P("tp")
MODEL_SPECS = P("dp"), P("dp"), P("tp"), *BLOCK_SPECS, P(None, "tp")


def block_case(src: Any, activations: P) -> Case:
    inputs = random(4, 6, 8), *WEIGHTS[1:-1]
    specs = activations, *BLOCK_SPECS
    return Case(partial(only_block, src=src), block_one_device, specs, activations, inputs)


def model_case(src: Any) -> Case:
    inputs = IDS, TARGETS, *WEIGHTS
    return Case(partial(model, src=src), model_one_device, MODEL_SPECS, P(), inputs)


CASES = {
    "tensor-parallel block": block_case(I, P("dp")),
    "sequence-parallel block": block_case(S(1), P("dp", "tp")),
    "tensor-parallel model": model_case(I),
    "sequence-parallel model": model_case(S(1)),
}

# Over "tp": the collectives of a forward and of its backward. A block of Megatron-LM has two
# all-reduces each way (Shoeybi et al. 2019, figure 4), or with a sharded sequence two gathers and
# two scatters each way (Korthikanti et al. 2022, figure 5), and then each norm sums the gradient of
# its scale. A loss has a maximum, a sum and a score, none of them with a backward.
BUDGET: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "tensor-parallel block": ({"all_reduce": 2}, {"all_reduce": 2}),
    "sequence-parallel block": (
        {"all_gather": 2, "reduce_scatter": 2},
        {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 2},
    ),
    # The block; the embedding and three of the loss forward, the unembedding backward.
    "tensor-parallel model": ({"all_reduce": 2 + 1 + 3}, {"all_reduce": 2 + 1}),
    "sequence-parallel model": (
        {"all_gather": 2 + 1, "reduce_scatter": 2 + 1, "all_reduce": 3},
        {"all_gather": 2 + 1, "reduce_scatter": 2 + 1, "all_reduce": 2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_program_sends_what_the_literature_says_and_no_more(name: str) -> None:
    assert budget(CASES[name]) == BUDGET[name]
