"""Whole texts of the errors of what a body does while it is recorded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    Mesh,
    P,
    TransformError,
    axis_index,
    make_mesh,
    ragged_all_to_all,
    shard_map,
)
from tests.programs.support.everywhere import run_on
from tests.programs.support.harness import random
from tests.support.pool import Gloo

MESH: Final = make_mesh((1,), ("tp",), kind="simulated")
X: Final = random((4, 4), 0)


@dataclass
class Pair:
    """No pytree, so one leaf."""

    first: Tensor
    second: Tensor


def foreign(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


def resized(x: Tensor, _: Tensor) -> Tensor:
    return (x * 2).resize_(5, 8).zero_()


def moved(x: Tensor) -> Tensor:
    h = torch.empty(0, dtype=x.dtype)
    return torch.mul(x, 2, out=h)


def counted(x: Tensor, _: Tensor) -> Tensor:
    return x.as_strided((2,), (1,), storage_offset=4)


def kept(x: Tensor, _: Tensor) -> Pair:
    return Pair(x, x * 2)


def sent(x: Tensor) -> Tensor:
    sizes = torch.tensor([[1, 1], [0, 2]])[axis_index("tp")]
    return ragged_all_to_all(x[:2], "tp", send_sizes=sizes, length=4)[0]


HERE: Final = "test_errors.py:{}: {}"
OUT: Final = "leave replay=True out."
TEXTS: Final = {
    foreign: (
        "and the body takes a float64 of shape [4, 4] (return x * weight) that is no argument with "
        "a spec, and to which its code does not refer: later calls would not notice that it is "
        "another one. Pass it as an argument with a spec, or "
    ),
    resized: (
        "and aten.resize_.default makes the memory of a tensor larger (return (x * 2).resize_(5, "
        "8).zero_()). Make a new tensor, or "
    ),
    counted: (
        "and aten.as_strided.default counts its offset from where the memory of an argument starts "
        "(return x.as_strided((2,), (1,), storage_offset=4)), and those of later calls may start "
        "elsewhere. Take a slice, or "
    ),
    kept: (
        "and the body returns an object of Pair, which later calls would return again with what is "
        "in it now. Return its tensors and numbers, or "
    ),
}
ON_PROCESSES: Final = {
    moved: (
        "and gives tensors numbers, but one (h = torch.empty(0, dtype=x.dtype)) gets other memory "
        "or another shape after it was made, as by out= or torch.utils.swap_tensors. Make a new "
        "tensor, or "
    ),
    sent: (
        "and how many rows ragged_all_to_all('tp', V -> V) sends is read from a tensor (return "
        'ragged_all_to_all(x[:2], "tp", send_sizes=sizes, length=4)[0]), which later calls would '
        "not do again. Send equally many to each rank by all_to_all, or "
    ),
}


def refuse(body: Callable[..., Any], mesh: Mesh, args: Any, specs: Any, text: str) -> None:
    """Requires this error of each call, with the file and number of the line before the line."""
    f = shard_map(body, mesh=mesh, in_specs=specs[0], out_specs=specs[1], replay=True)
    for _ in range(2):
        with pytest.raises(TransformError) as raised:
            f(*args)
        found = str(raised.value)
        _, place, rest = found.partition("test_errors.py:")
        without = found if not place else found.replace(place + rest.partition(": ")[0] + ": ", "")
        assert without == f"{body.__name__}: replay=True records operators, {text}{OUT}"


@pytest.mark.parametrize("body", TEXTS)
def test_an_error_says_what_where_and_what_to_do(body: Callable[..., Any]) -> None:
    specs = (P(), None), None if body is kept else P()
    refuse(body, MESH, (X, torch.ones_like(X)), specs, TEXTS[body])


def on_processes(mesh: Mesh) -> None:
    for body, text in ON_PROCESSES.items():
        refuse(body, mesh, (X,), (P("tp"), P("tp")), text)


def test_an_error_on_processes_says_what_where_and_what_to_do(gloo: Gloo) -> None:
    run_on("gloo", on_processes, gloo)
