"""Compares a body under check="global" with the same body where every axis has one rank."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch import Mesh, P, ShardTypeError, check_program, make_mesh, shard_map
from tests.checker.support.outcomes import outcome
from tests.support.golden import told

AXES: Final = ("a", "b")
RANKS: Final = make_mesh((2, 2), AXES, kind="simulated", simulate="ranks")
ONE: Final = make_mesh((1, 1), AXES, kind="simulated", simulate="ranks")


def numbers(*shape: int) -> Tensor:
    """Makes numbers that are none of each other's."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def assert_is_one_device(
    body: Callable[..., Any],
    args: Sequence[Tensor],
    in_specs: Any,
    out_specs: P,
    batched: Mesh | None = None,
) -> None:
    """Requires that ranks give the value and the gradients that one device gives.

    The program that passes on ranks is right on a `batched` mesh too.
    """
    alone = outcome_on(ONE, body, args, in_specs, out_specs)
    for mesh, check in ((RANKS, "global"), (batched, True)):
        found = alone if mesh is None else outcome_on(mesh, body, args, in_specs, out_specs, check)
        for actual, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(actual, expected)


def assert_is_refused(
    body: Callable[..., Any], args: Sequence[Tensor], in_specs: Any, out_specs: P, part: int = 1
) -> None:
    """Requires that global strictness refuses the body, with the text kept for the running test.

    With gradients, if the floating arguments are leaves of none.
    """
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in args]
    mapped = shard_map(body, mesh=RANKS, in_specs=in_specs, out_specs=out_specs, check="global")
    with told(ShardTypeError, part):
        check_program(mapped, *leaves)


def outcome_on(
    mesh: Mesh,
    body: Callable[..., Any],
    args: Sequence[Tensor],
    in_specs: Any,
    out_specs: P,
    check: Any = "global",
) -> list[Tensor]:
    """Returns the value and the gradients of all arguments."""
    mapped = shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check)
    return outcome(mapped, args)
