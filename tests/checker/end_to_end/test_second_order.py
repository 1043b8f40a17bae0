"""Second derivatives of accepted programs on processes, against one graph of all ranks."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Partial as Addends

from shardmap_torch import P, device_put, shard_map
from shardmap_torch.mesh import Mesh
from tests.checker.support.machines import Notes
from tests.checker.support.programs import Program, abstract, close, grown, judged, on_one_device
from tests.programs.support.everywhere import same
from tests.programs.support.harness import global_value, worker_mesh
from tests.support.fuzzing import sized
from tests.support.pool import Gloo

SIZES = [(2,), (2, 1)]


def second_order(
    ys: Sequence[Tensor],
    leaves: Sequence[Tensor],
    place: Callable[[Tensor, int], Tensor],
    smooth: Sequence[int],
) -> list[Tensor]:
    """Differentiates a combination of the gradients by the inputs, and by the cotangents."""
    kept = [(k, ys[k]) for k in smooth]
    cotangents = [place(_numbers(y.shape, k), k).detach().requires_grad_() for k, y in kept]
    gradients = torch.autograd.grad(
        [y for _, y in kept], leaves, cotangents, create_graph=True, allow_unused=True
    )
    weighted = [
        (_global(g).square() * _numbers(g.shape, 10 + k)).sum()
        for k, g in enumerate(gradients)
        if g is not None
    ]
    if not weighted:
        return []
    found = torch.autograd.grad(
        torch.stack(weighted).sum(),
        [*leaves, *cotangents],
        allow_unused=True,
        materialize_grads=True,
    )
    return [global_value(g) for g in found]


def _global(g: Tensor) -> Tensor:
    return g.full_tensor() if isinstance(g, DTensor) else g


def _numbers(shape: Sequence[int], phase: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.cos(torch.arange(count, dtype=torch.float64) + phase).reshape(shape)


def in_worker(
    program: Program, sizes: tuple[int, ...], smooth: Sequence[int]
) -> list[list[Tensor]]:
    mesh = worker_mesh(sizes, program.axes)
    return [_on_mesh(program, mesh, placed, smooth) for placed in (False, True)]


def _on_mesh(program: Program, mesh: Mesh, placed: bool, smooth: Sequence[int]) -> list[Tensor]:
    xs, closures = program.inputs(mesh), program.closures()
    if placed:
        lie = [P(*spec.entries) for spec in program.in_specs]
        xs = [
            x if spec.partial else device_put(x.detach(), mesh, own).requires_grad_(x.requires_grad)
            for x, spec, own in zip(xs, program.in_specs, lie, strict=True)
        ]

    def place(cotangent: Tensor, number: int) -> Tensor:
        """Lies as its output; that of a partial output is whole on every rank."""
        lies = P(*program.out_specs[number].entries)
        identity = shard_map(lambda x: x, mesh=mesh, in_specs=lies, out_specs=lies, check=False)
        found: Tensor = identity(cotangent)
        return found

    ys = program.mapped(mesh, Notes(), closures)(*xs)
    return second_order(ys, [x for x in xs if x.requires_grad], place, smooth)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(sized(4, 40)))
def test_second_derivatives_of_an_accepted_program_are_right_on_processes(
    seed: int, gloo: Gloo
) -> None:
    sizes = SIZES[seed % len(SIZES)]
    program = grown(random.Random(seed), sizes, 8).program
    notes, _ = judged(program, sizes)
    assert notes is not None
    mesh = abstract(sizes)
    xs = program.inputs(mesh)
    ys, _ = on_one_device(program, mesh, notes, xs, program.closures())
    # Nothing depends on what a shift over one rank leaves, though autograd does not know it.
    smooth = [number for number, y in enumerate(ys) if y.requires_grad]
    expected = second_order(ys, [x for x in xs if x.requires_grad], lambda x, _: x, smooth)
    for found in gloo(2).run(in_worker, program, sizes, smooth):
        for way in found:
            assert all(close(x, y) for x, y in zip(way, expected, strict=True)), program


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
