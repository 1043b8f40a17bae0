"""Times are those of operations, bytes and links; the peak is where most is alive."""

import inspect
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from shardmap_torch import (
    ColwiseParallel,
    I,
    P,
    R,
    RowwiseParallel,
    ShapeDtype,
    all_gather,
    all_reduce,
    explain,
    make_mesh,
    parallelize,
    shard_map,
)
from shardmap_torch.errors import ShardTypeError, SpecError, TransformError
from shardmap_torch.ops.gather import gather_starter
from shardmap_torch.planning import Hardware, estimate
from tests.support.golden import hold_own, told
from tests.support.pool import Gloo

UNIT = Hardware(
    "unit", {torch.float32: 1e3}, memory=10**6, bandwidth=1e3, matmul_efficiency=0.5, launch=1.0,
    devices=2, inside=100.0, between=10.0, latency=0.0, latency_between=0.0,
)  # fmt: skip
"""A device on which times can be computed by hand."""


def test_an_operator_takes_its_operations_its_bytes_or_its_launch() -> None:
    mesh = make_mesh((1,), ("tp",), kind="abstract")
    f = shard_map(lambda x, w: (x @ w).neg()[:1].neg(), mesh=mesh, in_specs=P(), out_specs=P())
    found = estimate(f, ShapeDtype((10, 100)), ShapeDtype((100, 10)), hardware=UNIT)
    # 2 * 10 * 100 * 10 operations at half of 1,000 a second; 4 * (1,000 + 1,000 + 100) bytes.
    assert [span.end - span.start for span in found.spans] == [40.0, 1.0, 1.0]
    assert found.flops == 20_000
    assert found.seconds == 42.0
    assert found.utilization == pytest.approx(20 / 42)
    assert {span.step.name for span in found.spans} == {"mm", "neg"}


def test_causal_attention_computes_half_at_the_rate_of_attention() -> None:
    mesh = make_mesh((1,), ("tp",), kind="abstract")
    device = replace(UNIT, attention_efficiency=0.25, bandwidth=1e9)
    flops, seconds = [], []
    for causal in (False, True):
        attend = partial(scaled_dot_product_attention, is_causal=causal)
        f = shard_map(attend, mesh=mesh, in_specs=P(), out_specs=P())
        x = ShapeDtype((1, 2, 100, 10), requires_grad=True)
        found = estimate(f, x, x, x, hardware=device)
        flops.append(found.flops)
        seconds.append(found.seconds)
    # Two products of 100 x 100 x 10 a head forward, five backward, two operations each.
    assert flops == [2 * 2 * 7 * 100_000, 2 * 7 * 100_000]
    # At a quarter of 1,000 a second.
    assert [each // 100 for each in seconds] == [count // 25_000 for count in flops]


@pytest.mark.parametrize(("axis", "seconds"), [("tp", 4.0), ("dp", 40.0), (("dp", "tp"), 30.0)])
def test_a_sum_takes_the_link_of_its_axes(axis: str | tuple[str, ...], seconds: float) -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="abstract")
    f = shard_map(lambda x: all_reduce(x, axis, dst=R), mesh=mesh, in_specs=P(axis), out_specs=P())
    num_ranks = mesh.num_ranks((axis,) if isinstance(axis, str) else axis)
    found = estimate(f, ShapeDtype((100 * num_ranks,)), hardware=UNIT)
    # 400 bytes: both halves go once around a ring of two, three quarters of them of four; of that
    # ring a host has two ranks, so that it leaves over two links.
    (waited,) = found.exposed.values()
    assert waited == pytest.approx(seconds)


SENDING: Any = type("Sending", (Hardware,), {"hides": False})  # a processor that sends by itself


