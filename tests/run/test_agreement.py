"""Processes that would run different programs are stopped before they wait for one another."""

import re
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmap_torch import (
    CollectiveMismatchError,
    ColwiseParallel,
    CommunicationError,
    I,
    Mesh,
    P,
    R,
    RowwiseParallel,
    ShardMapError,
    all_reduce,
    axis_index,
    device_put,
    full,
    make_mesh,
    parallelize,
    shard_map,
)
from tests.support.golden import without_lines
from tests.support.pool import Gloo


def call(mesh: Mesh, body: Callable[[Tensor], Tensor]) -> str:
    try:
        shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P())(torch.ones(2))
    except CollectiveMismatchError as error:
        return str(error)
    return "ran"


def same(x: Tensor) -> Tensor:
    return all_reduce(x.sum(), "i", dst=I)


ME = {"rank": 0}
"""This process, by a number that no body can tell from one that is equal everywhere."""


def other_factor(x: Tensor) -> Tensor:
    factor = 2.0 if ME["rank"] == 1 else 1.0
    return all_reduce(x * factor, "i", dst=I)


def one_more(x: Tensor) -> Tensor:
    y = all_reduce(x, "i", dst=I)
    return y.sin() if ME["rank"] == 1 else y


def rejected_on_one(x: Tensor) -> Tensor:
    return x if ME["rank"] == 1 else all_reduce(x, "i", dst=I)


def raises_on_one(x: Tensor) -> Tensor:
    if ME["rank"] == 1:
        raise KeyError("mode")
    return all_reduce(x, "i", dst=I)


def misfits_on_one() -> None:
    mesh = make_mesh((2,), ("i",), kind="process_group")
    size = 3 if torch.distributed.get_rank() == 1 else 2
    known = shard_map(same, mesh=mesh, in_specs=P("i"), out_specs=P())
    known(torch.ones(2))
    known(torch.ones(size))  # rank 0 has checked it


def test_an_argument_that_does_not_fit_on_one_process_is_told_on_every_one(gloo: Gloo) -> None:
    first, second = (raised.text for raised in gloo(2).run(misfits_on_one, expect_error=True))
    assert first == second
    assert "  rank 0: same on the process_group mesh (i=2)  # test_agreement.py:" in first
    assert "  rank 1: same is rejected: same: the arguments do not match in_specs" in first


