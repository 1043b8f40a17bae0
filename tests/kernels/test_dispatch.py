"""Decisions for one call serve those that are alike, and no others."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardmap_torch import P, ShapeDtype, make_mesh, shard_map, trace
from shardmap_torch.collectives.scope import Scope, enter_scope
from shardmap_torch.errors import KernelError
from shardmap_torch.kernels import all_gather_matmul, dispatch, last_plan, matmul_reduce_scatter
from shardmap_torch.kernels.endpoint import Endpoint
from tests.kernels.support.calls import body
from tests.support.pool import Gloo


def decisions_of(calls: list[Callable[[], Any]]) -> list[int]:
    """Returns how many decisions were made after each call, in one body."""
    counts: list[int] = []
    with mock.patch.object(dispatch, "_prepare", wraps=dispatch._prepare) as decide:
        for call in calls:
            call()
            counts.append(decide.call_count)
    return counts


def alike_and_not() -> list[int]:
    x, w, v = torch.ones(4, 3), torch.ones(3, 2), torch.ones(3, 5)
    gather = all_gather_matmul
    with body():
        return decisions_of(
            [
                lambda: gather(x, w, "tp"),
                lambda: gather(x + 1, w + 1, "tp"),  # Other values: known.
                lambda: gather(x.requires_grad_(), w, "tp"),  # Known too.
                lambda: gather(x, (w, v), "tp"),
                lambda: gather(x, (w, v), "tp"),
                lambda: gather(x.double(), w.double(), "tp"),
                lambda: gather(x, w, ["tp"]),  # A list has no hash: decided each time.
                lambda: gather(x, w, ["tp"]),
                lambda: gather(x, w, "tp", overlap="require"),
                lambda: gather(x, w, "tp", overlap="require", chunks=2),
                lambda: gather(x, w, "tp", overlap="require", save_gathered=False),
                lambda: matmul_reduce_scatter(x, w, "tp"),
                lambda: matmul_reduce_scatter(x, w, "tp", dim=1),
                lambda: matmul_reduce_scatter(x, w, "tp", bias=torch.ones(2)),
                lambda: matmul_reduce_scatter(x, w, "tp", bias=torch.ones(2)),
            ]
        )


def test_calls_that_differ_in_what_decides_are_decided_apart(gloo: Gloo) -> None:
    expected = [1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11]
    assert gloo(2).run(alike_and_not) == [expected] * 2


def reasons_in_turn() -> list[str]:
    """A remembered decision beside the same call where something else is going on."""
    x, w = torch.ones(4, 3), torch.ones(3, 2)
    found = []

    def call(overlap: Any = "require") -> Tensor:
        out = all_gather_matmul(x, w, "tp", overlap=overlap)
        plan = last_plan()
        assert plan is not None
        found.append(plan.reason if plan.choice is None else "overlapped")
        return out

    with body():
        call()
        call()
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(KernelError, match="autocast"):
            call()
        call("off")
        call()
        torch.func.vmap(lambda _: call("auto"))(torch.ones(2))
        call()
    with body():
        call()
    return found


def test_a_mode_is_not_answered_from_memory(gloo: Gloo) -> None:
    assert gloo(2).run(reasons_in_turn)[0] == [
        "overlapped",
        "overlapped",
        "overlap is off",
        "overlapped",
        "a transform other than torch.func.grad and vjp is active",
        "overlapped",
        "overlapped",
    ]


def meetings() -> list[str]:
    x, w = torch.ones(4, 3), torch.ones(3, 2)
    monitor = mock.Mock()
    with (
        body() as backend,
        enter_scope(Scope(backend, frozenset(("tp",)), monitor)),
        mock.patch.object(Endpoint, "fabric", side_effect=ZeroDivisionError),
    ):
        for _ in range(3):
            all_gather_matmul(x, w, "tp")
        with pytest.raises(KernelError):  # The fabric is asked for after the meeting.
            matmul_reduce_scatter(x, w, "tp", chunks=1)
    return [str(call.args[0]) for call in monitor.on_operation.call_args_list]


def test_every_call_is_shown_to_the_follower_once_and_before_anything_is_sent(gloo: Gloo) -> None:
    expected = ["all_gather('tp', V -> R)"] * 3 + ["reduce_scatter('tp', Partial -> V)"]
    assert gloo(2).run(meetings) == [expected] * 2


def mistake_twice() -> int:
    x, w = torch.ones(4, 3), torch.ones(4, 2)
    with body():
        for _ in range(2):
            with pytest.raises(KernelError, match="the rows it multiplies have 3 features"):
                all_gather_matmul(x, w, "tp")
    return 2


def test_a_mistake_is_told_every_time(gloo: Gloo) -> None:
    assert gloo(2).run(mistake_twice) == [2, 2]


def test_a_required_overlap_is_checked_on_an_abstract_mesh_as_its_composition() -> None:
    mesh = make_mesh((4,), ("tp",), kind="abstract")
    programs = []
    for overlap in ("require", "off"):
        layer = partial(all_gather_matmul, axis="tp", overlap=overlap)
        mapped = shard_map(
            layer, mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")
        )
        programs.append(trace(mapped, ShapeDtype((8, 3)), ShapeDtype((3, 8))))
        plan = last_plan()
        assert plan is not None
        assert (plan.choice, plan.reason) == (None, "the body is being checked, not run")
    assert programs[0].fingerprint == programs[1].fingerprint
