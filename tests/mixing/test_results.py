"""Losses, metrics and writes of a parallelized module's sharded result are those of one device."""

import copy
import inspect
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

from shardmap_torch import (
    ColwiseParallel,
    Mesh,
    P,
    ShardMapError,
    SpecError,
    device_put,
    from_local,
    full,
    parallelize,
    shard_map,
)
from tests.programs.support.everywhere import run_on
from tests.programs.support.harness import random
from tests.support.fuzzing import sized
from tests.support.pool import Gloo

SHAPE, AXES = (2,), ("dp",)
X, NUMBERS = random((8, 3), 1), random((8, 4), 2)
CLASSES = torch.tensor([0, 1, 2, -100, -100, -100, 3, 1])  # fewer of them on the second rank
WEIGHT = torch.linspace(0.5, 2, 4).double()
WEIGHED: Any = functional  # whose stubs lack weights
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
"""Of a result, numbers, classes and a plain learned tensor."""


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 4).double()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "binary_cross_entropy": lambda y, b, t, **o: functional.binary_cross_entropy(
        y.sigmoid(), b.sigmoid(), **o
    ),
    "binary_cross_entropy_with_logits": lambda y, b, t, **o: (
        functional.binary_cross_entropy_with_logits(y, b.sigmoid(), pos_weight=WEIGHT, **o)
    ),
    "cosine_embedding_loss": lambda y, b, t, **o: functional.cosine_embedding_loss(
        y, b, b[:, 0].sign(), **o
    ),
    "cross_entropy": lambda y, b, t, **o: functional.cross_entropy(
        y, t, weight=WEIGHT, label_smoothing=0.1, **o
    ),
    "ctc_loss": lambda y, b, t, **o: functional.ctc_loss(
        y.view(4, 2, 4).log_softmax(2),
        torch.tensor([[1, 2], [1, 3]]),
        torch.tensor([4, 4]),
        torch.tensor([2, 2]),
        **o,
    ),
    "gaussian_nll_loss": lambda y, b, t, **o: functional.gaussian_nll_loss(y, b, b * b + 1, **o),
    "hinge_embedding_loss": lambda y, b, t, **o: functional.hinge_embedding_loss(y, b.sign(), **o),
    "huber_loss": lambda y, b, t, **o: functional.huber_loss(y, b, delta=0.3, **o),
    "kl_div": lambda y, b, t, **o: functional.kl_div(y.log_softmax(1), b.softmax(1), **o),
    "l1_loss": lambda y, b, t, **o: WEIGHED.l1_loss(y, b, weight=b.abs(), **o),
    "linear_cross_entropy": lambda y, b, t, **o: functional.linear_cross_entropy(
        y, WEIGHT.diag(), t, **o
    ),
    "margin_ranking_loss": lambda y, b, t, **o: functional.margin_ranking_loss(y, b, b.sign(), **o),
    "mse_loss": lambda y, b, t, **o: functional.mse_loss(y, b, **o),
    "multi_margin_loss": lambda y, b, t, **o: functional.multi_margin_loss(y, t.clamp(min=0), **o),
    "multilabel_margin_loss": lambda y, b, t, **o: functional.multilabel_margin_loss(
        y, (b > 0).long() - 1, **o
    ),
    "multilabel_soft_margin_loss": lambda y, b, t, **o: functional.multilabel_soft_margin_loss(
        y, (b > 0).double(), **o
    ),
    "nll_loss": lambda y, b, t, **o: functional.nll_loss(y.log_softmax(1), t, **o),
    "poisson_nll_loss": lambda y, b, t, **o: functional.poisson_nll_loss(y, b.abs(), **o),
    "smooth_l1_loss": lambda y, b, t, **o: functional.smooth_l1_loss(y, b, beta=0.3, **o),
    "soft_margin_loss": lambda y, b, t, **o: functional.soft_margin_loss(y, b.sign(), **o),
    "triplet_margin_loss": lambda y, b, t, **o: functional.triplet_margin_loss(y, b, b * 2, **o),
    "triplet_margin_with_distance_loss": lambda y, b, t, **o: (
        functional.triplet_margin_with_distance_loss(y, b, b * 2, **o)
    ),
}


