"""Experts of transformers, split within each and shared out whole, against one device."""

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.distributed.tensor import Partial
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from shardmap_torch import Mesh, RowwiseParallel, SpecError, make_mesh, parallelize
from shardmap_torch.parallel.words import WORDS
from tests.parallel.support.transformers_models import GROUPED, make_batch, make_model
from tests.programs.support.harness import global_value, random, worker_mesh
from tests.support.fuzzing import sampled
from tests.support.golden import hold_own
from tests.support.pool import Gloo


def make(name: str, experts: str) -> Any:
    if name == "mixtral":
        return make_model(name, num_layers=1, experts_implementation=experts)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"head_dim": 8, "num_hidden_layers": 1, "moe_intermediate_size": 16}
    routes: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "experts_implementation": experts,
    }
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**{**GROUPED, **sizes, **routes}))


def learns_alike(name: str, experts: str, plan: str, mesh: Mesh, **data: Any) -> None:
    # Grouped products are at most of 32 bits in torch, and so are the routers of both models.
    exact = experts != "grouped_mm"
    one = make(name, experts).double() if exact else make(name, experts)
    ours = copy.deepcopy(one)
    parallelize(ours, mesh, {**one._tp_plan, **one._ep_plan} if plan == "whole" else None, **data)
    batch = make_batch(name)
    for model in (one, ours):
        model(**batch).loss.backward()
    close = 1e-7 if exact else 1e-4
    for key, value in one.named_parameters():
        found = global_value(ours.get_parameter(key).grad)
        torch.testing.assert_close(found, value.grad, rtol=close, atol=close, msg=key)


@pytest.mark.sample(2, "qwen3-grouped_mm-split")
@pytest.mark.parametrize("plan", ["split", "whole"])
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", sampled(["mixtral", "qwen3"], "qwen3"))
def test_experts_learn_as_on_one_device(name: str, experts: str, plan: str) -> None:
    learns_alike(name, experts, plan, make_mesh((2,), ("tp",), kind="simulated"))


def on_processes() -> None:
    learns_alike("qwen3", "grouped_mm", "whole", worker_mesh((2,), ("tp",)))


def test_on_processes_whole_experts_learn_as_on_one_device(gloo: Gloo) -> None:
    gloo(2).run(on_processes, timeout=120)


def test_every_word_of_transformers_is_known() -> None:
    assert {*ALL_PARALLEL_STYLES} <= {*WORDS}


class Identity(nn.Module):
    """An expert beside a layer whose ranks add up, as in LongCat-Flash."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.same, self.total = nn.Identity(), nn.Identity()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.total(self.down(self.up(x)) + self.same(x))
        return y


def test_an_identity_counts_once_in_the_sum_of_experts() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    one, x = Identity(), random((3, 8), 0)
    plan: dict[str, Any] = {
        "up": "colwise",
        "down": RowwiseParallel(output_layouts=Partial()),
        "same": "moe_identity_expert",
        "total": "all_reduce",
    }
    ours = parallelize(copy.deepcopy(one), mesh, plan)
    torch.testing.assert_close(ours(x), one(x))


def refused(module: nn.Module, plan: Any, *args: Any) -> str:
    with pytest.raises(SpecError) as caught:
        parallelize(module, make_mesh((2,), ("tp",), kind="simulated"), plan)(*args)
    return str(caught.value)


def test_what_is_no_module_of_experts_is_rejected() -> None:
    hold_own(refused(nn.Tanh(), "ep_dispatch_experts", random((2, 2), 0)))


def test_experts_that_do_not_divide_are_rejected() -> None:
    model = make_model("mixtral", num_layers=1)
    config = copy.copy(model.config)
    config.num_local_experts = 3
    hold_own(refused(type(model)(config), model._ep_plan))
