"""Plain inputs that differ between processes are refused, with the argument and a repair."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, P, SpecError, all_reduce, from_local, full, make_mesh, shard_map
from tests.support.pool import Gloo


def total(w: Tensor, x: Tensor) -> Tensor:
    return w * all_reduce(x.sum(), "dp", dst=I)


def mapped(debug: bool = False) -> Any:
    mesh = make_mesh((2,), ("dp",))
    specs: Any = {"mesh": mesh, "in_specs": (P(), P("dp")), "out_specs": P(), "debug": debug}
    return mesh, shard_map(total, **specs)


def refused(which: str) -> str:
    """The error of a call in which this process has its own batch, or its own parameters."""
    mesh, f = mapped()
    own = {"w": torch.ones(1, requires_grad=True), "x": torch.ones(4)}
    own[which] = own[which].detach() * mesh.rank
    with pytest.raises(SpecError) as error:
        f(own["w"], own["x"])
    return str(error.value)


def test_a_batch_of_each_process_s_own_is_refused_and_from_local_is_proposed(gloo: Gloo) -> None:
    for error in gloo(2).run(refused, "x"):
        head, line, fix = error.splitlines()
        assert head.startswith(
            "total: a plain tensor is a global value, equal on all processes, and these are not "
            "at test_plain_inputs.py:"
        )
        assert line == "  x: float32[4], P('dp'), has other values on rank 1 than on rank 0"
        assert fix == ("Fix: if x is this process' own shard, pass from_local(x, mesh, P('dp')).")


def test_parameters_of_unlike_seeds_are_refused(gloo: Gloo) -> None:
    for error in gloo(2).run(refused, "w"):
        _, line, fix = error.splitlines()
        assert line == "  w: float32[1], P(), has other values on rank 1 than on rank 0"
        assert fix == (
            "Fix: make w equal, by one seed on all processes or a broadcast of rank 0's; "
            "parameters of unlike seeds are unlike models."
        )


def repaired() -> float:
    mesh, f = mapped()
    own = torch.full((2,), float(mesh.rank))
    return float(full(f(torch.ones(1), from_local(own, mesh, P("dp")))))


def test_the_proposed_repair_is_right(gloo: Gloo) -> None:
    assert gloo(2).run(repaired) == [2.0, 2.0]


def later_calls(debug: bool) -> list[str]:
    """Returns which of three calls are refused: the second has other values, the third shapes."""
    mesh, f = mapped(debug)
    found = []
    for length, differs in ((4, 0.0), (4, 1.0), (8, 1.0)):
        try:
            f(torch.ones(1), torch.full((length,), differs * mesh.rank))
            found.append("runs")
        except SpecError:
            found.append("refused")
    return found


def with_variable(value: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDMAP_DEBUG", value)
        return later_calls(False)


def test_first_calls_of_signatures_are_compared_and_all_calls_if_asked(gloo: Gloo) -> None:
    assert gloo(2).run(later_calls, False) == [["runs", "runs", "refused"]] * 2
    assert gloo(2).run(later_calls, True) == [["runs", "refused", "refused"]] * 2
    assert gloo(2).run(with_variable, "1") == [["runs", "refused", "refused"]] * 2
    assert gloo(2).run(with_variable, "0") == [["runs", "runs", "runs"]] * 2


def under_a_transform() -> list[float]:
    mesh, f = mapped()
    grad = torch.func.grad(lambda w, x: f(w, x).sum())
    found = [float(grad(torch.ones(1), torch.ones(4)))]
    with pytest.raises(SpecError, match="x: float32"):
        grad(torch.ones(1), torch.full((8,), float(mesh.rank)))
    return found


def test_transforms_outside_are_seen_through(gloo: Gloo) -> None:
    assert gloo(2).run(under_a_transform) == [[4.0], [4.0]]
