"""The kernels on whole matrices: their formulas on simulated ranks, against the composition."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, P, Partial, R, V, make_mesh, shard_map
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.kernels import algorithms, engine
from shardmap_torch.kernels.autograd import Unfused
from shardmap_torch.kernels.planner import Options
from shardmap_torch.kernels.typed import typed_calls


@pytest.fixture(scope="module")
def ranks() -> Any:
    return make_mesh((3,), ("tp",), kind="simulated", simulate="ranks")


CASES: list[Any] = [
    pytest.param(
        Collective("all_gather", V, R, ("tp",), dim=dim),
        [(2, 3, 4), *[(12 if dim == 2 else 4, m) for m in (2, 5)], (2,), (5,)],
        id=f"gather dim {dim}",
    )
    for dim in (0, 1, 2)
]
CASES += [
    pytest.param(
        Collective("reduce_scatter", Partial, V, ("tp",), dim=dim),
        [(3, 6, 4), (4, 3)],
        id=f"scatter dim {dim}",
    )
    for dim in (0, 1, 2)
]
CASES += [
    pytest.param(
        Collective("all_reduce", Partial, dst, ("tp",)), [(2, 3, 4), (4, 5)], id=f"reduce to {dst}"
    )
    for dst in (R, I)
]


def results(runner: Any, name: str, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if name != "all_gather":
        return (runner.reduce(*operands),)
    x, w1, w2, b1, b2 = operands
    found: tuple[Tensor, ...] = runner.gather(x, [w1, w2], [b1, b2])
    return found


def differences(
    mesh: Any, collective: Collective, shapes: Any, save: bool, engine: str = "overlapped"
) -> Tensor:
    """Returns, by rank, the largest difference from a result or gradient of the composition."""

    def body(*operands: Tensor) -> Tensor:
        scope = current_scope()
        assert scope is not None
        options = Options(save_gathered=save)
        kernels = typed_calls(scope.backend, collective, options, fused=True)
        both = []
        for runner in (kernels[engine], Unfused(scope.backend, collective)):
            leaves = [each[0].detach().requires_grad_() for each in operands]
            outs = results(runner, collective.name, leaves)
            own = leaves[0].sum().detach()  # Different cotangents on each rank, but for an I.
            weight = 1.0 if collective.dst is I else own
            grads = torch.autograd.grad([(out.square() * weight).sum() for out in outs], leaves)
            both.append([*outs, *grads])
        found = [(a - b).abs().max() for a, b in zip(*both, strict=True)]
        return torch.stack(found).max().detach().reshape(1)

    mapped = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check=False)
    generator = torch.Generator().manual_seed(0)
    return mapped(
        *(torch.randn(3, *shape, dtype=torch.float64, generator=generator) for shape in shapes)
    )


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize(("collective", "shapes"), CASES)
def test_values_and_gradients_of_each_rank_equal_those_of_the_composition(
    ranks: Any, collective: Collective, shapes: Any, save: bool
) -> None:
    assert differences(ranks, collective, shapes, save).max() < 1e-10


@pytest.mark.parametrize(
    ("collective", "shapes"),
    [case for case in CASES if case.values[0].name != "all_reduce" and case.values[0].dim < 2],
)
def test_the_engine_of_fused_operators_has_the_numbers_of_the_composition_too(
    ranks: Any, collective: Collective, shapes: Any
) -> None:
    assert differences(ranks, collective, shapes, True, "on symmetric memory").max() < 1e-10


def test_a_wrong_factor_which_types_do_not_see_is_seen_in_numbers(ranks: Any) -> None:
    collective, shapes = CASES[0].values

    def doubles(*args: Any) -> Any:
        dx, dws = yield from algorithms.gather_backward(*args)
        return 2 * dx, dws

    with mock.patch.object(engine, "gather_backward", doubles):
        assert differences(ranks, collective, shapes, True).min() > 0.1
