"""A mixture of experts that drops nothing equals a loop over all positions, and sends only rows."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    CollectiveError,
    LayerError,
    P,
    ShardTypeError,
    make_mesh,
    shard_map,
    validate_rule,
)
from shardmap_torch.nn import dropless_moe, grouped_linear
from tests.nn.support.cases import AXES, Case, budget, mapped, over_dp, random
from tests.support.golden import told

INPUTS = random(4, 6, 5), random(5, 4), random(4, 5, 3), random(4, 3), random(4, 3, 5)
BATCH = P(("dp", "tp"))
SPECS = BATCH, P(), P("tp"), P("tp"), P("tp")


def mlp(experts: dict[str, Tensor], rows: Tensor, sizes: Tensor) -> Tensor:
    hidden = torch.tanh(grouped_linear(rows, experts["up"], sizes, bias=experts["bias"]))
    return grouped_linear(hidden, experts["down"], sizes)


def sharded(
    x: Tensor, router: Tensor, up: Tensor, bias: Tensor, down: Tensor, result: int, **options: Any
) -> Tensor:
    experts = {"up": over_dp(up), "bias": over_dp(bias), "down": over_dp(down)}
    router = over_dp(router)
    return dropless_moe(x, router, experts, "tp", expert=mlp, batch_axis="dp", **options)[result]


def looped(
    x: Tensor,
    router: Tensor,
    up: Tensor,
    bias: Tensor,
    down: Tensor,
    result: int,
    num_selected: int,
) -> Tensor:
    """Every expert on every position, and then the chosen ones' share of each."""
    chances = (x @ router).softmax(-1)
    values, chosen = chances.topk(num_selected, -1)
    if result == 1:
        load = chosen.flatten().bincount(minlength=4).double() / chosen.numel()
        return 4 * (load * chances.mean((0, 1))).sum()
    made = torch.stack(
        [torch.tanh(x @ up[e] + bias[e]) @ down[e] for e in range(router.shape[1])], -2
    )
    taken = made.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, x.shape[-1]))
    return (taken * (values / values.sum(-1, keepdim=True)).unsqueeze(-1)).sum(-2)


def case(num_selected: int, result: int = 0, **options: Any) -> Case:
    body = partial(sharded, num_selected=num_selected, result=result, **options)
    reference = partial(looped, num_selected=num_selected, result=result)
    return Case(body, reference, SPECS, P() if result else BATCH, INPUTS)


CASES = {
    "one choice": case(1),
    "two choices": case(2),
    "all": case(4, room=48),
    "balance": case(2, result=1),
}
CASES["one expert a rank"] = Case(
    CASES["two choices"].body, CASES["two choices"].reference, SPECS, BATCH, INPUTS, (1, 4)
)


def test_rows_are_exchanged_there_and_back() -> None:
    forward, backward = budget(CASES["two choices"])
    # Sizes twice and how many rows each expert gets; load and chances of the balance.
    assert forward == {"ragged_all_to_all": 2, "all_gather": 2, "all_to_all": 1, "all_reduce": 2}
    assert backward == {"ragged_all_to_all": 2, "all_reduce": 1}  # the router's gradient


def test_where_all_select_one_expert_its_rank_needs_room_for_all_of_them() -> None:
    x, router = INPUTS[0].abs(), torch.zeros(5, 4).double()
    router[:, 2] = 1  # all positions, all of whose features are positive
    inputs = x, router, *INPUTS[2:]
    body = partial(sharded, num_selected=1, result=0)
    mesh = make_mesh((2, 2), AXES, kind="simulated")
    found = mapped(Case(body, body, SPECS, BATCH, inputs), mesh)(*inputs)
    torch.testing.assert_close(found, looped(*inputs, num_selected=1, result=0))
    body = partial(sharded, num_selected=1, result=0, room=11)
    with told(CollectiveError):
        mapped(Case(body, body, SPECS, BATCH, inputs), mesh)(*inputs)