def multiplies(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce(x @ w, "i", dst=I)


def dtypes_on_one() -> None:
    mesh = make_mesh((2,), ("i",), kind="process_group")
    f = shard_map(multiplies, mesh=mesh, in_specs=(P(None, "i"), P("i")), out_specs=P())
    f(torch.ones(2, 2, dtype=[torch.float32, torch.float64][mesh.rank]), torch.ones(2, 2))


DTYPES = """\
multiplies: processes pass other data. The first difference:
  rank 0: x: float32[2, 2], P(None, 'i')
  rank 1: x: float64[2, 2], P(None, 'i')
where: ranks 0, 1 at test_agreement.py:LINE
Fix: pass tensors of one dtype on every process."""


def test_arguments_are_compared_before_one_rank_is_told_that_they_do_not_fit(gloo: Gloo) -> None:
    for raised in gloo(2).run(dtypes_on_one, expect_error=True):
        assert without_lines(f"{raised.text}") == DTYPES
        assert "shardmap_torch/checker" not in raised.trace  # nor in the refusal above


def in_worker() -> list[str]:
    mesh = make_mesh((2,), ("i",), kind="process_group")
    ME["rank"] = mesh.rank
    bodies = (same, other_factor, one_more, rejected_on_one, raises_on_one, same)
    return [call(mesh, body) for body in bodies]


def test_the_first_difference_of_two_programs_is_told_on_every_rank(gloo: Gloo) -> None:
    first, second = gloo(2).run(in_worker)
    assert first == second
    ran, factor, more, rejected, raised, again = first
    assert (ran, again) == ("ran", "ran")
    path = f"test_agreement.py:{other_factor.__code__.co_firstlineno + 2}"
    line = "# " + path + ': return all_reduce(x * factor, "i", dst=I)'
    assert factor == (
        "other_factor: processes run different programs. The first difference:\n"
        f"  rank 0: %1: float32[1] {{i: V}} = mul(input x (P('i')); other=1.0)  {line}\n"
        f"  rank 1: %1: float32[1] {{i: V}} = mul(input x (P('i')); other=2.0)  {line}\n"
        f"where: ranks 0, 1 at test_agreement.py:{call.__code__.co_firstlineno + 2}\n"
        "Fix: run the same code with the same Python values and modes (train() and eval() too) on "
        "every process, and pass the same DTensors: a clone, or a new one of equal values, is "
        "another. What depends on the rank "
        "inside of a body is the tensor axis_index(axis)."
    )
    assert more.splitlines()[1] == "  rank 0: backward:"
    assert more.splitlines()[2].startswith("  rank 1: %2: float32[1] {i: K} = sin(%1)  # ")
    assert "  rank 1: rejected_on_one is rejected: rejected_on_one: the result" in rejected
    assert "  rank 1: raises_on_one raises KeyError: 'mode'" in raised


def turned(*items: Any) -> Any:
    """Gives items in another order on the second rank, as a loop over a set of strings may."""
    return items[::-1] if ME["rank"] == 1 else items


def factors(x: Tensor, w: Tensor) -> Any:
    """Values that are equal on all ranks, before and between collectives."""
    made = {name: getattr(w, name)() for name in turned("cos", "sin")}
    y = all_reduce(x * made["cos"], "i", dst=R)
    more = {name: made[name] * 2.0 for name in turned("sin", "cos")}
    return y * more["sin"] + more["cos"].sum()


def gradients(x: Tensor, w: Tensor) -> Any:
    """Both are used by each value, so that their gradients meet in another order."""
    first, second = (getattr(w, name)() for name in turned("cos", "sin"))
    return all_reduce((first * x + second * x).sum(), "i", dst=R)


RIGHT: list[Any] = [factors, gradients]


def subtracted(x: Tensor, w: Tensor) -> Any:
    a, b = turned(w.cos(), w.sin())
    return all_reduce(x * (a - b), "i", dst=R)


def exchanged(x: Tensor, w: Tensor) -> Any:
    a, b = turned(w.cos(), w.sin())
    return all_reduce(x * a, "i", dst=R) * b


def written(x: Tensor, w: Tensor) -> Any:
    y = w * 2.0
    for write in turned(y.add_, y.mul_):
        write(3.0)
    return all_reduce(x * y, "i", dst=R)


def read_after_a_write(x: Tensor, w: Tensor) -> Any:
    y = w * 2.0
    view, write = y.view(-1), partial(y.add_, 1.0)
    first, second = (each() for each in turned(write, view.sin))
    return all_reduce(x * (second if first is y else first), "i", dst=R)


def communicated(x: Tensor, w: Tensor) -> Any:
    a, b = (all_reduce(each, "i", dst=R) for each in turned(x * 2.0, x.sin()))
    return a * b * w


def later(x: Tensor, w: Tensor) -> Any:
    if ME["rank"] == 1:
        s = w.sin()
        return all_reduce(x, "i", dst=R) * s
    return all_reduce(x, "i", dst=R) * w.sin()


def summed_otherwise(x: Tensor, w: Tensor) -> Any:
    a, b, c = turned(w.cos(), w.sin(), w.exp())
    return all_reduce(x * (a + b + c), "i", dst=R)


def returned(x: Tensor, w: Tensor) -> Any:
    a, b = w.cos() + all_reduce(x, "i", dst=R), w.sin() + all_reduce(x, "i", dst=R)
    return turned(a, b)[0]


def met(x: Tensor, w: Tensor) -> Any:
    """Three gradients, whose sum depends on the order."""
    first, second, third = (getattr(w, name)() for name in turned("cos", "sin", "tanh"))
    return all_reduce((first * x + second * x + third * x).sum(), "i", dst=R)


WRONG: list[Any] = [
    *(subtracted, exchanged, written, read_after_a_write, communicated, later),
    *(summed_otherwise, returned, met),
]


def in_another_order(bodies: list[Any]) -> dict[str, str]:
    mesh = make_mesh((2,), ("i",), kind="process_group")
    ME["rank"] = mesh.rank
    found = {}
    for body in bodies:
        specs = (P("i"), P())
        x, w = torch.arange(4.0, dtype=torch.float64), torch.tensor([0.3, 0.7]).double()
        mapped: Any = shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check=True)
        w.requires_grad = True
        try:
            out = full(mapped(x, w)).sum()
            out.backward()
        except ShardMapError as error:
            found[body.__name__] = str(error).splitlines()[0]
        else:
            assert w.grad is not None
            found[body.__name__] = f"{out.item():.12f} {w.grad.tolist()}"
    return found


