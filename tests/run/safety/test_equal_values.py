"""Values that must be equal on ranks, and are not, are refused by name, with a repair."""

import re
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from shardmap_torch import (
    CollectiveMismatchError,
    I,
    P,
    SpecError,
    all_reduce,
    device_put,
    from_local,
    full,
    make_mesh,
    shard_map,
)
from shardmap_torch.run.safety import equal_values
from shardmap_torch.run.safety.equal_values import WHOLE, ValuesOfCall
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
            "at test_equal_values.py:"
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


def ends(f: Any, *args: Any) -> str:
    """Returns the second line of the error of a call, or that it runs."""
    try:
        f(*args)
        return "runs"
    except SpecError as error:
        return str(error).splitlines()[1].strip()


def calls(debug: bool, variable: str | None = None) -> list[str]:
    """Returns how calls end that have other values on rank 1: all, and then one number."""
    with pytest.MonkeyPatch.context() as patch:
        if variable is not None:
            patch.setenv("SHARDMAP_DEBUG", variable)
        mesh, f = mapped(debug)
        x, w = torch.arange(4096.0), torch.ones(1)
        found = [ends(f, w, x), ends(f, w, x + mesh.rank), ends(f, w, x)]
        x[-1] += mesh.rank
        return [*found, *(ends(f, w, x) for _ in range(2))]


HAS = "x: float32[4096], P('dp'), has other values on rank 1 than on rank 0"


def test_each_call_compares_a_sample_and_all_bits_if_asked(gloo: Gloo) -> None:
    # A difference is followed by a call that compares all, and so is the last one.
    assert gloo(2).run(calls, False) == [["runs", HAS, "runs", "runs", "runs"]] * 2
    assert gloo(2).run(calls, True) == [["runs", HAS, "runs", HAS, HAS]] * 2
    assert gloo(2).run(calls, False, "1") == [["runs", HAS, "runs", HAS, HAS]] * 2
    assert gloo(2).run(calls, False, "0") == [["runs"] * 5] * 2


def scaled(w: Tensor, x: Tensor) -> Tensor:
    return w * x.sum()


def until_refused(which: str) -> int:
    """Counts the calls until one number, of 200,000, is found that rank 1 has changed."""
    mesh, f = mapped()
    x, w = torch.arange(200_000.0), torch.ones(1)
    if which == "a DTensor":
        x = DTensor.from_local(x, mesh.device_mesh, [Replicate()], run_check=False)
        f = shard_map(scaled, mesh=mesh, in_specs=P(), out_specs=P())
    f(w, x)
    (x.to_local() if isinstance(x, DTensor) else x)[0] += mesh.rank
    return next(n for n in range(1, 200) if ends(f, w, x) != "runs")


@pytest.mark.parametrize("which", ["a plain tensor", "a DTensor"])
def test_all_bits_are_compared_every_hundred_calls(gloo: Gloo, which: str) -> None:
    assert gloo(2).run(until_refused, which) == [WHOLE - 1] * 2


SCALE = torch.ones(3)


def closed_over() -> list[str]:
    """Returns how calls end that read a tensor of which rank 1 has another, and one beside it."""
    mesh = make_mesh((2,), ("dp",))
    model = torch.nn.Linear(3, 2).requires_grad_(False)
    torch.nn.init.ones_(model.weight)
    beside = [torch.full((3,), float(mesh.rank))]

    def body(x: Tensor) -> Tensor:
        if len(beside) > 1:
            x = x * beside[1]
        return all_reduce((x * SCALE @ model.weight.mT).sum(), "dp", dst=I)

    f = shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P())
    found = [ends(f, torch.ones(4, 3))]
    for changed in (SCALE, model.weight):
        changed += mesh.rank
        found.append(ends(f, torch.ones(4, 3)))
        changed -= mesh.rank
    return [*found, ends(f, torch.ones(4, 3))]


def test_tensors_that_a_body_reads_are_compared_and_no_others(gloo: Gloo) -> None:
    has = "closed over, has other values on rank 1 than on rank 0"
    scale, weight = f"SCALE: float32[3], {has}", f"model.weight: float32[2, 3], {has}"
    assert gloo(2).run(closed_over) == [["runs", scale, weight, "runs"]] * 2


