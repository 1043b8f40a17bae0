"""Second derivatives of accepted programs on processes, against those that the types promise.

The batched strategy is the measure, as in `test_random_programs`: it adds what a value that all
ranks share gets from each. Ranks as threads have no second order.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Partial as Addends

from shardmap_torch import P, device_put, make_mesh, shard_map
from shardmap_torch.mesh import Mesh
from tests.checker.programs import AXES, IN_SPECS, Program, generate, inputs
from tests.pool import Gloo
from tests.programs.everywhere import same
from tests.programs.harness import whole, worker_mesh

pytestmark = pytest.mark.slow

SIZES = [(2, 1), (1, 2)]


def second_order(program: Program, mesh: Mesh, seed: int, placed: bool) -> list[Tensor]:
    """Differentiates a combination of the gradients by the inputs, and by the cotangents."""
    xs: Sequence[Tensor] = inputs(mesh.axis_sizes, seed)
    if placed:
        xs = [x.detach().requires_grad_() for x in device_put(tuple(xs), mesh, IN_SPECS)]
    ys = program.mapped(mesh)(*xs)
    kept = [(y, spec) for y, spec in zip(ys, program.specs, strict=True) if y.requires_grad]
    cotangents = [_cotangent(y.shape, spec, mesh, k) for k, (y, spec) in enumerate(kept)]
    gradients = torch.autograd.grad(
        [y for y, _ in kept], xs, cotangents, create_graph=True, allow_unused=True
    )
    weighted = [
        (_global(g).square() * _numbers(g.shape, 10 + k)).sum()
        for k, g in enumerate(gradients)
        if g is not None
    ]
    found = torch.autograd.grad(
        torch.stack(weighted).sum(), [*xs, *cotangents], allow_unused=True, materialize_grads=True
    )
    return [whole(g) for g in found]


def _global(g: Tensor) -> Tensor:
    return g.full_tensor() if isinstance(g, DTensor) else g


def _cotangent(shape: Sequence[int], spec: P, mesh: Mesh, phase: int) -> Tensor:
    """Lies as its output; that of a partial output is whole on every rank."""
    lies = P(*spec.entries)
    place = shard_map(lambda x: x, mesh=mesh, in_specs=lies, out_specs=lies, check=False)
    cotangent: Tensor = place(_numbers(shape, phase)).detach()
    return cotangent.requires_grad_()


def _numbers(shape: Sequence[int], phase: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.cos(torch.arange(count, dtype=torch.float64) + phase).reshape(shape)


def in_worker(program: Program, sizes: tuple[int, ...], seed: int) -> list[list[Tensor]]:
    mesh = worker_mesh(sizes, AXES)
    return [second_order(program, mesh, seed, placed) for placed in (False, True)]


def check(seed: int, num_steps: int, gloo: Gloo) -> None:
    sizes = SIZES[seed % len(SIZES)]
    program, _ = generate(seed, num_steps, sizes)
    mesh = make_mesh(sizes, AXES, kind="simulated", simulate="vmap")
    program.functional = True  # an in-place write of a varying value is nothing for vmap
    expected = second_order(program, mesh, seed, placed=False)
    program.functional = False
    for found in gloo(2).run(in_worker, program, sizes, seed):
        for way in found:
            torch.testing.assert_close(way, expected, msg=lambda text: f"{program}\n{text}")


@pytest.mark.parametrize("seed", range(20))
def test_second_derivatives_of_an_accepted_program_are_right_on_processes(
    seed: int, gloo: Gloo
) -> None:
    check(seed, 10, gloo)


def partial_sums() -> None:
    mesh = worker_mesh((2,), ("i",))
    f = shard_map(
        lambda x: x * 3.0, mesh=mesh, in_specs=P(partial={"i"}), out_specs=P(partial={"i"})
    )
    addends = torch.full((2,), 0.5 + mesh.rank, dtype=torch.float64)  # their sum is 2
    x = DTensor.from_local(addends, mesh.device_mesh, [Addends()]).requires_grad_()
    y = f(x).redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    assert isinstance(first, DTensor)
    assert first.placements == (Replicate(),)
    same(first, torch.full((2,), 3 * 3 * 6.0**2, dtype=torch.float64))
    (second,) = torch.autograd.grad(first.to_local(grad_placements=[Replicate()]).sum(), x)
    same(second, torch.full((2,), 3 * 3 * 2 * 6.0 * 3, dtype=torch.float64))


def test_second_derivatives_cross_the_boundary_of_partial_sums(gloo: Gloo) -> None:
    gloo(2).run(partial_sums)
