"""Everyday mistakes of processes are told by the line that one rank alone has come to."""

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from shardmap_torch import (
    CommunicationError,
    Mesh,
    MeshError,
    P,
    ShardMapError,
    device_put,
    from_local,
    full,
    make_mesh,
    parallelize,
)
from shardmap_torch.control.board import Step
from shardmap_torch.control.parting import find_parting
from shardmap_torch.control.start import current
from tests.support import golden
from tests.support.pool import Gloo


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return mse_loss(y, torch.zeros_like(y))


class Kit:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.is_first = mesh, mesh.rank == 0
        self.model: Any = parallelize(Model(), mesh, {}, dp="dp")
        self.x: Any = device_put(torch.ones(4, 6), mesh, P("dp"))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def reset(self) -> None:
        """Makes what ranks have equal again."""
        self.optimizer.zero_grad()
        self.optimizer.param_groups[0].update(lr=0.1, momentum=0)
        with torch.no_grad():
            for x in self.model.parameters():
                x.fill_(1.0)
        self.mesh.recover()

    def step(self, x: Any) -> Tensor:
        loss: Tensor = self.model(x)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def evaluates_alone(kit: Kit) -> None:
    kit.step(kit.x)
    if kit.is_first:
        kit.model(kit.x)
    kit.model(kit.x).backward()


def loss_of(kit: Kit) -> Tensor:
    loss: Tensor = kit.model(kit.x)
    return loss


def evaluates_alone_by_a_function_that_trains(kit: Kit) -> None:
    loss_of(kit).backward()
    if kit.is_first:
        loss_of(kit)  # the evaluation
    loss_of(kit).backward()


def gathers_alone(kit: Kit) -> None:
    kit.step(kit.x)
    if kit.is_first:
        device_put(torch.ones(4, 6), kit.mesh, P("dp"))
    kit.model(kit.x)


def takes_a_backward_alone(kit: Kit) -> None:
    loss = kit.model(kit.x)
    if kit.is_first:
        loss.backward()
    kit.model(kit.x)


def updates_alone(kit: Kit) -> None:
    for _ in range(2):
        kit.model(kit.x).backward()
        if kit.is_first:
            kit.optimizer.step()


def has_another_learning_rate(kit: Kit) -> None:
    for _ in range(2):
        kit.optimizer.param_groups[0]["lr"] = 0.1 * (1 + kit.mesh.rank)
        kit.step(kit.x)


def has_another_momentum(kit: Kit) -> None:
    for _ in range(2):
        kit.optimizer.param_groups[0]["momentum"] = 0.9 * kit.mesh.rank
        kit.step(kit.x)


def has_a_batch_more(kit: Kit) -> None:
    for rows in torch.ones(12 if kit.is_first else 8, 6).split(2):
        kit.step(from_local(rows, kit.mesh, P("dp")))
    full(kit.model(kit.x))  # the evaluation


def stops_earlier(kit: Kit) -> None:
    for at in range(3):
        loss = kit.step(kit.x)
        if loss.item() < 0 or at == kit.mesh.rank:
            break
    device_put(torch.ones(2), kit.mesh, P("dp"))  # after the loop


def clips_alone(kit: Kit) -> None:
    for _ in range(3):
        kit.model(kit.x).backward()
        if kit.is_first:
            nn.utils.clip_grad_norm_(kit.model.parameters(), 1e-3)
        kit.optimizer.step()


MISTAKES: list[Callable[[Kit], None]] = [
    *(
        evaluates_alone,
        evaluates_alone_by_a_function_that_trains,
        gathers_alone,
        takes_a_backward_alone,
        updates_alone,
    ),
    *(
        has_another_learning_rate,
        has_another_momentum,
        has_a_batch_more,
        stops_earlier,
        clips_alone,
    ),
]


def told() -> list[str]:
    kit, errors = Kit(make_mesh((2,), ("dp",))), []
    runs: list[int] = []
    names = {"run": kit.model.forward._settled, "runs": runs}
    # No line of a user's code, as that of a function here would be.
    vars(kit.model.forward)["_settled"] = eval("lambda *args: runs.append(0) or run(*args)", names)
    for mistake in MISTAKES:
        with pytest.raises(ShardMapError) as caught:
            mistake(kit)
        if mistake is evaluates_alone:  # the call that fails is not made in another way
            assert len(runs) == 2 + kit.is_first
        # The name of the function is that of this rank's own call.
        errors.append(str(caught.value).partition(": ")[2])
        kit.reset()
    if kit.is_first:  # what one rank has of its own is no difference
        torch.optim.SGD(nn.Linear(2, 2).parameters()).step()
    kit.step(kit.x)
    return errors