def arrays() -> list[str]:
    """Returns how calls end that read an array of NumPy, of which rank 1 has another from some."""
    mesh, found = make_mesh((2,), ("dp",)), []
    for odd, size in ((0, 2), (1, 2), (1, 10_000)):
        scale = np.ones(size, np.float32)
        scale[size // 2 :] += odd * mesh.rank

        def body(x: Tensor, scale: np.ndarray = scale) -> Tensor:
            return (x * torch.from_numpy(2 * scale)).sum()[None]

        f = shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
        try:
            found.append(ends(f, torch.ones(4, 1)))
        except CollectiveMismatchError as error:
            found.append(str(error).splitlines()[1])
    return found


def test_arrays_of_numpy_that_differ_from_the_start_are_an_error(gloo: Gloo) -> None:
    (good, few, many), other = gloo(2).run(arrays)
    assert other == [good, few, many]
    assert good == "runs"
    assert few == "  rank 0: a tensor, closed over: [2.0, 2.0]"
    assert re.match("  rank 0: .*of hash [0-9a-f]+", many)


def product(w: Tensor, x: Tensor) -> Tensor:
    return all_reduce((x @ w).sum(), ("dp", "tp"), dst=I)


def copies(debug: bool) -> list[str]:
    mesh = make_mesh((2, 2), ("dp", "tp"))
    f = shard_map(product, mesh=mesh, in_specs=(P(None, "tp"), P("dp")), out_specs=P(), debug=debug)
    w: Any = device_put(torch.ones(3, 4), mesh, P(None, "tp"))
    found = []
    for changed in ([], [3], [0, 2]):
        w.to_local().fill_(7.0 if mesh.rank in changed else 1.0)
        found.append(ends(f, w, torch.ones(4, 3)))
    return found


def test_copies_of_a_shard_are_compared_where_ranks_have_one(gloo: Gloo) -> None:
    w = "w: float32[3, 4], placed (Replicate(), Shard(dim=1))"
    expected = ["runs", f"{w}, tp=1, has other values on rank 3 than on rank 1", "runs"]
    assert gloo(4).run(copies, True) == [expected] * 4
    assert gloo(4).run(copies, False) == [["runs"] * 3] * 4


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


AROUND: dict[str, Any] = {"hooks": torch.autograd.graph.save_on_cpu, "a mode": Mode}


def in_another_form(which: str) -> str:
    mesh, f = mapped()
    x: Any = torch.ones(4)
    f(torch.ones(1), x)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        placed = device_put(x, mesh, P("dp"))
        if mesh.rank == 1 and which == "a DTensor":
            x = placed
        elif mesh.rank == 1 and which in AROUND:
            stack.enter_context(AROUND[which]())
        elif mesh.rank == 1:
            patch.setenv("SHARDMAP_DEBUG", which)
        with pytest.raises(CollectiveMismatchError) as error:
            f(torch.ones(1), x)
    return str(error.value)


def test_ranks_that_compare_in_other_ways_are_named(gloo: Gloo) -> None:
    """Shows that hashes never travel in the place of the body's numbers."""
    sample = "values: a sample, 2"
    for which, one, two in (
        ("a DTensor", sample, "values: all bits"),
        ("0", sample, "its end"),
        ("1", sample, "values: all bits"),
        *(
            (around, sample, f"{sample}, under saved_tensors_hooks or own modes")
            for around in AROUND
        ),
    ):
        for told in gloo(2).run(in_another_form, which):
            assert told.splitlines()[1:3] == [f"  rank 0: {one}", f"  rank 1: {two}"]


class Late(ValuesOfCall):
    """Stands for values on a device, which are read with the next comparison."""

    is_late = property(lambda self: True, lambda self, value: None)


def late() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equal_values, "ValuesOfCall", Late)
        mesh, f = mapped()
        x = torch.ones(4)
        return [ends(f, torch.ones(1), y) for y in (x, x + mesh.rank, x, x)]


def test_values_of_a_device_are_compared_in_the_next_call(gloo: Gloo) -> None:
    has = HAS.replace("4096", "4")
    assert gloo(2).run(late) == [["runs", "runs", has, "runs"]] * 2


def under_a_transform() -> list[float]:
    mesh, f = mapped()
    grad = torch.func.grad(lambda w, x: f(w, x).sum())
    found = [float(grad(torch.ones(1), torch.ones(4)))]
    for length in (4, 8):
        with pytest.raises(SpecError, match="x: float32"):
            grad(torch.ones(1), torch.full((length,), float(mesh.rank)))
    return found


def test_transforms_outside_are_seen_through(gloo: Gloo) -> None:
    assert gloo(2).run(under_a_transform) == [[4.0], [4.0]]
