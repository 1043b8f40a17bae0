"""Losses that modules compute of each rank's rows: those of the batch, against one device."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardmap_torch import ColwiseParallel, RowwiseParallel, SpecError, make_mesh, parallelize
from tests.programs.support.harness import random

MESH = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Model(nn.Module):
    """Computes a loss of its own, which options choose."""

    def __init__(self, loss: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 6)
        self.loss, self.options = loss, options
        self.register_buffer("weight", torch.linspace(0.5, 2, 6))
        self.double()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        options, y = dict(self.options), self.down(self.up(x).tanh())
        if options.pop("weighted", False):
            options["weight"] = self.weight
        if options.pop("weighs_entries", False):
            options["weight"] = target.square() * torch.linspace(0.5, 2, 6)
        loss: Tensor = 2 * self.loss(y, target, **options)
        return loss


CLASSES = torch.tensor([0, 5, -100, -100, -100, 2, 3, 3])  # more of them on the second rank
NUMBERS = random((8, 6), 7)
SHARES = NUMBERS.softmax(-1)
CASES: list[tuple[Any, Tensor, dict[str, Any]]] = [
    (functional.cross_entropy, CLASSES, {}),
    (functional.cross_entropy, CLASSES, {"reduction": "sum"}),
    (functional.cross_entropy, CLASSES, {"weighted": True, "label_smoothing": 0.2}),
    (functional.cross_entropy, CLASSES.clamp(min=3), {"ignore_index": 3, "reduction": "mean"}),
    (functional.cross_entropy, SHARES, {"weighted": True}),
    (nn.CrossEntropyLoss(), CLASSES, {}),
    (lambda y, target: functional.nll_loss(y.log_softmax(-1), target), CLASSES, {}),
    (functional.binary_cross_entropy_with_logits, SHARES, {"weighted": True}),
    (functional.mse_loss, NUMBERS, {}),
    (functional.mse_loss, NUMBERS, {"weighs_entries": True}),
    (functional.l1_loss, NUMBERS, {"weighs_entries": True}),
    (functional.huber_loss, NUMBERS, {"weighs_entries": True}),
    (functional.huber_loss, NUMBERS, {"delta": 0.1, "reduction": "sum"}),
    (lambda y, t: functional.kl_div(y.log_softmax(-1), t, reduction="sum"), SHARES, {}),
    (lambda y, t: functional.kl_div(y.log_softmax(-1), t, reduction="batchmean"), SHARES, {}),
    (functional.poisson_nll_loss, SHARES, {"full": True}),
    (lambda y, t: functional.gaussian_nll_loss(y, t, t.square() + 1), NUMBERS, {}),
    (functional.multilabel_soft_margin_loss, SHARES, {"weighted": True}),
    (functional.hinge_embedding_loss, NUMBERS.sign(), {"margin": 0.5}),
    (lambda y, t: functional.margin_ranking_loss(y, t, t.sign(), margin=0.3), NUMBERS, {}),
    (lambda y, t: functional.triplet_margin_loss(y, t, t.sin(), swap=True), NUMBERS, {}),
    (lambda y, t: functional.triplet_margin_with_distance_loss(t, y, t.sin()), NUMBERS, {}),
    (lambda y, t: functional.cosine_embedding_loss(t, y, t[:, 0].sign(), 0.1), NUMBERS, {}),
]


@pytest.mark.sample(7)
@pytest.mark.parametrize(("loss", "target", "options"), CASES)
def test_a_loss_and_its_gradients_are_those_of_the_batch(
    loss: Any, target: Tensor, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    one, x = Model(loss, options), random((8, 8), 0)
    ours = parallelize(copy.deepcopy(one), MESH, PLAN, dp="dp")
    found, expected = ours(x, target), one(x, target)
    for value in (found, expected):
        value.backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(ours.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_a_loss_of_which_only_the_target_has_rows_is_that_of_the_batch() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.y = nn.Parameter(torch.ones(6, dtype=torch.float64))

        def forward(self, target: Tensor) -> Tensor:
            loss: Tensor = functional.l1_loss(self.y.expand(target.shape), target)
            return loss

    one = Constant()
    ours = parallelize(copy.deepcopy(one), make_mesh((2,), ("dp",), kind="simulated"), {}, dp="dp")
    found, expected = ours(NUMBERS), one(NUMBERS)
    torch.testing.assert_close(found, expected)
    for value in (found, expected):
        value.backward()
    torch.testing.assert_close(ours.y.grad, one.y.grad)


def test_a_number_of_the_rows_of_each_rank_is_rejected() -> None:
    model = Model(lambda y, target: (y - target).square().mean(), {})
    parallelize(model, MESH, PLAN, dp="dp")
    with pytest.raises(SpecError) as caught:
        model(random((8, 8), 0), NUMBERS)
    assert str(caught.value) == (
        "parallelize: a result is a number that differs over 'dp': it is computed of each rank's "
        "own rows, and which number is that of the batch is not known.\n"
        "Fix: compute it by a loss of torch.nn.functional, whose sum or mean is that of the batch; "
        "or outside, of the results that have rows."
    )
