"""Warnings of the default check about functions that are not those of one device."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    Mesh,
    OneDeviceWarning,
    P,
    ShapeDtype,
    all_reduce,
    axis_index,
    axis_size,
    make_mesh,
    random,
    shard_map,
    value_and_grad,
)
from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.verify.request import Strictness
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.optim import sync_gradients
from shardmap_torch.run import checked
from tests.programs.support.everywhere import run_on
from tests.support.golden import hold
from tests.support.pool import Gloo

MESH = make_mesh((2,), ("dp",), kind="simulated")
SPECS: Any = {"mesh": MESH, "in_specs": (P(), P("dp"), P("dp")), "out_specs": P()}
torch.manual_seed(0)
W, X, Y = torch.randn(8, 4).double(), torch.randn(12, 8).double(), torch.randint(4, (12,))
KEY = random.key(0)


def mean(x: Tensor) -> Tensor:
    return all_reduce(x, "dp", op="mean", dst=I)


def program(
    reduce: Callable[[Tensor], Tensor] = mean,
    after: Callable[[Tensor], Tensor] = lambda g: g,
    sync: Callable[[Tensor], Tensor] = lambda g: sync_gradients(g, P(), "dp"),
    drop: Callable[[Tensor], Tensor] = lambda x: x,
) -> Callable[..., Tensor]:
    def step(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            return reduce(functional.cross_entropy(drop(x) @ w, y))

        return after(sync(value_and_grad(loss)(w)[1]))

    return step


MISTAKES = {
    "gradients averaged again": program(after=lambda g: g / axis_size("dp")),
    "the loss divided again": program(reduce=lambda x: mean(x) / axis_size("dp")),
    "means summed": program(reduce=lambda x: all_reduce(x, "dp", dst=I)),
    "gradients averaged": program(sync=lambda g: all_reduce(g, "dp", op="mean", dst=I)),
    "one mask for all shards": program(drop=lambda x: random.dropout(KEY, x, 0.5)),
}


def warned(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        call()
    assert all(warning.category is OneDeviceWarning for warning in found)
    assert all(warning.filename == __file__ for warning in found)
    return [f"{warning.message}" for warning in found]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_training_mistake_is_told_of_once_in_one_line(name: str) -> None:
    step = shard_map(MISTAKES[name], **SPECS)
    [told] = warned(lambda: step(W, X, Y))
    assert "\n" not in told
    hold("one_device.txt", name, told)
    assert warned(lambda: step(W, torch.cat([X, X]), torch.cat([Y, Y]))) == []


def asked_by_the_first(mesh: Mesh) -> None:
    """Of processes the first one warns, and all of them compute what simulated ranks do."""
    expected = shard_map(MISTAKES["means summed"], check=True, **SPECS)(W, X, Y)
    step = shard_map(MISTAKES["means summed"], **SPECS | {"mesh": mesh})
    found = list[Tensor]()
    told = warned(lambda: found.extend(step(W, X, Y) for _ in range(2)))
    assert len(told) == (mesh.rank == 0)
    for each in found:
        torch.testing.assert_close(each, expected)


def test_of_processes_the_first_one_tells_and_the_others_wait_for_it(gloo: Gloo) -> None:
    run_on("gloo", asked_by_the_first, gloo, names=("dp",))


@pytest.mark.parametrize("check", [True, "local", {"dp": "local"}])
def test_whoever_says_local_is_told_nothing(check: Any) -> None:
    step = shard_map(MISTAKES["means summed"], check=check, **SPECS)
    assert warned(lambda: step(W, X, Y)) == []


def test_what_is_as_on_one_device_is_told_nothing() -> None:
    assert warned(lambda: shard_map(program(), **SPECS)(W, X, Y)) == []


def test_the_right_gradient_of_a_wrong_backward_is_asked_for_where_gradients_flow() -> None:
    def halves(x: Tensor) -> Tensor:
        return torch.where(x.sum() == torch.inf, x, x.detach() + (x - x.detach()) / axis_size("dp"))

    f = shard_map(halves, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"))
    x = torch.randn(4, dtype=torch.float64)
    found = [warned(lambda x=x: f(x)) for x in (x, x.clone().requires_grad_())]  # type: ignore[misc]
    assert [len(each) for each in found] == [0, 1]


def test_what_no_number_can_decide_is_told_nothing() -> None:
    def sampled(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return x + torch.rand(x.shape, generator=generator, dtype=x.dtype).round().sum() * 0

    f = shard_map(sampled, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"))
    assert warned(lambda: f(torch.zeros(4).double())) == []


def per_rank(x: Tensor) -> Tensor:
    return x * (axis_index("dp") + 1)


def test_a_program_of_each_rank_runs_and_is_told_of_also_on_an_abstract_mesh() -> None:
    on: Any = {"in_specs": P("dp"), "out_specs": P("dp")}
    results: list[Any] = []
    [told] = warned(lambda: results.append(shard_map(per_rank, mesh=MESH, **on)(torch.ones(2))))
    assert results[0].tolist() == [1.0, 2.0]
    hold("one_device.txt", "per rank", told)
    stand_in: Any = ShapeDtype((2,))
    abstract = make_mesh((2,), ("dp",), kind="abstract")
    told_again = warned(lambda: shard_map(per_rank, mesh=abstract, **on)(stand_in))
    assert [each.partition(";")[0] for each in told_again] == [told.partition(";")[0]]


def test_a_warning_that_is_an_error_stops_the_call() -> None:
    f = shard_map(per_rank, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", OneDeviceWarning)
        with pytest.raises(OneDeviceWarning, match=r"^per_rank is not the same as"):
            f(torch.ones(2))


def test_where_the_warning_is_ignored_nothing_is_checked_globally(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    verify = checked.verify

    def watched(call: Call, strictness: Strictness, repairs: bool = True) -> Verdict:
        asked.append(strictness)
        return verify(call, strictness, repairs)

    monkeypatch.setattr(checked, "verify", watched)
    for action in ("ignore", "default"):
        asked.append(action)
        f = shard_map(lambda x: x * 2, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"))
        with warnings.catch_warnings():
            warnings.simplefilter(action, OneDeviceWarning)
            f(torch.ones(2))
    assert asked == ["ignore", "local", "default", "local", "global"]