@pytest.mark.parametrize(("kind", "waited"), [(Hardware, (3.0, 4.0)), (SENDING, (7.0, 7.0))])
def test_a_gather_that_begins_early_is_hidden_where_the_device_computes_meanwhile(
    kind: type[Hardware], waited: tuple[float, float]
) -> None:
    mesh = make_mesh((2,), ("tp",), kind="abstract")

    def early(x: Tensor, y: Tensor) -> Tensor:
        start = gather_starter("tp")  # a check has none
        finish: Any = (
            partial(all_gather, axis="tp", tiled=False, dst=R) if start is None else start(x)
        )
        for _ in range(3):
            y = y.neg()
        total: Tensor = finish(x).sum() + y.sum()
        return total

    f = shard_map(early, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P())
    found = estimate(f, ShapeDtype((200,)), ShapeDtype((1,)), hardware=kind(**vars(UNIT)))
    wait = next(span for span in found.spans if span.step.waits)
    # 400 bytes at 100 a second, beside three operators of one second each.
    assert (wait.start, wait.end) == waited


def test_the_peak_names_its_line_and_what_is_alive(tmp_path: Path) -> None:
    mesh = make_mesh((4,), ("tp",), kind="abstract")

    def body(x: Tensor) -> Tensor:
        wide = all_gather(x, "tp", dst=I)
        return wide.exp().sum()

    f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P())
    found = estimate(f, ShapeDtype((400,), requires_grad=True), hardware=UNIT)
    assert found.at_peak["arguments"] == 400
    assert sum(found.at_peak.values()) == found.peak
    assert found.peak_site is not None
    assert "wide.exp()" in found.peak_site.source
    assert found.fits
    assert not estimate(f, ShapeDtype((10**6,)), hardware=UNIT).fits
    found.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event.get("tid") for event in events} == {"compute", "messages", None}


def test_a_trace_has_measured_lanes_beside_the_estimated_ones(tmp_path: Path) -> None:
    mesh = make_mesh((1,), ("tp",), kind="simulated")
    f = shard_map(lambda x: (x @ x).relu(), mesh=mesh, in_specs=P(), out_specs=P())
    x = torch.ones(8, 8)
    f(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        f(x)
    profile.export_chrome_trace(str(tmp_path / "profile.json"))
    path = tmp_path / "trace.json"
    estimate(f, x, hardware=UNIT).save_trace(path, profile=tmp_path / "profile.json")
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {
        pid: [e["name"] for e in events if e["pid"] == pid and e["ph"] == "X"] for pid in (0, 1)
    }
    assert lanes[0] == ["mm", "relu"]
    assert {"aten::mm", "aten::relu"} <= {*lanes[1]}
    assert min(e["ts"] for e in events if e["pid"] == 1 and e["ph"] == "X") == 0
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["estimated", "measured"]
    (tmp_path / "profile.json").write_text("[]")
    with pytest.raises(SpecError, match=r"save_trace: profile=.* is no exported profile\."):
        estimate(f, x, hardware=UNIT).save_trace(path, profile=tmp_path / "profile.json")


def profiled() -> list[str]:
    """Profiles a step on processes; returns the names on the measured lanes of its trace."""
    mesh = make_mesh((2,), ("tp",), kind="process_group")
    f = shard_map(summed, mesh=mesh, in_specs=P("tp"), out_specs=P())
    x = torch.ones(4)
    f(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        f(x)
    with TemporaryDirectory() as folder:
        path, measured = Path(folder, "trace.json"), Path(folder, "profile.json")
        profile.export_chrome_trace(str(measured))
        estimate(f, x, hardware=UNIT).save_trace(path, profile=measured)
        events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if event["pid"] == 1 and event["ph"] == "X"]


def summed(x: Tensor) -> Tensor:
    return all_reduce(x, "tp", dst=I)


def test_a_trace_of_processes_has_collectives_by_name_and_line(gloo: Gloo) -> None:
    line = inspect.getsourcelines(summed)[1] + 1
    for names in gloo(2).run(profiled):
        assert f"all_reduce('tp', Partial -> I) at test_estimate.py:{line}" in names


def test_a_report_says_time_memory_and_messages() -> None:
    mesh = make_mesh((2,), ("tp",), kind="abstract")
    f = shard_map(
        lambda x: all_reduce(x.sum(), "tp", dst=I), mesh=mesh, in_specs=P("tp"), out_specs=P()
    )
    hold_own(str(estimate(f, ShapeDtype((200,)), hardware=UNIT)))


def test_a_body_that_does_something_else_than_when_it_was_checked_is_an_error() -> None:
    mesh = make_mesh((2,), ("tp",), kind="abstract")
    calls = iter((1, 2))

    def body(x: Tensor) -> Tensor:
        total = all_reduce(x.sum(), "tp", dst=I)
        return all_reduce(x.sum(), "tp", dst=I) if next(calls) > 1 else total

    f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P())
    with pytest.raises(ShardTypeError) as error:
        estimate(f, ShapeDtype((2,)), hardware=UNIT)
    line = inspect.getsourcelines(body)[1] + 2
    assert str(error.value) == (
        "body: the body does not do what it did when it was checked just before:\n"
        "  this run: all_reduce('tp', Partial -> I) of float32[] at "
        f"test_estimate.py:{line}\n"
        "  the checked program: the end\n"
        "It must do the same whenever it is called with the same arguments. Pass what it depends "
        "on as an argument."
    )