def test_what_one_rank_does_alone_is_told_with_its_line_on_every_rank(gloo: Gloo) -> None:
    first, second = gloo(2).run(told)
    assert first == second
    for mistake, text in zip(MISTAKES, first, strict=True):
        golden.hold("processes.txt", mistake.__name__, text)


def in_torch() -> list[str]:
    """Runs a collective of torch's own on rank 0 alone; returns what each rank is told."""
    mesh = make_mesh((2,), ("dp",), timeout=1.5)
    kit, group = Kit(mesh), dist.new_group(timeout=timedelta(seconds=3))
    kit.step(kit.x)
    control = current()
    assert control is not None
    if kit.is_first:
        with pytest.raises(RuntimeError) as raised:
            dist.barrier(group)
        control.exit(raised.value)
        mesh.recover()
        return raised.value.__notes__
    with pytest.raises(CommunicationError) as caught:
        kit.model(kit.x)
    with redirect_stderr(StringIO()) as shown:  # as it is printed where nothing catches it
        sys.excepthook(CommunicationError, caught.value, caught.value.__traceback__)
    files = re.findall(r'  File "[^"]*/(\w+\.py)", line', shown.getvalue())
    assert {*files} == {"test_parting.py"}
    assert "The above exception" not in shown.getvalue()
    time.sleep(2)  # or rank 0 would be told that this one has gone
    mesh.recover()
    return [str(caught.value)]


def test_a_collective_of_torch_that_one_rank_calls_alone_is_told_on_both(gloo: Gloo) -> None:
    (first,), (second,) = gloo(2).run(in_torch)
    told = r"\n  rank 1 has failed before: the check of call \d+ of Model, at test_parting.py:"
    assert re.search(told, first)
    assert "\nFix: all ranks must come to a collective of torch's own" in first
    line = "  rank 0 waits in a collective of torch's own at test_parting.py:"
    assert any(
        each.startswith(line) and "dist.barrier(group)" in each for each in second.splitlines()
    )
    assert "\nFix: all ranks must come to a collective of torch's own" in second


def forked() -> str:
    """Returns what a worker of a DataLoader is told that places its rows."""
    mesh, (read, write) = make_mesh((2,), ("dp",)), os.pipe()
    if os.fork() == 0:
        try:
            device_put(torch.ones(2), mesh, P("dp"))
        except MeshError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.wait()
    assert torch.equal(full(device_put(torch.ones(2), mesh, P("dp"))), torch.ones(2))
    return os.read(read, 4096).decode()


def test_a_forked_process_is_no_rank_and_does_not_disturb_the_one_that_is(gloo: Gloo) -> None:
    for text in gloo(2).run(forked):
        golden.hold("processes.txt", "forked", text)


STEPS = st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1, max_size=6)


def trail(lines: list[str]) -> list[Step]:
    return [Step(at, "f", f"x.py:{line}") for at, line in enumerate(lines)]


@given(st.data(), STEPS)
def test_a_step_of_one_rank_alone_is_found_wherever_it_is(data: Any, lines: list[str]) -> None:
    at = data.draw(st.integers(0, len(lines) - 1))
    more = [*lines[:at], "alone", *lines[at:]]
    found = find_parting(
        {0: trail(more[: len(lines)]), 2: trail(lines), 3: trail(more[: len(lines)])}
    )
    assert found is not None
    if at == len(lines) - 1:  # nothing tells yet whether a line is in place of the other
        assert not found.alone
    else:
        assert found.alone == [0, 3]
    assert found.texts()[0] == found.texts()[3] == "f at x.py:alone"
    assert found.texts()[2] == f"f at x.py:{lines[at]}"


@given(STEPS, STEPS)
def test_branches_on_other_lines_are_no_difference(one: list[str], other: list[str]) -> None:
    most = min(len(one), len(other))
    theirs = [line.upper() for line in other[:most]]
    assert find_parting({0: trail([*one[:most], "z"]), 1: trail([*theirs, "z"])}) is None
    assert find_parting({0: trail(one), 1: trail(one)}) is None
