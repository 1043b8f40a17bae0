"""Megatron-LM's token dispatcher with an uneven all-to-all, and its experts.

Source: MoEAlltoAllTokenDispatcher of megatron/core/transformer/moe/token_dispatcher.py, TopKRouter
of router.py, permute, unpermute and sort_chunks_by_idxs of moe_utils.py. What a port changes:
numbers of tokens stay tensors, since `tolist` would give each rank other Python numbers, so that
rows are sorted by the number of their expert and not split; a rank has room for a fixed number of
rows, by default for all; and Megatron's `_AllToAll`, a Function on `all_to_all_single` with split
sizes, is `ragged_all_to_all`, which has its backward.
"""

from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    ShardTypeError,
    all_gather,
    all_reduce,
    axis_index,
    axis_size,
    check_program,
    convert,
    local_region,
    make_mesh,
    ragged_all_to_all,
    shard_map,
    validate_rule,
)
from shardmap_torch.nn import grouped_linear
from tests.programs.support.everywhere import run_on
from tests.programs.support.harness import random
from tests.programs.support.ported import Params, compare
from tests.support.pool import Gloo

TOKENS, WIDTH, HIDDEN, EXPERTS, SELECTED = 12, 3, 2, 8, 2
RANKS: Final = 4
SPECS: Final = {"router": P(), "up": P("ep"), "down": P("ep")}
SHAPES: Final[dict[str, tuple[int, ...]]] = {
    **{"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN)},
    "down": (EXPERTS, HIDDEN, WIDTH),
}


class Dispatcher:
    """Sends tokens to the ranks that have their experts, and the results back."""

    def __init__(self, chosen: Tensor, probs: Tensor) -> None:
        self.probs = probs
        self.tokens_per_expert = functional.one_hot(chosen, EXPERTS).sum((0, 1))
        self.order = chosen.flatten().argsort(stable=True)  # this rank's choices, by expert

    def permutation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows for this rank's experts, sorted by expert, and their numbers."""
        local = EXPERTS // axis_size("ep")
        input_splits = self.tokens_per_expert.unflatten(0, (-1, local)).sum(1)
        rows = x.index_select(0, self.order // SELECTED)
        rows, self.output_splits = ragged_all_to_all(rows, "ep", send_sizes=input_splits)
        counts = all_gather(self.tokens_per_expert.unsqueeze(0), "ep", dim=0, dst=R)
        own = torch.narrow(counts, 1, axis_index("ep") * local, local)  # by sender and expert
        ends = own.flatten().cumsum(0)
        chunk = torch.searchsorted(ends, torch.arange(rows.shape[0]), right=True)
        expert = torch.where(chunk < ends.shape[0], chunk % local, local)
        self.by_expert = expert.argsort(stable=True)  # sort_chunks_by_idxs; no expert's come last
        return rows.index_select(0, self.by_expert), own.sum(0)

    def unpermutation(self, rows: Tensor) -> Tensor:
        """Sends rows back, and adds up those of each token, weighted."""
        rows = rows.index_select(0, self.by_expert.argsort())
        count = self.order.shape[0]
        rows, _ = ragged_all_to_all(rows, "ep", send_sizes=self.output_splits, length=count)
        rows = rows * self.probs.flatten().index_select(0, self.order).unsqueeze(-1)
        at = (self.order // SELECTED).unsqueeze(-1).expand_as(rows)
        return rows.new_zeros(count // SELECTED, rows.shape[1]).scatter_add(0, at, rows)


def dispatched(x: Tensor, probs: Tensor, chosen: Tensor, up: Tensor, down: Tensor) -> Tensor:
    dispatcher = Dispatcher(chosen, probs)
    rows, sizes = dispatcher.permutation(x)
    hidden = functional.gelu(grouped_linear(rows, up, sizes))
    return dispatcher.unpermutation(grouped_linear(hidden, down, sizes))


experts_of = local_region(dispatched, in_types=(P("ep"),) * 5, out_types=P("ep"))


def routed(router: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    values, chosen = (x @ router).topk(SELECTED, -1)
    return values.softmax(-1), chosen


def layer(p: Params, x: Tensor, y: Tensor, experts: Any = experts_of) -> Tensor:
    probs, chosen = routed(convert(p["router"], "ep", src=I, dst=R), x)
    out = x + experts(x, probs, chosen, p["up"], p["down"])
    loss: Tensor = all_reduce((out - y).square().mean(), "ep", op="mean", dst=I)
    return loss


def original(p: Params, x: Tensor, y: Tensor) -> Tensor:
    """Every expert on every token, of which the chosen ones count."""
    probs, chosen = routed(p["router"], x)
    weights = torch.zeros(TOKENS, EXPERTS, dtype=x.dtype).scatter(1, chosen, probs)
    made = functional.gelu(torch.einsum("td,edh->teh", x, p["up"]))
    out = x + torch.einsum("teh,ehd,te->td", made, p["down"], weights)
    return (out - y).square().mean()


def everything(check: Any, mesh: Mesh) -> None:
    params = {name: random(shape, len(name)) for name, shape in SHAPES.items()}
    x = random((TOKENS, WIDTH), 1)
    chosen = routed(params["router"], x)[1].flatten()
    sent = functional.one_hot(chosen // (EXPERTS // RANKS), RANKS).unflatten(0, (RANKS, -1)).sum(1)
    assert len({*sent.flatten().tolist()}) > 2  # ranks exchange different numbers of rows
    data = x, random(x.shape, 2)
    compare(mesh, layer, original, params, data, (SPECS, P("ep"), P("ep")), check)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("ranks", True),
        ("gloo", True),
        pytest.param("ranks", "global", marks=pytest.mark.fuzz),  # 10 s: it is tried
        pytest.param("gloo", "global", marks=pytest.mark.fuzz),
    ],
)
def test_tokens_go_to_their_experts_and_back(kind: str, check: Any, gloo: Gloo) -> None:
    run_on(kind, partial(everything, check), gloo, (RANKS,), ("ep",))


def by_python_numbers(x: Tensor, probs: Tensor, chosen: Tensor, *weights: Tensor) -> Tensor:
    """Splits rows by the numbers of tokens, as Megatron does."""
    sizes = Dispatcher(chosen, probs).tokens_per_expert.tolist()
    return x + torch.stack([part.sum() for part in torch.split(x, sizes)]).sum()


def to_other_experts(x: Tensor, probs: Tensor, chosen: Tensor, *weights: Tensor) -> Tensor:
    """Sends the tokens of each rank but the first to experts that were not chosen."""
    return dispatched(x, probs, (chosen + axis_index("ep")) % EXPERTS, *weights)


@pytest.mark.parametrize(
    ("experts", "check", "text"),
    [
        pytest.param(
            *(dispatched, "global", "sort is not what it is on one device.*local_region"),
            marks=pytest.mark.fuzz,
        ),
        (by_python_numbers, True, "the ranks would get different Python values"),
    ],
)
def test_what_a_port_has_to_change_is_refused(experts: Any, check: Any, text: str) -> None:
    mesh = make_mesh((RANKS,), ("ep",), kind="abstract")
    body = partial(layer, experts=experts)
    specs = SPECS, P("ep"), P("ep")
    f = shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check=check)
    params = {name: random(shape, 0).requires_grad_() for name, shape in SHAPES.items()}
    x = random((TOKENS, WIDTH), 1)
    with pytest.raises(ShardTypeError, match=f"(?s){text}"):
        check_program(f, params, x, x)


def test_the_promise_of_the_region_is_tried_with_numbers() -> None:
    params = {name: random(shape, len(name)) for name, shape in SHAPES.items()}
    x = random((TOKENS, WIDTH), 1)
    args = x, *routed(params["router"], x), params["up"], params["down"]
    validate_rule(experts_of, *args, num_ranks=RANKS)
    wrong = local_region(to_other_experts, in_types=(P("ep"),) * 5, out_types=P("ep"))
    with pytest.raises(ShardTypeError, match="to_other_experts"):
        validate_rule(wrong, *args, num_ranks=RANKS)