def test_a_function_that_is_not_mapped_and_a_value_that_is_asked_for_are_errors() -> None:
    with told(TransformError, 2):
        estimate(len, torch.ones(1), hardware=UNIT)
    mesh = make_mesh((2,), ("tp",), kind="abstract")
    f = shard_map(
        lambda x: x if x.sum() > 0 else -x, mesh=mesh, in_specs=P(invariant="tp"), out_specs=P()
    )
    with told(TransformError):
        estimate(f, ShapeDtype((2,)), hardware=UNIT)


def test_the_page_has_the_lanes_the_memory_and_the_cost_of_each_line() -> None:
    mesh = make_mesh((2,), ("tp",), kind="abstract")

    def body(x: Tensor) -> Tensor:
        return all_reduce(x @ x.mT, "tp", dst=I)

    f = shard_map(body, mesh=mesh, in_specs=P(None, "tp"), out_specs=P())
    found = estimate(f, ShapeDtype((10, 20), requires_grad=True), hardware=UNIT)
    document = found.page().document()
    assert 'class="compute"' in document
    assert 'class="messages"' in document
    line = inspect.getsourcelines(body)[1] + 1
    (entries,) = [each for at, each in found.page().entries.items() if at[1] == line]
    assert [(entry.text, entry.kind, entry.more) for entry in entries] == [
        ("4 s of 1 operator", "value", "2e+03 FLOP"),
        ("9.2 s of 3 operators, backward", "value", "4e+03 FLOP"),
        ("4 s of 1 message", "collective", "sends 400 B"),
        ("Here most memory is alive.", "value", ""),
    ]


def test_what_explain_says_gets_time_and_memory_of_each_operation() -> None:
    mesh = make_mesh((2,), ("tp",), kind="abstract")
    f = shard_map(
        lambda x: all_reduce((x @ x.mT).sum(), "tp", dst=I),
        mesh=mesh, in_specs=P(None, "tp"), out_specs=P(),
    )  # fmt: skip
    x = ShapeDtype((10, 20), requires_grad=True)
    found = estimate(f, x, hardware=UNIT)
    shown = found.beside(explain(f, x))
    rows = {(row.operation, row.is_backward): row for row in shown.rows}
    assert (rows["mm", False].seconds, rows["mm", False].allocated) == (4.0, 400)
    assert rows["t", True].seconds is None
    assert rows["all_reduce('tp', Partial -> I)", False].seconds == pytest.approx(0.04)
    timed = [row.seconds * row.times for row in shown.rows if row.seconds is not None]
    assert sum(timed) == pytest.approx(found.seconds)
    assert "sends 4 B, takes 40 ms, allocates 4 B" in str(shown)
    assert shown.to_json()["paths"][0]["rows"][-1]["allocated"] == 400


def test_a_parallelized_module_is_estimated_as_the_program_that_it_runs() -> None:
    mesh = make_mesh((4,), ("tp",), kind="abstract")
    mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    parallelize(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = ShapeDtype((16, 8), requires_grad=True)
    found = estimate(mlp, x, hardware=UNIT)
    assert found.sent == explain(mlp, x).bytes_sent
    # Each rank has a quarter of the features; the backward computes two products for each.
    assert found.flops == 3 * 2 * (2 * 16 * 8 * 8)
    with told(TransformError):
        estimate(nn.Sequential(nn.GELU()), x, hardware=UNIT)