def test_equal_values_may_be_computed_in_another_order_between_collectives(gloo: Gloo) -> None:
    found, other = gloo(2).run(in_another_order, RIGHT)
    assert found == other
    assert not [text for text in found.values() if ":" in text]


def test_another_program_is_refused_in_whatever_order(gloo: Gloo) -> None:
    for found in gloo(2).run(in_another_order, WRONG):
        for body in WRONG:
            name = body.__name__
            told = f"{name}: processes run different programs. The first difference:"
            assert found[name] == told


def on_one_rank_alone() -> float:
    """Calls a simulated mesh on rank 0, where it fails, and logs a body there."""
    mesh, local = (make_mesh((2,), ("i",), kind=kind) for kind in ("process_group", "simulated"))
    ME["rank"], body = 1, same
    if mesh.rank == 0:
        with pytest.raises(KeyError):
            shard_map(raises_on_one, mesh=local, in_specs=P("i"), out_specs=P())(torch.ones(2))
        body = wraps(same)(lambda x: same(x))
    f = shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P(), check=False)
    return f(torch.ones(2)).item()


def test_what_concerns_one_rank_alone_stops_no_other(gloo: Gloo) -> None:
    assert gloo(2).run(on_one_rank_alone) == [2.0, 2.0]


def another_device() -> str:
    mesh = make_mesh((2,), ("i",), kind="process_group")
    f, g = (shard_map(b, mesh=mesh, in_specs=P("i"), out_specs=P()) for b in (same, ones_added))
    x = torch.ones(2)
    f(x), g(x)
    with torch.device("meta" if mesh.rank == 1 else "cpu"):
        assert f(x) == 2
        with pytest.raises(CollectiveMismatchError) as told:
            g(x)
    mesh.recover()
    return str(told.value)


def ones_added(x: Tensor) -> Tensor:
    return all_reduce(x.sum() + torch.ones(3).sum(), "i", dst=I)


def test_a_default_device_of_one_process_is_told_where_it_makes_another_program(gloo: Gloo) -> None:
    first, second = gloo(2).run(another_device)
    assert first == second
    assert "  rank 0: %2: float32[3] {i: K} = ones(device=cpu" in first
    assert "  rank 1: %2: float32[3] {i: K} = ones(device=meta" in first


def put_right(folder: Path) -> tuple[str, float]:
    mesh = make_mesh((2,), ("i",), kind="process_group")
    rank = torch.distributed.get_rank()
    file = folder / f"{rank}"

    def body(x: Tensor) -> Tensor:
        x = all_reduce(x, "i", dst=I)
        return all_reduce(x + axis_index("i"), "i", op="max", dst=I) if file.read_text() else x

    f = shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P())
    file.write_text("")
    f(torch.ones(2))
    file.write_text("differs" if rank == 1 else "")
    if rank == 0:
        f(torch.ones(2))  # which ends before it hears of rank 1
    with pytest.raises(CollectiveMismatchError) as error:
        f(torch.ones(2))
    file.write_text("")
    mesh.recover()
    return str(error.value), f(torch.ones(2)).item()


