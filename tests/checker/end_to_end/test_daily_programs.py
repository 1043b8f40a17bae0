"""Programs as people write and port them day by day, against one device, and what is refused.

The programs are in the files `daily_*.py` of `tests/checker/support`. Those of
`REFUSED` are right too, and docs/limits.md names what they need.
"""

from functools import cache
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    Mesh,
    P,
    R,
    ShardTypeError,
    all_gather,
    check_program,
    explain,
    make_mesh,
    shard_map,
)
from shardmap_torch.checker.verify import repairing
from tests.checker.support import daily_attention, daily_losses, daily_models, daily_steps
from tests.checker.support.daily import DP, TP0, N, Program, add_tp, mean, to_r, total
from tests.checker.support.one_device import numbers
from tests.checker.support.outcomes import fresh, with_gradients
from tests.support.fuzzing import FUZZ

AXES: Final = ("dp", "tp")
RANKS: Final = make_mesh((2, 2), AXES, kind="simulated", simulate="ranks")
ONE: Final = make_mesh((1, 1), AXES, kind="simulated", simulate="ranks")
PROGRAMS: Final[dict[str, Program]] = {
    **daily_models.PROGRAMS,
    **daily_attention.PROGRAMS,
    **daily_losses.PROGRAMS,
    **daily_steps.PROGRAMS,
}
CHECKS: Final = ["global", *([True] if FUZZ else [])]
CONSTANT: Final = {"class_weights": [2], "crf": [3]}
"""Inputs that torch does not differentiate by, by their number."""


def outcome(name: str, mesh: Mesh, check: Any) -> list[Tensor]:
    """Returns the values, and the gradients of all inputs that can have one."""
    program = PROGRAMS[name]
    options: Any = {"in_specs": program.in_specs, "out_specs": program.out_specs, "check": check}
    args = fresh(program.args, learns=not program.is_step)
    for number in CONSTANT.get(name, ()):
        args[number].requires_grad_(False)
    return with_gradients(shard_map(program.body, mesh=mesh, **options)(*args), args)


@cache
def on_one_device(name: str) -> list[Tensor]:
    return outcome(name, ONE, True)


@pytest.mark.sample(7, "beam_search-global", "segmentation-global")
@pytest.mark.parametrize(
    ("name", "check"),
    [(name, check) for name in PROGRAMS for check in CHECKS],
)
def test_a_daily_program_is_accepted_and_right(name: str, check: Any) -> None:
    for found, expected in zip(outcome(name, RANKS, check), on_one_device(name), strict=True):
        torch.testing.assert_close(found, expected)


X: Final = numbers(8, 6)
W: Final = numbers(4, 6, 6)
EXPERTS: Final = (X, W), (DP, TP0)


def written_by_item(x: Any, w: Any) -> Any:
    out = x.new_zeros(w.shape[0], *x.shape)
    for e in range(w.shape[0]):
        out[e] = to_r(x) @ w[e]
    return out


def gradients_of_items(x: Any, w: Any) -> Any:
    grads = [
        torch.func.grad(lambda w: mean((x @ w).square().mean()))(w[e]) for e in range(w.shape[0])
    ]
    return total(torch.stack(grads))


def sum_in_a_loop(x: Any, w: Any) -> Any:
    out = 0.0
    for each in w:
        out = out + add_tp(to_r(x) @ each)
    return out


def rows_of_experts(x: Any, w: Any) -> Any:
    """Sends to each expert the rows that chose it, as Mixtral in transformers does."""
    scores, chosen = (x @ w[0]).softmax(-1).topk(2, -1)
    out = torch.zeros_like(x)
    for e in range(w.shape[0]):
        row, at = torch.where(chosen == e)
        out.index_add_(0, row, (x[row] @ w[e]) * scores[row, at, None])
    return out


def merged_parts(x: Any, w: Any) -> Any:
    """Merges softmaxes of parts of the keys by their normalizers, as flash decoding does."""
    scores = to_r(x) @ w.flatten(0, 1).mT
    top = scores.logsumexp(-1, keepdim=True)
    tops = all_gather(top, "tp", dim=-1, dst=R)
    share = (top - tops.logsumexp(-1, keepdim=True)).exp()
    return add_tp(scores.softmax(-1) @ w.flatten(0, 1) * share)


def counted(x: Any) -> Any:
    return total(torch.bincount(x.argmax(-1), minlength=6))


def spectrogram(x: Any) -> Any:
    return torch.stft(x, 4, window=torch.ones(4, dtype=x.dtype), return_complex=True).abs()


def weighted_mean(x: Any) -> Any:
    weight = torch.arange(1.0, 7.0, dtype=x.dtype)
    return mean(functional.cross_entropy(x, x.argmax(-1), weight=weight))


ROWS: Final = (X,), (DP,)

TRIED: Final[dict[Any, P]] = {
    written_by_item: P("tp", "dp"),
    gradients_of_items: TP0,
    sum_in_a_loop: DP,
    merged_parts: DP,
}


@pytest.mark.parametrize("body", TRIED)
def test_what_layouts_do_not_prove_is_tried_and_right(body: Any) -> None:
    args, in_specs = EXPERTS
    specs: Any = {"in_specs": in_specs, "out_specs": TRIED[body]}
    mapped = shard_map(body, mesh=RANKS, check="global", **specs)
    assert explain(mapped, *args).one_device == "tried"
    found = mapped(*args)  # type: ignore[no-untyped-call]
    expected = shard_map(body, mesh=ONE, **specs)(*args)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, expected)


REFUSED: Final[dict[str, tuple[Any, tuple[Any, Any], P, str]]] = {
    "rows of experts": (rows_of_experts, ((X, W), (DP, N)), DP, "nonzero over axis 'dp' of V"),
    "counted": (counted, ROWS, N, "bincount over axis 'dp' of V"),
    "spectrogram": (spectrogram, ROWS, DP, "as_strided is not what it is on one device"),
    "weighted mean": (weighted_mean, ROWS, N, "is not what it is on one device"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_though_it_is_right_is_listed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repairing, "_TRIES", 0)  # nobody reads the repairs
    body, (args, in_specs), out_specs, text = REFUSED[name]
    mapped = shard_map(body, mesh=RANKS, in_specs=in_specs, out_specs=out_specs, check="global")
    with pytest.raises(ShardTypeError, match=text):
        check_program(mapped, *args)