def test_each_loss_of_torch_is_among_those_that_are_tried() -> None:
    functions = inspect.getmembers(functional, callable)
    named = {name for name, _ in functions if re.fullmatch(r"[a-z0-9_]*(_loss|entropy.*)", name)}
    known = {"adaptive_log_softmax_with_loss"}  # none: a method of nn.AdaptiveLogSoftmaxWithLoss
    assert named | {"kl_div"} == LOSSES.keys() - known


def with_reduction(name: str, reduction: str) -> Loss:
    def loss(y: Tensor, b: Tensor, t: Tensor, w: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # kl_div's, about what its mean is
            out = LOSSES[name](y, b, t, reduction=reduction)
        return (out * random(tuple(out.shape), 5)).sum() if reduction == "none" else 3 * out

    return loss


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


DOUBLED: Any = Doubled.apply


def penalty(y: Tensor, b: Tensor, t: Tensor, w: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(functional.mse_loss(y, b), y, create_graph=True)
    loss: Tensor = (grad.norm(dim=1) - 1).square().mean()
    return loss


def twice_written(y: Tensor, b: Tensor, t: Tensor, w: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    z = y * 2
    z += b
    z.mul_(3)
    z -= z.mean()
    total += z.square().mean()
    return total


def hooked(y: Tensor, b: Tensor, t: Tensor, w: Tensor) -> Tensor:
    y.register_hook(lambda grad: 2 * grad)
    return functional.mse_loss(y, b)


def contrastive(y: Tensor, b: Tensor, t: Tensor, w: Tensor) -> Tensor:
    z = functional.normalize(y)
    loss: Tensor = functional.cross_entropy(z @ z.T / 0.1, torch.arange(8))
    return loss


STEPS: dict[str, Loss] = {
    "a learned scale": lambda y, b, t, w: functional.mse_loss(y * w, b),
    "a learned shift": lambda y, b, t, w: (y + w).square().mean(),
    "tokens": lambda y, b, t, w: functional.cross_entropy(y.view(-1, 4)[:-1], t.view(-1)[1:]),
    "dims": lambda y, b, t, w: functional.cross_entropy(
        y.unsqueeze(-1).expand(8, 4, 3), t[:, None].expand(8, 3)
    ),
    "shares": lambda y, b, t, w: functional.cross_entropy(y, b.softmax(1)),
    "weight of a loss": lambda y, b, t, w: WEIGHED.mse_loss(y, b, weight=b.abs()),
    "several": lambda y, b, t, w: (
        functional.mse_loss(y, b) / 4 + 0.1 * y.abs().amax() + y.norm(torch.inf) + y.var()
    ),
    "extrema of ties": lambda y, b, t, w: y.round().amax() + y.round().amin(0).sum() + y.max(),
    "norms": lambda y, b, t, w: (
        y.norm(-torch.inf) + y.norm(torch.inf, 0).sum() + torch.linalg.matrix_norm(y, 2)
    ),
    "along the rows": lambda y, b, t, w: (
        y.topk(2, 1).values.sum() + y.max(1).values.prod() + y.logsumexp(-1).median()
    ),
    "a number": lambda y, b, t, w: y.sum() * (y > 0).sum().item() * float(y.detach().mean()),
    "any": lambda y, b, t, w: y.sum() * (y > 0).any() + (y > -9).all() * y.mean(),
    "a condition": lambda y, b, t, w: y.sum() if (y > 0).sum() > 12 else y.square().sum(),
    "text": lambda y, b, t, w: y.sum() * float(f"{y.detach().mean():.9f}"),
    "lists": lambda y, b, t, w: y.sum() * y.detach().tolist()[5][1] + y.detach().numpy()[6, 1],
    "accuracy": lambda y, b, t, w: y.sum() * (y.argmax(1) == t).double().mean().item(),
    "NaN": lambda y, b, t, w: torch.where(b > 0, y, y * torch.nan).nansum() + y.nanmean(),
    "each row": lambda y, b, t, w: sum(row.square().mean() for row in y),
    "parts": lambda y, b, t, w: y[b > 0].mean() + y[2:6].std() + y[[0, 5]].sum() + y[-1, -1],
    "own function": lambda y, b, t, w: functional.mse_loss(DOUBLED(y), b),
    "contrastive": contrastive,
    "hook": hooked,
    "penalty": penalty,
    "written whole": twice_written,
}


def are_those_of_one_device(mesh: Mesh) -> None:
    losses = {
        f"{name}, {reduction}": with_reduction(name, reduction)
        for name in LOSSES
        for reduction in sized(("mean", "none"), ("mean", "sum", "none"))
    }
    data = (X, NUMBERS, CLASSES)
    for name, loss in (losses | STEPS).items():
        one, learned = model(), WEIGHT.clone().requires_grad_()
        expected = loss(one(X), NUMBERS, CLASSES, learned)
        expected.backward()
        mine, own = parallelize(model(), mesh, {}, dp="dp"), WEIGHT.clone().requires_grad_()
        x, numbers, classes = device_put(data, mesh, P("dp"))
        found = loss(mine(x), numbers, classes, own)
        assert type(found) is Tensor, name
        found.backward()
        pairs = [(found, expected), (own.grad, learned.grad)]
        both = zip(mine.parameters(), one.parameters(), strict=True)
        pairs += [(p.grad, q.grad) for p, q in both]
        for mine_, theirs in pairs:
            assert (mine_ is None) == (theirs is None), name
            if mine_ is not None and theirs is not None:
                a, b = full(mine_.detach()), theirs.detach()
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True, msg=name)


def test_losses_outside_of_a_module_are_those_of_one_device(gloo: Gloo) -> None:
    run_on("gloo", are_those_of_one_device, gloo, SHAPE, AXES)


def have_rows_and_columns(mesh: Mesh) -> None:
    """Compares by rows over an axis; with columns over the other, and with a style of the root."""
    styles = ColwiseParallel(use_local_output=False), ColwiseParallel(output_layouts=Replicate())
    names = ("accuracy", "several", "tokens", "norms", "along the rows", "weight of a loss")
    data = device_put((X, NUMBERS, CLASSES), mesh, P("dp"))
    for style in styles:
        for name in names:
            one = model()
            expected = STEPS[name](one(X), NUMBERS, CLASSES, WEIGHT)
            expected.backward()
            mine = parallelize(model(), mesh, style, axis="tp", dp="dp")
            found = STEPS[name](mine(data[0]), *data[1:], WEIGHT)
            found.backward()
            torch.testing.assert_close(found, expected, msg=name)
            assert one.weight.grad is not None
            torch.testing.assert_close(full(mine.weight.grad), one.weight.grad, msg=name)


def test_results_sharded_over_two_axes_have_losses_of_one_device(gloo: Gloo) -> None:
    run_on("gloo", have_rows_and_columns, gloo, (2, 2), ("dp", "tp"))


FIX = "as torch.where or torch.cat."
VIEW, VALUE = ("writes into a view of a value", "writes into a value")
WRITES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "entry": (lambda y: y.__setitem__(0, 0.0), f"__setitem__ {VALUE}"),
    "rows": (lambda y: y.__setitem__(slice(1, 6), y[:5]), f"__setitem__ {VALUE}"),
    "row": (lambda y: y[0].zero_(), f"zero_ {VIEW}"),
    "select": (lambda y: y.select(0, 5).add_(1), f"add_ {VIEW}"),
    "narrow": (lambda y: y.narrow(0, 2, 4).mul_(3), f"mul_ {VIEW}"),
    "column": (lambda y: y[:, 0].mul_(3), f"mul_ {VIEW}"),
    "flat": (lambda y: y.flatten()[3:20].zero_(), f"zero_ {VIEW}"),
    "diagonal": (lambda y: y.diagonal().zero_(), "aten.zero_.default writes into"),
    "index": (lambda y: y.index_fill_(0, torch.tensor([1]), 0.0), f"index_fill_ {VALUE}"),
    "mask": (lambda y: y.__setitem__(y > 0, 0.0), f"__setitem__ {VALUE}"),
    "triangle": (lambda y: y.triu_(), f"triu_ {VALUE}"),
}


def are_refused(mesh: Mesh) -> None:
    y = parallelize(model(), mesh, {}, dp="dp")(device_put(X, mesh, P("dp")))
    for write, text in WRITES.values():
        with pytest.raises(ShardMapError, match=re.escape(text)) as caught:
            write(y * 1)
        assert "test_results.py" in str(caught.value)
        assert str(caught.value).endswith(FIX)


def test_writes_that_a_rank_would_lose_are_refused(gloo: Gloo) -> None:
    run_on("gloo", are_refused, gloo, SHAPE, AXES)


def own_rows_are_told_from_global_values(mesh: Mesh) -> None:
    rows = slice(4 * mesh.rank, 4 * mesh.rank + 4)
    mine = parallelize(model(), mesh, {}, dp="dp")
    y = mine(X[rows])
    with pytest.raises(SpecError) as caught:
        y - NUMBERS[rows]
    text = re.sub(r"at test_results\.py:\d+: .*?: a", "at SITE: a", str(caught.value))
    assert text == (
        "a plain tensor [4, 4] beside a result [8, 4], of which this rank has 4 rows, at SITE: a "
        "plain tensor is a global value, equal on all ranks.\n"
        "Fix: from_local(x, mesh, P(axis)) for each rank's own rows; or compute the loss in the "
        "module."
    )
    right = functional.mse_loss(y, from_local(NUMBERS[rows], mesh, P("dp")))
    assert torch.allclose(right, functional.mse_loss(y, NUMBERS))


def test_a_target_of_each_rank_is_refused_beside_a_result_of_all(gloo: Gloo) -> None:
    run_on("gloo", own_rows_are_told_from_global_values, gloo, SHAPE, AXES)


def a_row_of_each_rank_is_found(mesh: Mesh) -> None:
    rows = slice(mesh.rank, mesh.rank + 1)  # one, which torch would broadcast
    mine = parallelize(model(), mesh, {}, dp="dp")
    mine(X[rows]) - NUMBERS[rows]
    with pytest.raises(SpecError, match="a plain tensor beside a sharded result: float64"):
        mine(X[rows])


def test_a_plain_operand_that_differs_between_ranks_is_found_in_the_next_call(gloo: Gloo) -> None:
    run_on("gloo", a_row_of_each_rank_is_found, gloo, SHAPE, AXES)


def stays_a_dtensor(mesh: Mesh) -> None:
    y = parallelize(model(), mesh, {}, dp="dp")(device_put(X, mesh, P("dp"))).detach()
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    kinds = {copy.deepcopy(y): type(y), torch.load(file, weights_only=False): DTensor}
    for other, kind in kinds.items():
        assert type(other) is kind
        assert torch.equal(full(other), full(y))
    moved = y.redistribute(placements=[Shard(1)])
    assert type(moved) is type(y)
    assert moved.round().amax() == full(y).round().amax()
    compiled = torch.compile(functional.mse_loss, backend="eager")
    with pytest.raises(Exception, match=r"torch.compile cannot take a result"):
        compiled(y, y)


def test_a_sharded_result_is_copied_and_saved_as_a_dtensor_and_not_compiled(gloo: Gloo) -> None:
    run_on("gloo", stays_a_dtensor, gloo, SHAPE, AXES)


def mapped_functions_too(mesh: Mesh) -> None:
    f = shard_map(torch.sin, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check="global")
    for name in ("several", "accuracy", "norms", "penalty"):
        one = random((8, 4), 3).requires_grad_()
        expected = STEPS[name](one.sin(), NUMBERS, CLASSES, WEIGHT)
        expected.backward()
        x, numbers, classes = device_put((one.detach(), NUMBERS, CLASSES), mesh, P("dp"))
        found = STEPS[name](f(f(x.requires_grad_()).asin()), numbers, classes, WEIGHT)
        found.backward()
        assert x.grad is not None
        assert one.grad is not None
        torch.testing.assert_close(found, expected, msg=name)
        torch.testing.assert_close(full(x.grad), one.grad, msg=name)


def test_losses_of_a_mapped_functions_result_are_those_of_one_device(gloo: Gloo) -> None:
    run_on("gloo", mapped_functions_too, gloo, SHAPE, AXES)
