"""check="global": mean losses of a batch that ranks share, averaged over the ranks."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    ShardTypeError,
    TransformError,
    all_reduce,
    explain,
    make_mesh,
    shard_map,
)
from tests.support.golden import hold_own
from tests.support.pool import Gloo

Loss = Callable[[Tensor, Tensor], Tensor]
X: Final = torch.randn(8, 4, dtype=torch.float64)
W: Final = torch.randn(4, 5, dtype=torch.float64)
IDS: Final = torch.arange(8) % 5
IGNORED: Final = torch.where(IDS == 3, -100, IDS)  # as many on one rank as on the other
EYE: Final = torch.eye(5, dtype=torch.float64)
SPECS: Final[Any] = {"in_specs": (P(), P("dp"), P("dp")), "out_specs": P(), "check": "global"}

LOSSES: Final[list[Loss]] = [
    functional.cross_entropy,
    lambda h, t: functional.nll_loss(h.log_softmax(-1), t),
    lambda h, t: torch.nn.CrossEntropyLoss(ignore_index=-1)(h, t),
    lambda h, t: functional.cross_entropy(h, t, label_smoothing=0.2),
    lambda h, t: torch.nn.CrossEntropyLoss(ignore_index=-1, label_smoothing=0.1)(h, t),
    lambda h, t: functional.linear_cross_entropy(h, EYE, t),
    lambda h, t: functional.linear_cross_entropy(
        h, linear_weight=EYE, target=t, ignore_index=-1, label_smoothing=0.2, linear_bias=EYE[0]
    ),
    lambda h, t: functional.cross_entropy(h.view(-1, 5, 1), t.unsqueeze(1)),
    lambda h, t: functional.binary_cross_entropy_with_logits(
        h, t.view(-1, 1).expand_as(h).to(h.dtype) / 5
    ),
    lambda h, t: functional.kl_div(
        h.log_softmax(-1), h.detach().softmax(-1), reduction="batchmean"
    ),
]


def averaged(of: Loss) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The loss and its gradient, both of a rank's batch, averaged over dp."""

    def step(w: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = torch.func.grad_and_value(lambda w: of(x @ w, t))(w)
        return tuple(all_reduce(y, "dp", op="mean", dst=I) for y in (value, gradient))

    return step


def run(of: Loss, targets: Tensor = IDS, **mesh: Any) -> tuple[Tensor, Tensor]:
    on = make_mesh((2,), ("dp",), **{"kind": "simulated", **mesh})
    found: tuple[Tensor, Tensor] = shard_map(averaged(of), mesh=on, **SPECS)(W, X, targets)
    return found


@pytest.mark.sample(8)
@pytest.mark.parametrize("of", LOSSES)
@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
def test_averaged_means_of_a_loss_are_its_mean_on_one_device(of: Loss, simulate: str) -> None:
    want = torch.func.grad_and_value(lambda w: of(X @ w, IDS))(W)
    torch.testing.assert_close(run(of, simulate=simulate), want[::-1])


@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
def test_a_run_in_which_a_target_is_ignored_raises(simulate: str) -> None:
    with pytest.raises(ShardTypeError) as raised:
        run(functional.cross_entropy, IGNORED, simulate=simulate)
    hold_own(str(raised.value))


def test_a_run_in_which_a_target_with_smoothed_labels_is_ignored_raises() -> None:
    losses: list[Loss] = [
        lambda h, t: functional.cross_entropy(h, t, label_smoothing=0.2),
        lambda h, t: functional.linear_cross_entropy(h, EYE, t, label_smoothing=0.2),
    ]
    for of in losses:
        with pytest.raises(ShardTypeError, match="a target is ignore_index=-100"):
            run(of, IGNORED)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_product_and_its_loss_in_pieces_are_those_of_one_device(reduction: str) -> None:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)

    def loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        found = functional.linear_cross_entropy(x, w, t, reduction=reduction, options=options)
        return all_reduce(found.sum(), "dp", op="mean" if reduction == "mean" else "sum", dst=I)

    def mapped(**how: Any) -> Any:
        on = make_mesh((2,), ("dp",), kind="simulated", **how)
        specs: Any = (P("dp"), P(), P("dp"))
        return shard_map(loss, mesh=on, in_specs=specs, out_specs=P(), check="global")

    xs = [X.clone().requires_grad_(), W.mT.clone().requires_grad_()]
    value = mapped()(*xs, IDS)
    want = functional.cross_entropy(
        xs[0] @ xs[1].mT, IDS, reduction=reduction.replace("none", "sum")
    )
    torch.testing.assert_close(value, want)
    torch.testing.assert_close(torch.autograd.grad(value, xs), torch.autograd.grad(want, xs))
    with pytest.raises(TransformError, match="the backward of linear_cross_entropy with options"):
        mapped(simulate="vmap")(*xs, IDS)


def in_worker() -> None:
    run(functional.cross_entropy, kind="process_group")
    run(functional.cross_entropy, IGNORED, kind="process_group")


def test_processes_look_for_ignored_targets_too(gloo: Gloo) -> None:
    found = gloo(2).run(in_worker, expect_error=True)
    assert all("ignore_index=-100" in error.text for error in found)


def test_a_compiled_call_reads_the_targets_too() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    f = shard_map(averaged(functional.cross_entropy), mesh=mesh, **SPECS)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(W, X, IDS), f(W, X, IDS))
    with pytest.raises(ShardTypeError, match="a target is ignore_index=-100"):
        compiled(W, X, IDS.index_fill(0, torch.tensor([1]), -100))


def test_ignored_targets_are_right_where_the_sum_is_divided_by_their_global_number() -> None:
    def step(w: Tensor, x: Tensor, t: Tensor) -> Tensor:
        def of(w: Tensor) -> Tensor:
            count = all_reduce((t != -100).sum(), "dp", dst=I)
            return functional.cross_entropy(x @ w, t, reduction="sum") / count

        gradient: Tensor = torch.func.grad(of)(w)
        return all_reduce(gradient, "dp", dst=I)

    targets = torch.where(torch.arange(8) < 3, -100, IDS)
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    want = torch.func.grad(lambda w: functional.cross_entropy(X @ w, targets))(W)
    torch.testing.assert_close(shard_map(step, mesh=mesh, **SPECS)(W, X, targets), want)


WRONG: Final[list[Loss]] = [
    lambda h, t: functional.cross_entropy(h, t, weight=torch.arange(5.0).to(h.dtype)),
    lambda h, t: torch.ops.aten.nll_loss_nd(h.log_softmax(-1), t),
]


@pytest.mark.parametrize("of", WRONG)
def test_averages_whose_weights_no_run_looks_at_are_refused(of: Loss) -> None:
    with pytest.raises(ShardTypeError, match="averages over a sharded dim"):
        run(of)


def test_explain_tells_that_targets_must_not_be_ignored() -> None:
    mesh = make_mesh((2,), ("dp",), kind="abstract")
    f = shard_map(averaged(functional.cross_entropy), mesh=mesh, **SPECS)
    assert str(explain(f, W, X, IDS)).splitlines()[-2:] == [
        "global: the same program on one device, if these keep what they promise:",
        "  cross entropies: no target is their ignore_index, at which each run looks",
    ]
