"""Bugs that others have reported of parallel training, written with typed collectives.

Each names where it was reported. What the checker cannot see, because the program is well-typed and
only means something else, stands at the end.
"""

from typing import Any

import torch
from torch import Tensor

from shardmap_torch import (
    Function,
    I,
    P,
    Partial,
    R,
    V,
    all_reduce,
    axis_index,
    axis_size,
    check_program,
    convert,
    reinterpret,
    shard_map,
)
from tests.checker.support.rejections import ABSTRACT, assert_right, gradient, numbers, rejection

X = numbers(8, 6)
DATA = numbers(8, 6, grad=False, seed=2)
W, A, B = numbers(6, 8), numbers(6, 4), numbers(4, 8)
COLUMN = P(None, "tp")


def low_rank(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return convert(x @ a, "tp", src=I, dst=R) @ b


def test_a_gradient_that_the_boundary_of_the_next_layer_has_summed_is_not_summed_again() -> None:
    """AReno 496: a replicated projection before a column-parallel one is reduced twice."""

    def step(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        def loss(a: Tensor) -> Tensor:
            return all_reduce(low_rank(x, a, b).square().sum(), "tp", dst=I)

        return a - all_reduce(gradient(loss, a), "tp", dst=I)

    specs = (P(invariant={"tp"}), COLUMN, P(invariant={"tp"}))
    text = rejection(step, A.detach(), B.detach(), DATA, in_specs=specs, out_specs=P())
    assert "all_reduce('tp', Partial -> I) takes P" in text


def test_a_projection_of_which_a_part_bypasses_the_next_layer_s_boundary_is_rejected() -> None:
    """AReno 496 as well: one part's gradient is whole, the other's is each rank's own."""

    def body(x: Tensor, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        low = x @ a
        main = convert(low[:, :2], "tp", src=I, dst=R) @ b[:2]
        return main + (low[:, 2:] @ y)

    specs = (P(), P(invariant={"tp"}), COLUMN, COLUMN)
    args = DATA, A, B, numbers(2, 8)
    text = rejection(body, *args, in_specs=specs, out_specs=COLUMN)
    assert "mm over axis 'tp' of I and V" in text


def test_a_norm_that_counts_replicated_gradients_once_a_rank_is_rejected() -> None:
    """ROCm TransformerEngine 715, torchtune 2420: the norm is too large, and clips too much."""

    def step(w: Tensor, x: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            return (x @ w).square().sum()

        grad = all_reduce(gradient(loss, w), "tp", dst=I)
        norm = all_reduce(grad.square().sum(), "tp", dst=I).sqrt()
        return w - grad / norm

    text = rejection(step, W.detach(), DATA, in_specs=(P(), P("tp")), out_specs=P())
    assert "takes Partial (a pending sum over the ranks)" in text


def test_gates_that_each_expert_s_rank_masks_by_itself_need_their_gradients_summed() -> None:
    """transformers 48687: the loss is right, and the router's gradient is not."""

    def body(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        weights = torch.softmax(x @ gate, -1).unsqueeze(-1)
        own = weights.index_select(1, axis_index("tp").reshape(1))[:, 0]
        return all_reduce(own * (x @ w[0]), "tp", dst=I)

    def one(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        weights = torch.softmax(x @ gate, -1)
        return torch.einsum("te,td,edf->tf", weights, x, w)

    args = DATA, A, numbers(4, 6, 5)
    kept = (P(), P(invariant={"tp"}), P("tp"))
    assert "of I and V" in rejection(body, *args, in_specs=kept, out_specs=P())
    assert_right(body, one, *args, in_specs=(P(), P(), P("tp")), out_specs=P())


def test_a_second_reduction_of_what_is_replicated_already_is_rejected() -> None:
    """torchtitan 2416, pytorch 175867: a backward that need not be reduced is."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        gathered = all_reduce(x, "tp", dst=R)
        return convert(gathered, "tp", src=I, dst=R) @ w

    text = rejection(body, X, W, in_specs=(P("tp"), COLUMN), out_specs=COLUMN)
    assert "convert('tp', I -> R) takes I" in text


class Summed(Function):
    """A sum whose backward sums once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_reduce(x, "tp", dst=I)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return all_reduce(grads[0], "tp", dst=I)


def test_a_sum_of_one_s_own_that_sums_again_in_backward_is_rejected() -> None:
    """pytorch 58005, xtuner 1004: the gradients are n times too large."""

    def body(x: Tensor) -> Tensor:
        y: Tensor = Summed.apply(x.square().sum())
        return y

    text = rejection(body, X, in_specs=P("tp"), out_specs=P())
    assert "takes Partial (a pending sum over the ranks)" in text


def test_heads_that_ranks_pick_from_a_replicated_projection_need_a_sum() -> None:
    """Fewer key heads than ranks: each rank picks one, and learns from its own queries only."""

    def body(x: Tensor, keys: Tensor) -> Tensor:
        head = (axis_index("tp") % 2).reshape(1)
        return x @ keys.index_select(0, head)[0]

    def one(x: Tensor, keys: Tensor) -> Tensor:
        return torch.cat([x @ keys[0], x @ keys[1]] * 2, 1)

    keys = numbers(2, 6, 3)
    text = rejection(body, DATA, keys, in_specs=(P(), P(invariant={"tp"})), out_specs=COLUMN)
    assert "index_select over axis 'tp' of I and V" in text
    assert_right(body, one, DATA, keys, in_specs=(P(), P()), out_specs=COLUMN)


def test_a_tied_embedding_on_the_first_and_the_last_stage_needs_both_gradients() -> None:
    """The pipeline's two ends each learn a table of their own."""

    def step(table: Tensor, x: Tensor) -> Tensor:
        def loss(table: Tensor) -> Tensor:
            stage, last = axis_index("tp"), axis_size("tp") - 1
            head = torch.where(stage == last, (x @ table).square().sum(), 0.0)
            return head + torch.where(stage == 0, table.square().sum(), 0.0)

        return table - 0.1 * gradient(loss, table)

    text = rejection(step, W.detach(), DATA, in_specs=(P(), P()), out_specs=P())
    assert "sub over axis 'tp' of Partial and K" in text
    assert "sum the gradient first, with all_reduce(g, 'tp', dst=I)" in text


def test_an_auxiliary_loss_of_equal_values_summed_over_ranks_is_rejected() -> None:
    """Megatron-LM 3768: the router's regulariser grows with the number of ranks."""

    def body(x: Tensor, gate: Tensor) -> Tensor:
        scores = torch.softmax(x @ gate, -1)
        return all_reduce(scores.logsumexp(-1).square().mean(), "tp", dst=I)

    specs = (P(), P(invariant={"tp"}))
    text = rejection(body, DATA, A, in_specs=specs, out_specs=P())
    assert "takes Partial (a pending sum over the ranks)" in text


def test_a_maximum_of_addends_is_rejected() -> None:
    """pytorch 165962: operations on partial values that are not linear, taken before the sum."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        partial = reinterpret(x @ w, "tp", src=V, dst=Partial)
        return all_reduce(partial.amax(-1), "tp", dst=I)

    args = numbers(5, 8), numbers(8, 3)
    text = rejection(body, *args, in_specs=(COLUMN, P("tp")), out_specs=P())
    assert "the operation is not linear" in text


def test_learned_places_in_a_cut_sequence_are_summed_over_its_ranks() -> None:
    """Every rank reads its own rows of a table that all of them hold."""

    def body(x: Tensor, places: Tensor) -> Tensor:
        return x + places[axis_index("tp") * 2 + torch.arange(2)]

    places, specs = numbers(8, 6, seed=3), (P("tp"), P(invariant={"tp"}))
    text = rejection(body, X, places, in_specs=specs, out_specs=P("tp"))
    assert "of I and V" in text
    assert_right(body, torch.add, X, places, in_specs=(P("tp"), P()), out_specs=P("tp"))


# ------------------------------------------------------------- right, though it looks like a bug


def test_a_bias_that_the_first_rank_alone_adds_is_right() -> None:
    """nano-vllm 99: reported as a bug, and none."""

    def body(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return all_reduce(x @ w + torch.where(axis_index("tp") == 0, b, 0.0), "tp", dst=I)

    def one(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return x @ w + b

    args = numbers(5, 8), numbers(8, 3), numbers(3)
    assert_right(body, one, *args, in_specs=(COLUMN, P("tp"), P()), out_specs=P())


# --------------------------------------------------- well-typed, and something else than was meant


def accepted(body: Any, *args: Tensor, in_specs: Any, out_specs: Any) -> None:
    check_program(shard_map(body, mesh=ABSTRACT, in_specs=in_specs, out_specs=out_specs), *args)


def test_a_mean_of_gradients_where_their_sum_is_meant_is_not_seen() -> None:
    """gpt-neox 1259: the norm's weight learns n times too slowly."""

    def step(w: Tensor, x: Tensor) -> Tensor:
        grad = gradient(lambda w: (x @ w).square().sum(), w)
        return w - 0.1 * all_reduce(grad, "tp", dst=I, op="mean")

    accepted(step, W.detach(), DATA, in_specs=(P(), P("tp")), out_specs=P())


def test_a_sum_of_norms_where_the_norm_of_all_is_meant_is_not_seen() -> None:
    """torchtitan 649: norms do not add up, but any V will do for addends."""

    def norm(x: Tensor) -> Tensor:
        return all_reduce(x.square().sum().sqrt(), "tp", dst=I)

    accepted(norm, X, in_specs=P("tp"), out_specs=P())
