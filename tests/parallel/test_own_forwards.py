"""Subclasses of Linear and Embedding whose forwards do more than theirs, sharded by rows."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmap_torch import SpecError, make_mesh, parallelize
from shardmap_torch.parallel import LocalAttributes
from tests.programs.support.harness import random
from tests.support.golden import told

MESH = make_mesh((2,), ("tp",), kind="simulated")


class Positive(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


class Conv1D(nn.Module):
    """A Linear with a transposed weight, as in transformers."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.flatten(0, -2), self.weight)
        return y.view(*x.shape[:-1], self.outputs)


class Matmul(nn.Linear):
    """Multiplies by `@`, and adds its bias, as in Falcon."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class BiasLater(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + 2 * self.bias


class Other(nn.Linear):
    """Multiplies in another way than a Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Adapted(nn.Module):
    """A Linear with a low-rank update, as peft has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(8, 6)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, 6, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return y


class Retrained(nn.Module):
    """A Linear, and the copy of it that is trained, as `modules_to_save` of peft has them."""

    def __init__(self) -> None:
        super().__init__()
        self.original_module = nn.Linear(8, 6)
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(8, 6)})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.original_module(x) * 0.0 + self.modules_to_save["default"](x)
        return y


class Latent(nn.Module):
    """Heads with one key, of which each takes its own multiple."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.k(x).tanh().unsqueeze(-2)
        y: Tensor = self.o((self.q(x).unflatten(-1, (-1, 2)) * keys).flatten(-2))
        return y


class Biased(nn.Module):
    """Heads with one factor for each, those of all sequences in one dim, as ALiBi is in Bloom."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.o = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, *, bias: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).flatten(0, 1) * bias
        y: Tensor = self.o(q.unflatten(0, (-1, self.num_heads)).transpose(1, 2).flatten(2))
        return y


class WithBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Biased()

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.arange(4.0 * len(x), dtype=x.dtype)[:, None, None]
        y: Tensor = self.attention(x, bias=bias)
        return y


X, IDS = random((2, 3, 8), 0), torch.tensor([[0, 7, 3]])

CASES: dict[str, tuple[nn.Module, Any, Tensor]] = {
    "a Linear": (Positive(8, 6), "rowwise_rep", X),
    "a Linear by @": (Matmul(8, 6), "rowwise_rep", X),
    "a Linear by @, by columns": (Matmul(8, 6), "colwise_rep", X),
    "a bias of its own": (BiasLater(8, 6), "rowwise_rep", X),
    "an Embedding": (Scaled(8, 4, padding_idx=3), "embedding_rowwise", IDS),
    "Conv1D by columns": (Conv1D(6, 8), "colwise_rep", X),
    "Conv1D by rows": (Conv1D(6, 8), "rowwise_rep", X),
    "an update by columns": (Adapted(), "colwise_rep", X),
    "an update by rows": (Adapted(), "rowwise_rep", X),
    "trained anew, by columns": (Retrained(), "colwise_rep", X),
    "trained anew, by rows": (Retrained(), "rowwise_rep", X),
    "a bias of each head": (
        WithBias(),
        {
            "attention": LocalAttributes("num_heads", heads={"bias": 0}),
            **{"attention.q": "colwise", "attention.o": "rowwise"},
        },
        X,
    ),
    "a key of all heads": (Latent(), {"q": "colwise", "k": "mla_kv_a_proj", "o": "rowwise"}, X),
}


@pytest.mark.parametrize("case", CASES)
def test_a_forward_of_its_own_runs_on_the_finished_product(case: str) -> None:
    module, style, x = CASES[case]
    one = copy.deepcopy(module).double()
    ours = parallelize(copy.deepcopy(one), MESH, style)
    for each in (one, ours):
        each(x).square().sum().backward()
    torch.testing.assert_close(ours(x), one(x))
    for name, value in ours.named_parameters():
        torch.testing.assert_close(value.grad, one.get_parameter(name).grad)


def test_a_forward_that_does_not_multiply_by_the_weight_is_refused() -> None:
    ours = parallelize(Other(8, 8), MESH, "rowwise_rep")
    with told(SpecError):
        ours(X.float())
