"""A sharded mixture of experts routes, drops and balances as one that loops over positions."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import LayerError, P, make_mesh
from shardmap_torch.nn import moe
from tests.nn.support.cases import AXES, Case, budget, mapped, over_dp, random
from tests.support.golden import told

INPUTS = random(4, 6, 5), random(5, 4), random(4, 5, 3), random(4, 3, 5)
BATCH = P(("dp", "tp"))
SPECS = BATCH, P(), P("tp"), P("tp")


def mlp(experts: dict[str, Tensor], tokens: Tensor) -> Tensor:
    return torch.tanh(tokens @ experts["up"]) @ experts["down"]


def sharded(
    x: Tensor, router: Tensor, up: Tensor, down: Tensor, result: int, **options: Any
) -> Tensor:
    experts = {"up": over_dp(up), "down": over_dp(down)}
    router = over_dp(router)
    return moe(x, router, experts, "tp", expert=mlp, batch_axis="dp", **options)[result]


def looped(
    x: Tensor,
    router: Tensor,
    up: Tensor,
    down: Tensor,
    result: int,
    num_selected: int,
    capacity_factor: float | None,
) -> Tensor:
    """One position after the other, each choice of all before the next."""
    num_experts, length = router.shape[1], x.shape[1]
    chances = (x @ router).softmax(-1)
    values, chosen = chances.topk(num_selected, -1)
    shares = values / values.sum(-1, keepdim=True)
    load = chosen.flatten().bincount(minlength=num_experts).double() / chosen.numel()
    if result == 1:
        return num_experts * (load * chances.mean((0, 1))).sum()
    room = length
    if capacity_factor is not None:
        room = math.ceil(capacity_factor * num_selected * length / num_experts)
    sequences = []
    for b in range(len(x)):
        free, rows = [room] * num_experts, [torch.zeros_like(x[b, 0]) for _ in range(length)]
        for j in range(num_selected):
            for t in range(length):
                e = int(chosen[b, t, j])
                if free[e] > 0:
                    rows[t] = rows[t] + shares[b, t, j] * (torch.tanh(x[b, t] @ up[e]) @ down[e])
                free[e] -= 1
        sequences.append(torch.stack(rows))
    return torch.stack(sequences)


def case(result: int, num_selected: int, capacity_factor: float | None) -> Case:
    options: Any = {"num_selected": num_selected, "capacity_factor": capacity_factor}
    body, reference = (partial(f, result=result, **options) for f in (sharded, looped))
    return Case(body, reference, SPECS, BATCH if result == 0 else P(), INPUTS)


CASES = {
    "one expert each": case(0, 1, 1.0),
    "two experts each": case(0, 2, 1.25),
    "little room": case(0, 3, 0.5),
    "dropless": case(0, 2, None),
    "balance": case(1, 2, 1.25),
}


def test_little_room_drops_something_and_dropless_nothing() -> None:
    def dropped(factor: float | None) -> bool:
        found = looped(*INPUTS, result=0, num_selected=2, capacity_factor=factor)
        return not found.allclose(looped(*INPUTS, result=0, num_selected=2, capacity_factor=None))

    assert dropped(0.5)
    assert not dropped(4 / 2)


def test_positions_are_exchanged_there_and_back() -> None:
    forward, backward = budget(CASES["two experts each"])
    assert forward == {"all_to_all": 2, "all_reduce": 2}  # load and chances of the balance
    assert backward == {"all_to_all": 2, "all_reduce": 1}  # the router's gradient


def test_even_loads_have_a_balance_of_1() -> None:
    x = torch.eye(4).double().reshape(4, 1, 4).repeat(1, 2, 1) * 1e-6
    body = partial(sharded, result=1, num_selected=1)
    inputs = x, torch.eye(4).double(), torch.zeros(4, 4, 3).double(), torch.zeros(4, 3, 4).double()
    even = Case(body, body, SPECS, P(), inputs)
    found = mapped(even, make_mesh((2, 2), AXES, kind="simulated"))(*inputs)
    assert found.item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("num_selected", "num_experts"),
    [
        (5, 4),
        (1, 2),
    ],
)
def test_what_does_not_match_is_refused(num_selected: int, num_experts: int) -> None:
    body = partial(sharded, result=0, num_selected=num_selected)
    x, router, up, down = INPUTS
    wrong = Case(body, body, SPECS, BATCH, (x, router, up[:num_experts], down[:num_experts]))
    with told(LayerError):
        mapped(wrong, make_mesh((2, 2), AXES, kind="simulated"), check="local")(*wrong.inputs)
