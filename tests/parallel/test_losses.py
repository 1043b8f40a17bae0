"""Losses that modules compute of each rank's rows: those of the batch, against one device."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardmap_torch import (
    ColwiseParallel,
    I,
    P,
    R,
    RowwiseParallel,
    ShardTypeError,
    all_gather,
    all_reduce,
    full,
    local_region,
    make_mesh,
    parallelize,
)
from shardmap_torch.mesh import Mesh
from tests.programs.support.everywhere import run_on
from tests.programs.support.harness import random
from tests.support.golden import hold
from tests.support.pool import Gloo

MESH = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
mse, entropy = functional.mse_loss, functional.cross_entropy
absolute: Any = functional.l1_loss
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
CONSTANTS: list[Any] = [  # targets and weights that have no rows of their own
    lambda y, t: entropy(y, torch.zeros_like(t[:, 0], dtype=torch.long)),
    lambda y, t: entropy(y, torch.zeros(len(y), dtype=torch.long), reduction="sum"),
    lambda y, t: entropy(y, torch.full((y.shape[0],), 3)) + mse(y, t),
    lambda y, t: absolute(y, t, weight=torch.full_like(t, 0.5)),
]


@pytest.mark.parametrize("loss", CONSTANTS)
def test_a_loss_of_constant_targets_is_that_of_the_batch(loss: Any) -> None:
    test_a_loss_and_its_gradients_are_those_of_the_batch(loss, NUMBERS, {})


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


# ------------------------------------------------------------- losses and penalties by hand


class ByHand(nn.Module):
    """Computes what `result` makes of the module, its output and the inputs."""

    def __init__(self, result: Callable[..., Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 6)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.result = result
        self.double()

    def forward(self, x: Tensor, y: Tensor, classes: Tensor, weights: Tensor) -> Any:
        return self.result(self, self.down(self.up(x).tanh()), y, classes, weights)


WEIGHTS = random((8,), 9).abs()
LABELS = torch.tensor([0, 5, 1, 1, 4, 2, 3, 3])


def added_up(m: Any, z: Tensor, y: Tensor, t: Tensor, w: Tensor) -> Tensor:
    total = torch.zeros((), dtype=z.dtype)
    total += mse(z, y)
    for p in m.parameters():
        total += 0.01 * p.square().sum()
    return total


def smoothed(m: Any, z: Tensor, y: Tensor, t: Tensor, w: Tensor) -> Tensor:
    logs = z.log_softmax(-1)
    hit = -logs.gather(-1, t[:, None]).squeeze(1)
    return (0.9 * hit - 0.1 * logs.mean(-1)).mean()


def normed(m: Any, z: Tensor, y: Tensor, t: Tensor, w: Tensor) -> Tensor:
    mean = z.mean(0)
    var = (z - mean).square().mean(0, keepdim=True)
    return mse((z - mean) / (var + 1e-5).sqrt(), y)


def balanced(m: Any, z: Tensor, y: Tensor, t: Tensor, w: Tensor) -> Tensor:
    share = functional.one_hot(z.argmax(-1), 6).double().mean(0)
    return mse(z, y) + (share * z.softmax(-1).mean(0)).sum()


BY_HAND: dict[str, Callable[..., Any]] = {
    "weight penalty": lambda m, z, y, t, w: mse(z, y) + 0.1 * m.up.weight.square().sum(),
    "penalty first": lambda m, z, y, t, w: m.down.bias.abs().mean() + mse(z, y),
    "all penalties": lambda m, z, y, t, w: mse(z, y) + sum(p.pow(2).sum() for p in m.parameters()),
    "added in place": added_up,
    "losses stacked": lambda m, z, y, t, w: torch.stack([mse(z, y), m.scale.square()]).sum(),
    "learned weight": lambda m, z, y, t, w: mse(z, y) * torch.exp(-m.scale) + m.scale,
    "penalty alone": lambda m, z, y, t, w: (mse(z, y).detach(), m.scale.square()),
    "none and mean": lambda m, z, y, t, w: mse(z, y, reduction="none").mean(),
    "means of rows": lambda m, z, y, t, w: mse(z, y, reduction="none").mean(1).mean(0),
    "sum of rows": lambda m, z, y, t, w: torch.sum(mse(z, y, reduction="none"), dim=(0, 1)),
    "weighed rows": lambda m, z, y, t, w: (entropy(z, t, reduction="none") * w).sum() / w.sum(),
    "masked mean": lambda m, z, y, t, w: (z[:, 0] * (t > 2)).sum() / (t > 2).sum(),
    "smoothing by hand": smoothed,
    "penalty of logits": lambda m, z, y, t, w: entropy(z, t) + z.logsumexp(-1).square().mean(),
    "accuracy": lambda m, z, y, t, w: (entropy(z, t), (z.argmax(-1) == t).float().mean()),
    "loss of means": lambda m, z, y, t, w: mse(z.mean(0), y.mean(0)),
    "batch norm by hand": normed,
    "load balance": balanced,
    "rows beside a loss": lambda m, z, y, t, w: mse(z * mse(z, y), y),
    "a loss where rows say so": lambda m, z, y, t, w: torch.where(y > 0, mse(z, y), z).mean(),
    "rows of means": lambda m, z, y, t, w: (z * z.mean(0)[t.fmod(6)].unsqueeze(1)).sum(1).mean(),
    "transposed": lambda m, z, y, t, w: (z.T.mean(0) - y.mean(1)).square().mean(),
    "transposed twice": lambda m, z, y, t, w: mse(z.T.mean(1), y.T.mean(1)) + z.T.sum(0).mean(),
    "per sample": lambda m, z, y, t, w: torch.vmap(lambda r, q: (r - q).square().sum())(
        z, y
    ).mean(),
    "per column": lambda m, z, y, t, w: torch.vmap(Tensor.mean, in_dims=1)(z).square().mean(),
    "recomputed": lambda m, z, y, t, w: checkpoint(
        lambda z, y: mse(z, y) + (z * z.mean(0)).mean(), z, y, use_reentrant=False
    ),
    "not summed": lambda m, z, y, t, w: (z - y).square().mean(1),
}
"""Everyday results of a forward, by what is right on one device alone."""

ON: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dp": (((2,), ("dp",)), {}, {"dp": "dp"}),
    "fsdp": (((2,), ("dp",)), {}, {"fsdp": "dp"}),
    "dp and tp": (((2, 2), ("dp", "tp")), PLAN, {"dp": "dp"}),
    "tp": (((2,), ("tp",)), PLAN, {}),
}


def outcome(model: nn.Module, rows: slice = slice(None)) -> list[Tensor]:
    """Returns results, whole, and gradients of a forward."""
    results = model(*(each[rows] for each in (random((8, 8), 0), NUMBERS, LABELS, WEIGHTS)))
    leaves = [full(each) for each in (results if isinstance(results, tuple) else (results,))]
    torch.stack([each.sum() for each in leaves if each.requires_grad]).sum().backward()
    none = torch.zeros(())
    grads = [none if p.grad is None else full(p.grad) for p in model.parameters()]
    return [each.detach() for each in leaves] + [none if not g.any() else g for g in grads]


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("on", ON)
def test_what_a_forward_sums_by_hand_is_that_of_one_device(on: str, name: str) -> None:
    torch.manual_seed(0)
    one = ByHand(BY_HAND[name])
    mesh, plan, options = ON[on]
    ours = parallelize(copy.deepcopy(one), make_mesh(*mesh, kind="simulated"), plan, **options)
    torch.testing.assert_close(outcome(ours), outcome(one), rtol=1e-10, atol=1e-12)


def by_hand_on_processes(mesh: Mesh) -> None:
    for name in ("all penalties", "weighed rows", "batch norm by hand", "transposed", "recomputed"):
        torch.manual_seed(0)
        one = ByHand(BY_HAND[name])
        ours = parallelize(copy.deepcopy(one), mesh, {}, dp="dp")
        rows = slice(4 * mesh.rank, 4 * mesh.rank + 4)
        expected = outcome(one)
        torch.testing.assert_close(outcome(ours, rows), expected, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.slow
def test_on_processes_what_a_forward_sums_by_hand_is_that_of_one_device(gloo: Gloo) -> None:
    run_on("gloo", by_hand_on_processes, gloo, (2,), ("dp",))


def test_a_forward_may_sum_over_ranks_by_itself() -> None:
    def result(m: Any, z: Tensor, y: Tensor, t: Tensor, w: Tensor) -> Tensor:
        return all_reduce((z - y).square().mean(), "dp", op="mean", dst=I)

    ours = parallelize(ByHand(result), make_mesh((2,), ("dp",), kind="simulated"), {}, dp="dp")
    one = ByHand(lambda m, z, y, t, w: (z - y).square().mean())
    one.load_state_dict(ours.state_dict())
    torch.testing.assert_close(outcome(ours), outcome(one))


def test_per_rank_code_in_a_forward_sums_its_own_rows() -> None:
    def result(m: Any, z: Tensor, y: Tensor, t: Tensor, w: Tensor) -> Any:
        region = local_region(lambda z: z - z + z.sum(1, keepdim=True), P("dp"), P("dp"))
        return region(z).mean()

    one = ByHand(result)
    ours = parallelize(copy.deepcopy(one), make_mesh((2,), ("dp",), kind="simulated"), {}, dp="dp")
    torch.testing.assert_close(outcome(ours), outcome(one))


HOSTILE: dict[str, Callable[..., Any]] = {
    "sum by size": lambda m, z, y, t, w: (z - y).square().sum() / z.numel(),
    "deviation": lambda m, z, y, t, w: mse(z, y) + z.std(0).mean(),
    "maximum": lambda m, z, y, t, w: (mse(z, y), z.abs().max()),
    "divided by the maximum": lambda m, z, y, t, w: mse(z / z.detach().abs().amax(), y),
    "first row": lambda m, z, y, t, w: mse(z, y) + z[0, 0],
    "selected": lambda m, z, y, t, w: entropy(z, t, reduction="none")[t > 2].mean(),
    "norm": lambda m, z, y, t, w: mse(z / z.norm(), y),
    "product of a part": lambda m, z, y, t, w: (z.T @ y).square().mean(),
}
"""Results that no sum or mean makes right, each refused at its line."""


@pytest.mark.parametrize("name", HOSTILE)
def test_what_sums_do_not_make_right_is_refused_at_its_line(name: str) -> None:
    ours = parallelize(ByHand(HOSTILE[name]), make_mesh((2,), ("dp",), kind="simulated"), dp="dp")
    with pytest.raises(ShardTypeError) as caught:
        outcome(ours)
    hold("losses_by_hand.txt", name, f"{caught.value}")


def test_a_repair_of_a_forward_holds_when_it_is_followed() -> None:
    def result(m: Any, z: Tensor, y: Tensor, t: Tensor, w: Tensor) -> Tensor:
        whole = z if one_device else all_gather(z, "dp", dim=0, dst=R)
        return mse(z, y) + whole.std(0).mean()

    one_device, one = True, ByHand(result)
    expected = outcome(one)
    one_device = False
    ours = parallelize(copy.deepcopy(one), make_mesh((2,), ("dp",), kind="simulated"), {}, dp="dp")
    ours.zero_grad()
    torch.testing.assert_close(outcome(ours), expected)


def test_local_strictness_leaves_sums_to_each_rank() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    ours = parallelize(ByHand(BY_HAND["none and mean"]), mesh, dp="dp", check="local")
    with pytest.raises(ShardTypeError, match="the result varies over it"):
        outcome(ours)
