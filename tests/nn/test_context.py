"""Attention over a sharded sequence equals attention over all of it, balanced or not."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardmap_torch import LayerError, P, make_mesh, shard_map, trace, validate_rule
from shardmap_torch.nn import head_tail_order, ring_attention, ulysses_attention
from shardmap_torch.nn.context import ring_region
from tests.nn.support.cases import AXES, Case, budget, mapped, random
from tests.programs.support.harness import worker_mesh
from tests.support.golden import told
from tests.support.pool import Gloo

Q, K, V = random(2, 8, 4, 2), random(2, 8, 2, 2, seed=1), random(2, 8, 2, 3, seed=2)


def torchs(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    return y.transpose(1, 2)


def in_another_order(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Puts the sequence in order, attends, and puts it back."""
    order = positions.argsort()
    return torchs(q[:, order], k[:, order], v[:, order], is_causal=True)[:, positions]


def ring(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, balanced: bool) -> Tensor:
    return ring_attention(q, k, v, "tp", positions=positions, balanced=balanced)


def ulysses(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    return ulysses_attention(q, k, v, "tp", positions=positions)


def case(body: Any, reference: Any, num_ranks: int = 2, order: Tensor | None = None) -> Case:
    time, inputs = P("dp", "tp"), [] if order is None else [order]
    specs = time, time, time, *[P("tp")] * len(inputs)
    return Case(body, reference, specs, time, (Q, K, V, *inputs), (1, num_ranks))


CAUSAL = partial(torchs, is_causal=True)
SHUFFLED = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
CASES = {
    "ring": case(partial(ring_attention, axis="tp"), CAUSAL),
    "ring of 4": case(partial(ring_attention, axis="tp"), CAUSAL, 4),
    "ring of all": case(
        partial(ring_attention, axis="tp", causal=False, scale=0.3), partial(torchs, scale=0.3)
    ),
    "ring of a shuffled sequence": case(
        partial(ring, balanced=False), in_another_order, order=SHUFFLED
    ),
    "balanced ring": case(
        partial(ring, balanced=True), in_another_order, order=head_tail_order(8, 2)
    ),
    "balanced ring of 4": case(
        partial(ring, balanced=True), in_another_order, 4, head_tail_order(8, 4)
    ),
    "exchanged heads": case(partial(ulysses_attention, axis="tp"), CAUSAL),
    "exchanged heads of a shuffled sequence": case(ulysses, in_another_order, order=SHUFFLED),
}


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("ring", {"ppermute": 1}, {"ppermute": 1 + 2}),
        ("ring of 4", {"ppermute": 3}, {"ppermute": 3 + 4}),  # again, and the gradients home
        ("exchanged heads", {"all_to_all": 4}, {"all_to_all": 4}),
    ],
)
def test_each_step_sends_keys_and_values_in_one_message(
    name: str, forward: dict[str, int], backward: dict[str, int]
) -> None:
    assert budget(CASES[name]) == (forward, backward)


def num_products(name: str) -> int:
    """Multiplications of one forward over 16 positions, by which scores are made and used."""
    inputs = [torch.cat([x, x], 1) for x in (Q, K, V)]
    order = [head_tail_order(16, 4)] if "balanced" in name else []
    program = trace(mapped(CASES[name], make_mesh((1, 4), AXES)), *inputs, *order)
    products = [e for e in program.equations if e.name == "bmm"]
    return sum(torch.Size(e.results[0].shape).numel() * e.operands[0].shape[2] for e in products)


def test_a_balanced_ring_computes_about_half_of_what_an_unbalanced_one_does() -> None:
    # Of 4 steps the first has three blocks of a quarter each, the others have two.
    balanced, unbalanced = num_products("balanced ring of 4"), num_products("ring of 4")
    assert balanced / unbalanced == (3 / 4 + 3 / 2) / 4


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_head_tail_order_gives_every_rank_the_same_number_of_visible_pairs(num_ranks: int) -> None:
    order = head_tail_order(16, num_ranks)
    assert order.sort().values.tolist() == list(range(16))
    seen = [(part.unsqueeze(1) >= torch.arange(16)).sum().item() for part in order.chunk(num_ranks)]
    assert len(set(seen)) == 1


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_regions_keep_their_promises(num_ranks: int) -> None:
    ordered = ring_region("tp", True, False, 0.5, False).typed(P(), P(), P(), ranks=(4, 4, 4))
    assert validate_rule(ordered, Q, K, V, num_ranks=num_ranks)
    balanced = ring_region("tp", True, True, 0.5, True).typed(*[P()] * 4, ranks=(4, 4, 4, 1))
    assert validate_rule(balanced, Q, K, V, head_tail_order(8, num_ranks), num_ranks=num_ranks)


def test_positions_that_are_not_in_head_tail_order_make_a_balanced_ring_nan() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    time = P(None, "tp")
    f = shard_map(
        partial(ring, balanced=True),
        mesh=mesh,
        in_specs=(time, time, time, P("tp")),
        out_specs=time,
    )
    assert f(Q, K, V, torch.arange(8)).isnan().all()


def second(f: Any) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    y = f(*leaves)
    y = y.full_tensor() if isinstance(y, DTensor) else y
    first = torch.autograd.grad((y * random(*y.shape)).sum(), leaves, create_graph=True)
    total = sum((g * random(*g.shape, seed=5)).sum() for g in first)
    assert isinstance(total, Tensor)
    return list(torch.autograd.grad(total, leaves))


def in_full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / 2**0.5
    past = torch.ones(8, 8, dtype=torch.bool).tril()
    weights = scores.masked_fill(~past, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, v)


def compare_second_derivatives() -> None:
    found = second(mapped(CASES["ring"], worker_mesh((1, 2), AXES)))
    torch.testing.assert_close(found, second(in_full), rtol=1e-10, atol=1e-10)


def test_second_derivatives_go_through_the_saved_logsumexp(gloo: Gloo) -> None:
    gloo(2).run(compare_second_derivatives)


def test_a_length_without_two_chunks_for_each_rank_is_refused() -> None:
    with told(LayerError):
        head_tail_order(6, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"balanced": True},
        {"positions": torch.arange(4)},
    ],
)
def test_positions_that_do_not_match_are_refused(options: dict[str, Any]) -> None:
    with told(LayerError):
        ring_attention(Q, K, V, "tp", **options)


@pytest.mark.parametrize("f", [ring_attention, ulysses_attention])
def test_shapes_that_do_not_match_are_refused(f: Any) -> None:
    with told(LayerError):
        f(Q[:, :, :3], K, V, "tp")


def test_more_ranks_than_key_heads_are_refused() -> None:
    mesh = make_mesh((1, 4), AXES, kind="simulated")
    with told(LayerError):
        mapped(CASES["exchanged heads"], mesh)(Q, K, V)
