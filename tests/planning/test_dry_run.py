"""A run without data counts the memory, FLOPs and bytes of a run on processes."""

import subprocess
import sys
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

from examples.gpt import model
from examples.gpt.model import Config
from examples.gpt.optim import make_optimizer
from examples.gpt.parallel import Parallel
from examples.gpt.step import sharded_step
from shardmap_torch import Mesh, P, ShapeDtype, device_put, make_mesh, shard_map
from shardmap_torch.backends.traffic import counting_bytes
from shardmap_torch.mesh.mesh import Kind
from shardmap_torch.planning import dry_run as dry_run_module
from shardmap_torch.planning.dry_run import DryRun, Tape, checked, dry_run, run_dry
from tests.support.fuzzing import sampled
from tests.support.pool import Gloo

CHOICES = {
    "dp+tp": (2, 2),
    "dp+tp+sp": (2, 2),
    "fsdp+tp": (2, 2),
    "zero": (4, 1),
    "dp+cp": (2, 2, 1),
    "pp+tp": (1, 2, 2),
    "fsdp+ep": (4, 1),
}


def step_of(mesh: Mesh, choice: str) -> tuple[Any, tuple[Any, ...], Any]:
    """Returns a step of the example, its arguments on one device, and their specs."""
    config = Config(length=32, width=64, hidden=192, layers=2, parallel=Parallel.of(choice))
    optimizer, specs = make_optimizer(config, 1000, 20), model.specs(config)
    params = model.init(config)
    torch.manual_seed(0)
    batch = torch.randint(config.vocabulary, (8, config.length + 1))
    args = params, optimizer.init(params), batch
    return sharded_step(mesh, config, optimizer), args, (specs, optimizer.specs(specs), P("dp"))


def mesh_of(choice: str, kind: Kind) -> Mesh:
    parallel, sizes = Parallel.of(choice), CHOICES[choice]
    views = parallel.views(sizes, Config.experts)
    return make_mesh(sizes, parallel.mesh_axes, kind=kind, views=views)


def measured(choice: str) -> tuple[int, int, int, int]:
    """Runs a step; returns its largest memory, that of its arguments, FLOPs, and bytes sent."""
    mesh = mesh_of(choice, "process_group")
    step, args, specs = step_of(mesh, choice)
    args = device_put(args, mesh, specs)
    step(*args)
    run = DryRun("step", mesh)
    leaves: list[Any] = optree.tree_leaves(args)  # type: ignore[arg-type]
    held = [getattr(x, "_local_tensor", x) for x in leaves]
    with Tape(run) as tape:
        tape.hold(held)
        step(*args)
    with counting_bytes() as sent:
        step(*args)
    flops = sum(each.flops for each in run.steps)
    return max(run.live()), run.live()[0], flops, sum(sent.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("choice", sampled(CHOICES, "fsdp+tp", "zero", "dp+cp", "pp+tp", "fsdp+ep"))
def test_memory_flops_and_bytes_are_those_of_a_run_on_processes(choice: str, gloo: Gloo) -> None:
    peak, arguments, flops, sent = gloo(4).run(measured, choice)[0]
    step, args, _ = step_of(mesh_of(choice, "abstract"), choice)
    found = dry_run(step, args, {})
    assert found.live()[0] == arguments
    assert sum(each.flops for each in found.steps) == flops
    assert sum(each.sent for each in found.steps) == sent
    # gloo copies what it gathers ahead of time, and what goes from one rank to another.
    assert max(found.live()) == pytest.approx(peak, rel=0.04)


@pytest.mark.sample(1)
@pytest.mark.parametrize("choice", CHOICES)
def test_operations_that_are_not_run_again_are_what_they_would_be(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, args, _ = step_of(mesh_of(choice, "abstract"), choice)
    found = dry_run(step, args, {})
    monkeypatch.setattr(dry_run_module, "look_up", lambda *_: None)
    again = dry_run(step, args, {})
    assert found.steps == again.steps
    assert found.live() == again.live()


FIRST = """
from shardmap_torch.planning.dry_run import checked, run_dry
from tests.planning.test_dry_run import mesh_of, step_of
step, args, _ = step_of(mesh_of("fsdp+tp", "abstract"), "fsdp+tp")
call = checked(step, args, {}).call
first, second = run_dry(call).live(), run_dry(call).live()
assert first == second, (max(first), max(second))
"""


@pytest.mark.fuzz  # 4 s, most of it for a process of its own
def test_the_first_run_of_a_process_frees_what_later_ones_free() -> None:
    subprocess.run([sys.executable, "-c", FIRST], check=True)


PLAIN: dict[str, Any] = {
    "op": torch.add, "second": 1, "cut": 0, "length": 2, "dim": 0, "scale": 2.0, "dtype": None
}  # fmt: skip


def program(ranks: int, **changes: Any) -> int:
    mesh, how = make_mesh((ranks,), ("dp",), kind="abstract"), PLAIN | changes

    def body(x: Tensor, y: Tensor) -> Tensor:
        z = how["op"](x, (x, y)[how["second"]]).narrow(how["cut"], 0, how["length"])
        total: Tensor = z.sum(how["dim"], dtype=how["dtype"]) * how["scale"]
        return total

    mapped = shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    call = checked(mapped, [ShapeDtype((64, 8)), ShapeDtype((64, 8))], {}).call
    return run_dry(call, compares=True).program


def test_programs_are_equal_up_to_sizes() -> None:
    plain = program(2)
    assert program(4, length=3, scale=3.0) == plain
    others = {"op": torch.sub, "second": 0, "cut": 1, "dim": 1, "dtype": torch.float64}
    for name, value in others.items():
        assert program(2, **{name: value}) != plain, name