def test_a_difference_that_is_put_right_outside_of_python_is_no_error_any_more(
    gloo: Gloo, tmp_path: Path
) -> None:
    (first, value), (second, other) = gloo(2).run(put_right, tmp_path)
    assert first == second
    assert first.startswith("body: processes run different programs.")
    assert value == other == 2.0


def raises_alone(folder: Path) -> str:
    """Raises an error on rank 1, which waits until rank 0 has one too."""
    mesh = make_mesh((2,), ("i",), kind="process_group")
    rank, told = mesh.rank, folder / "told"
    lost = folder / f"{rank}"

    def body(x: Tensor) -> Tensor:
        if lost.exists():
            raise ValueError("lost")
        return all_reduce(x, "i", dst=I)

    f = shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P())
    f(torch.ones(2))
    if rank == 1:
        lost.touch()
    with pytest.raises((CommunicationError, ValueError)) as error:
        f(torch.ones(2))
    if rank == 0:
        told.touch()
    while not told.exists():
        time.sleep(0.05)
    mesh.recover()
    again = make_mesh((2,), ("i",), kind="process_group")  # not on what the other has sent before
    total = shard_map(
        lambda x: all_reduce(x.sum(0), "i", dst=I), mesh=again, in_specs=P("i"), out_specs=P()
    )
    assert torch.equal(total(torch.ones(2, 3)), torch.full((3,), 2.0))
    return str(error.value)


def test_an_error_of_one_rank_is_told_to_those_that_wait_for_it(gloo: Gloo, tmp_path: Path) -> None:
    first, second = gloo(2).run(raises_alone, tmp_path)
    assert "\n  missing: rank 1\n" in first
    assert "\n  rank 1 raised ValueError: lost at test_agreement.py:" in first
    assert second == "lost"


def places_and_gathers() -> list[str]:
    """Calls `device_put` and `full` with something else on rank 1; returns this rank's errors."""
    mesh = make_mesh((2,), ("i",), kind="process_group")
    rank = torch.distributed.get_rank()
    double = shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    x = torch.arange(8.0)
    one, two = double(x), double(x + 1)
    linear = nn.Linear(4, 4)
    nn.init.constant_(linear.weight, rank)
    calls: list[Callable[[], object]] = [
        lambda: device_put(x + rank, mesh, P("i")),
        lambda: device_put(x.view(4, 2), mesh, P("i") if rank == 0 else P(None, "i")),
        lambda: device_put(x, mesh, P("i") if rank == 0 else P("j")),
        lambda: full((one, two)[rank]),
        lambda: full(one) if rank == 0 else double(x),
        lambda: parallelize(nn.Linear(4, 4), mesh, (ColwiseParallel, RowwiseParallel)[rank]()),
        lambda: parallelize(linear, mesh, ColwiseParallel(), src_data_rank=None),
    ]
    errors = []
    for call in calls:
        with pytest.raises(ShardMapError) as caught:
            call()
        errors.append(str(caught.value))
        mesh.recover()
    assert torch.equal(full(device_put(x, mesh, P("i"))), x)
    return errors


def test_placing_and_gathering_are_compared_before_they_begin(gloo: Gloo) -> None:
    first, second = gloo(2).run(places_and_gathers)
    told = ": processes "  # after the name of the rank's own function
    assert [e.partition(told)[2] for e in first] == [e.partition(told)[2] for e in second]
    values, specs, wrong, order, others, plans, weights = first
    assert "rank 0: tree: float32[8], hash " in values
    assert "rank 1: tree: float32[4, 2], hash " in specs
    assert "P(None, 'i')" in specs
    assert "rank 1: device_put is rejected: device_put:" in wrong
    calls = re.findall(r"float32\[8\], placed \(Shard\(dim=0\),\), result 0 of call (\d+)", order)
    assert int(calls[1]) == int(calls[0]) + 1
    assert "\n  rank 0: full at test_agreement.py:" in others
    assert (
        "rank 0: weight: float32[4, 4], P('i')\n  rank 1: weight: float32[4, 4], P(None, 'i')"
        in plans
    )
    assert "rank 0: weight: float32[4, 4], P('i'), hash " in weights
