"""Cross-entropy over a sharded vocabulary equals torch's, with every option, on every mesh."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import LayerError, P, S, make_mesh, shard_map, trace, validate_rule
from shardmap_torch.nn import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from shardmap_torch.nn.loss import Loss, chunked_nats, own_scores
from tests.nn.support.cases import Case, budget, integers, over_dp, random
from tests.support.golden import told

X, W = random(4, 6, 5), random(5, 8)
LOGITS, TARGETS = random(4, 6, 8) * 3, integers(8, 4, 6)
# Not the same number on each rank of "dp": the mean of means would be another value.
SOME_IGNORED = TARGETS.clone()
SOME_IGNORED[0, :4] = SOME_IGNORED[3, 1] = -100
CHANCES = random(4, 6, 8, seed=3).softmax(-1) * 1.3


def loss(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return vocab_parallel_cross_entropy(logits, targets, "tp", **options)


def soft(logits: Tensor, chances: Tensor, **options: Any) -> Tensor:
    return loss(logits, chances.detach(), **options)


def chunked(x: Tensor, w: Tensor, targets: Tensor, chunk_size: int = 5, **options: Any) -> Tensor:
    return vocab_parallel_linear_cross_entropy(
        x, over_dp(w), targets, "tp", chunk_size=chunk_size, batch_axis="dp", **options
    )


def torchs(logits: Tensor, targets: Tensor, z_loss: float = 0, **options: Any) -> Tensor:
    soft = targets.is_floating_point()
    targets = targets.detach().transpose(1, 2) if soft else targets
    nats = functional.cross_entropy(logits.transpose(1, 2), targets, **options)
    if not z_loss:
        return nats
    return nats + z_loss * logits.logsumexp(-1).square().where(targets != -100, 0.0)


def torchs_of_product(x: Tensor, w: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return torchs(x @ w, targets, **options)


SPECS = P("dp", None, "tp"), P("dp")


def case(out: P, targets: Tensor = SOME_IGNORED, **options: Any) -> Case:
    mine = options | ({"batch_axis": "dp"} if out == P() else {})
    theirs = {k: v for k, v in options.items() if v is not None}
    return Case(partial(loss, **mine), partial(torchs, **theirs), SPECS, out, (LOGITS, targets))


MEAN, SUM, EACH = P(), P(), P("dp")
CASES = {
    "mean": case(MEAN),
    "mean of none ignored": case(MEAN, TARGETS, ignore_index=None),
    "mean with another number ignored": case(MEAN, ignore_index=3, targets=TARGETS),
    "sum": case(SUM, reduction="sum"),
    "each": case(EACH, reduction="none"),
    "smoothed mean": case(MEAN, label_smoothing=0.1),
    "z-loss": case(EACH, reduction="none", z_loss=0.3, label_smoothing=0.1),
    "weighted by class": Case(
        lambda logits, targets, factors: loss(
            logits, targets, class_weight=factors.detach(), label_smoothing=0.1, batch_axis="dp"
        ),
        lambda logits, targets, factors: torchs(
            logits, targets, weight=factors.detach(), label_smoothing=0.1
        ),
        (*SPECS, P()),
        MEAN,
        (LOGITS, SOME_IGNORED, random(8).exp()),
    ),
    "of probabilities": Case(
        partial(soft, batch_axis="dp", label_smoothing=0.2, reduction="sum"),
        partial(torchs, label_smoothing=0.2, reduction="sum"),
        (SPECS[0], SPECS[0]),
        SUM,
        (LOGITS, CHANCES),
    ),
    "chunked": Case(
        chunked, torchs_of_product, (P("dp"), P(None, "tp"), P("dp")), MEAN, (X, W, SOME_IGNORED)
    ),
    "chunked, of a sharded sequence": Case(
        partial(chunked, src=S(1), reduction="none", z_loss=0.3, label_smoothing=0.1),
        partial(torchs_of_product, reduction="none", z_loss=0.3, label_smoothing=0.1),
        (P("dp", "tp"), P(None, "tp"), P("dp")),
        EACH,
        (X, W, SOME_IGNORED),
    ),
}


@pytest.mark.parametrize(
    ("name", "num_forward"),
    [("mean", 3), ("smoothed mean", 3), ("z-loss", 3), ("of probabilities", 4)],
)
def test_three_small_all_reduces_forward_and_none_backward(name: str, num_forward: int) -> None:
    assert budget(CASES[name]) == ({"all_reduce": num_forward}, {})


def test_over_the_batch_a_sum_and_a_count_are_sent_and_the_count_only_where_it_is_needed() -> None:
    assert budget(CASES["mean"], "dp") == ({"all_reduce": 2}, {})
    assert budget(CASES["mean of none ignored"], "dp") == ({"all_reduce": 1}, {})


def test_by_chunks_the_backward_sends_the_gradient_of_x_and_what_it_recomputes() -> None:
    of_chunks = 3 * 3  # of 5 of this rank's 12 positions
    assert budget(CASES["chunked"]) == ({"all_reduce": of_chunks}, {"all_reduce": of_chunks + 1})


def test_by_chunks_no_tensor_of_the_program_holds_more_logits_than_a_chunk() -> None:
    mesh = make_mesh((1, 2), ("dp", "tp"), kind="simulated")
    rows, width, classes, chunk = 96, 4, 64, 8
    f = shard_map(
        partial(chunked, chunk_size=chunk),
        mesh=mesh,
        in_specs=(P("dp"), P(None, "tp"), P("dp")),
        out_specs=P(),
    )
    x, w = random(4, rows // 4, width).requires_grad_(), random(width, classes).requires_grad_()
    program = trace(f, x, w, integers(classes, 4, rows // 4))
    sizes = [torch.Size(u.shape).numel() for e in program.equations for u in e.results]
    assert max(sizes) == max(rows * width, chunk * classes // 2, width * classes // 2)


def test_smoothing_spreads_over_the_global_vocabulary() -> None:
    """Over that of a rank it would be another number: the case above has 4 classes a rank."""
    logits, targets = LOGITS[:1, :1], TARGETS[:1, :1]
    by_hand = -logits.log_softmax(-1)[0, 0]
    smoothed = 0.9 * by_hand[targets[0, 0]] + 0.1 * by_hand.mean()
    torch.testing.assert_close(run(logits, targets, label_smoothing=0.1), smoothed)


@pytest.mark.parametrize("batch", [P(), P("dp"), P(None, "dp")])
def test_the_regions_keep_their_promises(batch: P) -> None:
    scores = own_scores("tp").typed(batch, batch, ranks=(3, 2))
    assert validate_rule(scores, LOGITS, TARGETS, num_ranks=2)
    options = Loss("loss", "tp", label_smoothing=0.1, z_loss=0.2)
    nats = chunked_nats(options, 5).typed(batch, P(), batch, ranks=(3, 2, 2))
    assert validate_rule(nats, X, W, TARGETS, num_ranks=2)


def run(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    f = partial(loss, **options)
    mapped = shard_map(f, mesh=mesh, in_specs=(P(None, None, "tp"), P()), out_specs=P())
    found: Tensor = mapped(logits, targets)
    return found


def test_a_target_that_does_not_exist_makes_the_loss_nan() -> None:
    targets = TARGETS.clone()
    targets[1, 2] = 8
    nats = run(LOGITS, targets, reduction="none")
    assert nats.isnan().nonzero().tolist() == [[1, 2]]


def test_where_all_are_ignored_the_mean_is_nan_as_torchs() -> None:
    assert run(LOGITS, torch.full_like(TARGETS, -100)).isnan()


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "max"},
        {"label_smoothing": 1.5},
        {"z_loss": -1.0},
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with told(LayerError):
        vocab_parallel_cross_entropy(LOGITS, TARGETS, "tp", **options)


def test_targets_of_another_shape_are_refused() -> None:
    with told(LayerError):
        vocab_parallel_cross_entropy(LOGITS, TARGETS[:2], "tp")


def test_by_chunks_probabilities_are_refused_with_what_takes_them() -> None:
    with told(LayerError):
        vocab_parallel_linear_cross_entropy(X, W, CHANCES, "tp", src="R")


def test_chunks_of_no_rows_are_refused() -> None:
    with pytest.raises(LayerError) as error:
        vocab_parallel_linear_cross_entropy(X, W, TARGETS, "tp", src="R", chunk_size=0)
    assert str(error.value) == "vocab_parallel_linear_cross_entropy: chunk_size=0 is not positive."
