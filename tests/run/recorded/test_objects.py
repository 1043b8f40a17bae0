"""Objects among arguments and results: a replay takes and gives what the body would."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardmap_torch import I, Mesh, P, all_reduce, from_local, make_mesh, shard_map
from shardmap_torch.run.recorded import recordings
from tests.programs.support.everywhere import run_on
from tests.programs.support.harness import random
from tests.run.recorded.support.replays import assert_equal, counting_replays
from tests.support.pool import Gloo

ONE, TWO = (make_mesh((n,), ("tp",), kind="simulated") for n in (1, 2))
MESHES: Final = pytest.mark.parametrize("mesh", [ONE, TWO], ids=["one", "two"])
X: Final = random((4,), 0)


class Config:
    """Equal to none but itself, whatever is in it."""

    def __init__(self, scale: Any) -> None:
        self.scale = scale


@dataclass(frozen=True)
class Frozen:
    """Equal to another one of equal numbers: 0.0 to -0.0, True to 1."""

    scale: Any


class Mode(nn.Module):
    """Does something else when it trains."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns one of two products."""
        return x * 2 if self.training else x * 3


def scaled(x: Tensor, config: Any) -> Tensor:
    y: Tensor = x * config.scale
    return y * (3 if type(config.scale) is bool else 5) / torch.ones(4).mul(config.scale)


def called(x: Tensor, function: Callable[..., Tensor]) -> Tensor:
    return function(x)


def configs() -> Iterator[Config]:
    config = Config(1.0)
    for scale in (1.0, 2.0, 2.0, random((4,), 1), random((4,), 2), 0.0, -0.0):
        config.scale = scale
        yield config


def functions() -> Iterator[Callable[[Tensor], Tensor]]:
    scale, mode = [1.0], Mode()

    def act(x: Tensor) -> Tensor:
        return x * scale[0]

    for number in (1.0, 1.0, 2.0):
        scale[0] = number
        yield act
    for training in (True, True, False, True):
        yield mode.train(training)


@MESHES
@pytest.mark.parametrize(
    ("body", "objects", "replays"),
    [
        (scaled, configs, 1),
        (scaled, lambda: map(Frozen, (0.0, -0.0, 0.0, 1, True, 1.0)), 1),
        (called, functions, 3),
    ],
)
def test_what_is_in_an_argument_is_noticed(
    body: Callable[..., Any], objects: Callable[[], Any], replays: int, mesh: Mesh
) -> None:
    f = shard_map(body, mesh=mesh, in_specs=(P(), None), out_specs=P(), replay=True)
    with counting_replays() as runs:
        for value in objects():
            assert_equal(f(X, value), body(X, value))
    assert len(runs) == replays


@MESHES
def test_an_argument_that_is_returned_is_that_of_the_call(mesh: Mesh) -> None:
    def body(x: Tensor, config: Config) -> Any:
        return x * 2, config, "name", 3, Frozen

    specs: Any = (P(), None, None, None, None)
    f = shard_map(body, mesh=mesh, in_specs=(P(), None), out_specs=specs, replay=True)
    for config in (Config(1), Config(2)):
        for _ in range(2):
            y, *others = f(X, config)
            assert others == [config, "name", 3, Frozen]
            assert torch.equal(y, X * 2)


def what_it_is(x: Tensor, y: Tensor) -> Any:
    kinds = 2 * isinstance(x, nn.Parameter) + (x is y)
    return x.detach() * getattr(x, "scale", 1) * 2**kinds - (0 if x.grad is None else x.grad)


def as_given(mesh: Mesh) -> None:
    """On processes the body gets the tensors of the call themselves."""
    replayed, plain = (
        shard_map(what_it_is, mesh=mesh, in_specs=P(), out_specs=P(), replay=replay)
        for replay in (True, False)
    )
    with_scale, with_grad = X.clone(), nn.Parameter(X.clone())
    with_scale.scale, with_grad.grad = 3, torch.ones_like(X)  # type: ignore[attr-defined]
    parameter = nn.Parameter(X.clone(), requires_grad=False)
    with torch.no_grad(), counting_replays() as runs:
        for x in (X, X, parameter, parameter, with_scale, with_grad):
            for y in (x, x.detach()):
                assert_equal(replayed(x, y), plain(x, y))
    assert len(runs) == 4


def test_a_body_on_processes_gets_the_objects_of_the_call(gloo: Gloo) -> None:
    run_on("gloo", as_given, gloo)


def weighed(x: Tensor, box: Any) -> Any:
    return all_reduce((x @ box.w).sin(), "tp", dst=I)


def differing(mesh: Mesh) -> None:
    """One rank records again, or drops recordings, where the other one replays."""
    box, is_first = SimpleNamespace(w=random((4, 4), 7)), mesh.rank == 0
    replayed, plain = (
        shard_map(
            lambda x: weighed(x, box), mesh=mesh, in_specs=P("tp"), out_specs=P(), replay=replay
        )
        for replay in (True, False)
    )
    with (
        mock.patch.object(recordings, "_MOST", 1 if is_first else 64),
        counting_replays() as runs,
    ):
        for call in range(6):
            x = random((4, 4), call + mesh.rank)
            if is_first and call % 3 == 1:
                x = x.t().contiguous().t()
            if is_first and call == 4:
                box.w = box.w.clone()
            given = from_local(x, mesh, P("tp"))
            assert_equal(replayed(given), plain(given))
    assert len(runs) == (1 if is_first else 5)


def test_ranks_with_other_recordings_compute_the_same(gloo: Gloo) -> None:
    run_on("gloo", differing, gloo)


@pytest.mark.parametrize("replay", [False, True])
@MESHES
def test_casts_that_autocast_keeps_are_those_of_the_run(replay: bool, mesh: Mesh) -> None:
    weight = nn.Parameter(random((4, 4), 1).float())
    f = shard_map(lambda x: x @ weight, mesh=mesh, in_specs=P(), out_specs=P(), replay=replay)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for rows in (2, 2, 3, 3):
            x = random((rows, 4), rows).float()
            assert torch.equal(f(x), x @ weight)