@pytest.mark.parametrize("check", [True, "global"])
def test_sequences_that_all_ranks_have_are_refused(check: Any) -> None:
    mesh = make_mesh((2, 2), AXES, kind="simulated")
    f = shard_map(
        partial(sharded, num_selected=1, result=0),
        mesh=mesh,
        in_specs=(P("dp"), *SPECS[1:]),
        out_specs=P("dp"),
        check=check,
    )
    text = r"ragged_all_to_all\('tp', V -> V\) takes V .* but its operand is K"
    with pytest.raises(ShardTypeError, match=text):
        f(*INPUTS)


def test_experts_sharded_over_another_axis_are_refused_under_global_strictness() -> None:
    mesh = make_mesh((2, 2), AXES, kind="simulated")

    def body(x: Tensor, router: Tensor, *experts: Tensor) -> Tensor:
        up, bias, down = experts
        tree = {"up": up, "bias": bias, "down": down}
        return dropless_moe(x, over_dp(router), tree, "tp", expert=mlp, batch_axis="dp")[0]

    specs = BATCH, P(), P("dp"), P("dp"), P("dp")
    f = shard_map(body, mesh=mesh, in_specs=specs, out_specs=BATCH, check="global")
    with pytest.raises(ShardTypeError, match="promises"):
        f(*INPUTS)


def test_more_experts_than_there_are_cannot_be_selected() -> None:
    mesh = make_mesh((2, 2), AXES, kind="simulated")
    body = partial(sharded, num_selected=5, result=0)
    with told(LayerError):
        mapped(Case(body, body, SPECS, BATCH, INPUTS), mesh)(*INPUTS)


# --------------------------------------------------------------------- the grouped layer


def test_a_grouped_layer_has_first_and_second_derivatives() -> None:
    rows, weights, bias = random(5, 3), random(3, 3, 2), random(3, 2)
    sizes = torch.tensor([2, 0, 1])

    def f(rows: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
        return grouped_linear(rows, weights, sizes, bias=bias)

    leaves = [x.requires_grad_() for x in (rows, weights, bias)]
    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves)
    expected = torch.cat([rows[:2] @ weights[0] + bias[0], rows[2:3] @ weights[2] + bias[2]])
    torch.testing.assert_close(f(rows, weights, bias)[:3], expected)
    assert not f(rows, weights, bias)[3:].any()


def test_a_grouped_layer_has_derivatives_under_transforms() -> None:
    rows, weights, sizes = random(5, 3), random(3, 3, 2), torch.tensor([2, 0, 1])

    def f(rows: Tensor, weights: Tensor) -> Tensor:
        return grouped_linear(rows, weights, sizes).square().sum()

    def by_loop(rows: Tensor, weights: Tensor) -> Tensor:
        parts = rows[:2] @ weights[0], rows[2:3] @ weights[2]
        return torch.cat(parts).square().sum()

    first = torch.func.grad(f, argnums=(0, 1))
    expected = torch.func.grad(by_loop, argnums=(0, 1))
    torch.testing.assert_close(first(rows, weights), expected(rows, weights))
    second, wanted = (
        torch.func.grad(lambda r, w, g=g: g(r, w)[1].square().sum())(rows, weights)
        for g in (first, expected)
    )
    torch.testing.assert_close(second, wanted)


def test_the_rule_of_the_grouped_product_is_that_of_its_numbers() -> None:
    operands = torch.ones(4, 3), torch.ones(2, 3, 2), torch.tensor([1, 2])
    validate_rule(torch.ops.shardmap_torch.grouped_matmul.default, *operands)
    pairs = torch.ones(4, 3), torch.ones(4, 2), torch.tensor([1, 2])
    validate_rule(torch.ops.shardmap_torch.grouped_outer.default, *pairs)


@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 3), (2, 2, 5), (2,)),
        ((4, 3), (3, 5), (2,)),
        ((4, 3), (2, 3, 5), (3,)),
        ((4, 3), (2, 3, 5), (2,), (5,)),
    ],
)
def test_shapes_of_a_grouped_layer_that_do_not_match_are_refused(
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    rows, weight, sizes, *bias = (torch.zeros(shape) for shape in shapes)
    with told(LayerError):
        grouped_linear(rows, weight, sizes, bias=bias[0] if bias else None)


def test_more_rows_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="The groups have 5 rows together, of 4"):
        grouped_linear(torch.ones(4, 3), torch.ones(2, 3, 2), torch.tensor([2, 3]))
