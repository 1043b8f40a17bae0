"""Traced calls run recorded operators, and what they may not record is an error."""

import gc
import time
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    SpecError,
    TransformError,
    all_gather,
    all_reduce,
    convert,
    make_mesh,
    shard_map,
    value_and_grad,
)
from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.ops.gather import gather_starter
from tests.programs.support.everywhere import run_on, same
from tests.programs.support.harness import random
from tests.support.golden import told
from tests.support.pool import Gloo

MESH: Final = make_mesh((2,), ("tp",), kind="simulated")
IN: Final = (P(), P(None, "tp"), P("tp"))


def mlp(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h = torch.tanh(convert(x, "tp", src=I, dst=R) @ w1)
    return all_reduce((h @ w2).square(), "tp", dst=I)


def operands(seed: int) -> list[Tensor]:
    return [random(shape, seed + i) for i, shape in enumerate([(4, 3), (3, 6), (6, 2)])]


def test_python_runs_for_the_check_and_recording_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def spoken(*args: Tensor) -> Tensor:
        print("here")
        return mlp(*args)

    f = shard_map(spoken, mesh=MESH, in_specs=IN, out_specs=P(), replay=True)
    expected = shard_map(mlp, mesh=MESH, in_specs=IN, out_specs=P())
    f(*operands(0))
    assert "here" in capsys.readouterr().out
    for seed in range(3):
        values = operands(seed)
        assert torch.equal(f(*values), expected(*values))
    assert not capsys.readouterr().out


def test_changes_of_what_a_body_refers_to_are_refused() -> None:
    seen: list[int] = []

    def noted(*args: Tensor) -> Tensor:
        seen.append(len(args))
        return mlp(*args)

    f = shard_map(noted, mesh=MESH, in_specs=IN, out_specs=P(), replay=True)
    with pytest.raises(TransformError, match="changes what its code refers to"):
        f(*operands(0))


def step(x: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    loss, grads = value_and_grad(lambda *ws: mlp(x, *ws).sum(), argnums=(0, 1))(w1, w2)
    return loss, grads


def gradients(mesh: Mesh) -> None:
    out_specs = P(), (P(None, "tp"), P("tp"))
    made = [
        shard_map(step, mesh=mesh, in_specs=IN, out_specs=out_specs, replay=replay)
        for replay in (True, False)
    ]
    for seed in range(3):
        values = operands(seed)
        (loss, grads), (own, expected) = [f(*values) for f in made]
        assert torch.equal(loss, own)
        for grad, known in zip(grads, expected, strict=True):
            assert torch.equal(_plain(grad), _plain(known))


def _plain(x: Any) -> Tensor:
    found: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return found


@pytest.mark.parametrize("kind", ["vmap", "gloo"])
def test_gradients_in_the_body_are_recorded(kind: str, gloo: Gloo) -> None:
    run_on(kind, gradients, gloo)


def kept(mesh: Mesh) -> None:
    """No recording keeps arguments, results or what was computed between."""
    out_specs = P(), (P(None, "tp"), P("tp"))
    f = shard_map(step, mesh=mesh, in_specs=IN, out_specs=out_specs, replay=True)
    for _ in range(2):
        f(random((31, 3), 0), *operands(0)[1:])
    end = time.monotonic() + 30  # gloo's threads let go of operands a moment after they are used
    while (left := _left_behind()) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left


def _left_behind() -> list[torch.Size]:
    """Returns shapes: tensors that a call returned would still be there for the next one."""
    gc.collect()
    return [x.shape for x in gc.get_objects() if type(x) is Tensor and 31 in x.shape]


@pytest.mark.parametrize("kind", ["vmap", "gloo"])
def test_a_recording_leaves_no_tensors_behind(kind: str, gloo: Gloo) -> None:
    run_on(kind, kept, gloo)


@pytest.mark.parametrize(
    "wrong",
    [
        {"replay": 1},
        {"replay": True, "check": False},
    ],
)
def test_bad_arguments(wrong: dict[str, Any]) -> None:
    with told(SpecError):
        shard_map(mlp, mesh=MESH, in_specs=IN, out_specs=P(), **wrong)


def prefetched(mesh: Mesh) -> None:
    """Each run starts a gather where the body does, and each waits where a result is needed."""
    events: list[str] = []
    begin, send = ProcessGroupBackend._start, ProcessGroupBackend.communicate

    def noted(self: ProcessGroupBackend, move: str, collective: Collective, x: Tensor) -> Any:
        finish = begin(self, move, collective, x)
        assert finish is not None
        events.append("start")

        def waited() -> Tensor:
            events.append("wait")
            return finish()

        return waited

    def sent(self: ProcessGroupBackend, move: str, collective: Collective, x: Tensor) -> Tensor:
        events.append(move)
        return send(self, move, collective, x)

    def body(x: Tensor, y: Tensor) -> Tensor:
        starter = gather_starter("tp")
        started = None if starter is None else starter(x)
        y = all_reduce(y, "tp", dst=R)
        every = all_gather(x, "tp", tiled=False, dst=R) if started is None else started(x)
        return all_reduce(every.sum(0) * y * x, "tp", dst=I)

    f, expected = [
        shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P(), replay=replay)
        for replay in (True, False)
    ]
    f(random((4,), 1), random((4,), 2))
    for seed in range(2):
        x, y = random((4,), seed), random((4,), seed + 2)
        with (
            mock.patch.object(ProcessGroupBackend, "_start", noted),
            mock.patch.object(ProcessGroupBackend, "communicate", sent),
        ):
            found = f(x, y)
        same(found, expected(x, y))
    assert events == ["start", "start", "wait", "wait", "sum"] * 2


def test_gathers_that_are_started_early_stay_so(gloo: Gloo) -> None:
    run_on("gloo", prefetched, gloo)


WEIGHT: Final = torch.nn.Parameter(torch.ones(4))
ERRORS: Final = {
    "branch": lambda x: x * 2 if x.sum().item() > 0 else x,
    "draws": lambda x: all_reduce(x + torch.rand(4), "tp", op="max", dst=I),
    "tracked": lambda x: x * WEIGHT,
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_says_what_and_what_to_do(name: str) -> None:
    body = ERRORS[name]
    f = shard_map(body, mesh=MESH, in_specs=P(), out_specs=P(), replay=True)
    with told(TransformError):
        f(torch.ones(4))
