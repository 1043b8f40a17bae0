"""The programs of people's days, recorded: which cannot be, and why, in errors."""

from collections.abc import Collection, Mapping
from typing import Any, Final

import pytest

from shardmap_torch import Mesh, P, TransformError
from tests.checker.support import daily_attention, daily_losses, daily_models, daily_steps
from tests.checker.support.daily import Program
from tests.programs.support.bodies import PROGRAMS as BODIES
from tests.programs.support.harness import worker_mesh
from tests.run.recorded.support.replays import compare

PROGRAMS: Final[Mapping[str, Program]] = {
    **daily_models.PROGRAMS,
    **daily_attention.PROGRAMS,
    **daily_losses.PROGRAMS,
    **daily_steps.PROGRAMS,
}
RANK_BY_RANK: Final = ("experts_capacity", "gp_autograd")
"""Programs that simulated ranks run one by one, and so by themselves."""
REFUSED: Final = {
    "gp_autograd": "no graph for autograd",
    "lstm_module": "it changes what its code refers to",
}


def try_daily(mesh: Mesh, names: Collection[str]) -> None:
    """Compares the programs of these names with plain calls, or expects their refusal."""
    for name in names:
        program = PROGRAMS[name]
        specs: Any = {"in_specs": program.in_specs, "out_specs": program.out_specs}
        if mesh.kind == "simulated" and name in RANK_BY_RANK:
            compare(program.body, mesh, program.args, replays=(0,), **specs)
        elif name in REFUSED:
            with pytest.raises(TransformError, match=REFUSED[name]):
                compare(program.body, mesh, program.args, **specs)
        else:
            compare(program.body, mesh, program.args, **specs)


def try_daily_on_processes(shape: tuple[int, int], names: Collection[str]) -> None:
    """For `Pool.run`."""
    try_daily(worker_mesh(shape, ("dp", "tp")), names)


def try_body(name: str, mesh: Mesh) -> None:
    """Compares a program of collectives with its plain calls, all axes typed by the checker."""
    program = BODIES[name]
    in_specs = tuple(P(*spec.entries, partial=spec.partial) for spec in program.in_specs)
    args = tuple(program.inputs())
    compare(program.body, mesh, args, in_specs=in_specs, out_specs=program.out_specs)


def try_bodies_on_processes(size: int) -> None:
    """For `Pool.run`."""
    for name, program in BODIES.items():
        if size in program.meshes:
            try_body(name, worker_mesh(program.meshes[size], program.axis_names))
