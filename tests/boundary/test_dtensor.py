"""DTensors that enter and leave a shard_mapped function."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from shardmap_torch import (
    I,
    Mesh,
    MeshError,
    P,
    ShardTypeError,
    SpecError,
    TransformError,
    all_reduce,
    convert,
    from_local,
    make_mesh,
)
from shardmap_torch import shard_map as checked
from tests.programs.support.everywhere import run_on, same
from tests.programs.support.everywhere import unchecked as shard_map
from tests.programs.support.harness import random
from tests.support.pool import Gloo

pytestmark = pytest.mark.slow

GRID: dict[str, Any] = {"shape": (2, 2), "names": ("dp", "tp")}


def place(mesh: Mesh, x: Tensor, *placements: Placement) -> DTensor:
    """Without communication: every process holds `x`."""
    assert mesh.device_mesh is not None
    return distribute_tensor(x, mesh.device_mesh, placements, src_data_rank=None)


def identity(mesh: Mesh, spec: P, out: P | None = None) -> Any:
    return shard_map(lambda x: x * 1, mesh=mesh, in_specs=spec, out_specs=out or spec)


LAYOUTS: list[tuple[P, tuple[Placement, ...]]] = [
    (P("dp", "tp"), (Shard(0), Shard(1))),
    (P(None, "dp", invariant="tp"), (Shard(1), Replicate())),
    (P(("dp", "tp")), (Shard(0), Shard(0))),
    (P(invariant={"dp", "tp"}), (Replicate(), Replicate())),
]


def under_functional_grad(mesh: Mesh) -> None:
    x = random((4, 8), 0)
    for _, given in LAYOUTS:
        for spec, _ in LAYOUTS:
            invariant = {"dp", "tp"} - set(spec.mentioned)
            reduced = shard_map(
                lambda x, axes=spec.mentioned: (
                    all_reduce((x**3).sum(), axes, dst=I) if axes else (x**3).sum()
                ),
                mesh=mesh,
                in_specs=P(*spec.entries, invariant=invariant),
                out_specs=P(),
            )
            gradient = torch.func.grad(reduced)(place(mesh, x, *given))
            assert isinstance(gradient, DTensor)
            assert gradient.placements == given
            same(gradient, 3 * x**2)


def test_a_dtensor_under_an_outer_transform(gloo: Gloo) -> None:
    run_on("gloo", under_functional_grad, gloo, **GRID)


def uneven(mesh: Mesh) -> None:
    x = random((5, 3), 0)
    leaf = place(mesh, x, Shard(0)).detach().requires_grad_()
    y = shard_map(lambda x: x * 2, mesh=mesh, in_specs=P(invariant="tp"), out_specs=P())(leaf)
    same(y, 2 * x)
    y.sum().backward()
    assert isinstance(leaf.grad, DTensor)
    same(leaf.grad, torch.full_like(x, 2))
    with pytest.raises(SpecError) as caught:
        identity(mesh, P("tp"))(leaf)
    assert str(caught.value) == (
        "<lambda>: the arguments do not match in_specs on the process_group mesh (tp=2):\n"
        "  x: dim 0 has size 5, which does not divide over 'tp' = 2 ranks (5 = 2*2 + 1)\n"
        "Fix: drop the last rows of a batch (drop_last=True of a DataLoader), or pad them; of "
        "another dim leave the axis out of its spec, or take a mesh whose axis divides it."
    )


def test_an_uneven_dtensor_enters_whole_or_not_at_all(gloo: Gloo) -> None:
    run_on("gloo", uneven, gloo)


def partial(mesh: Mesh) -> None:
    assert mesh.device_mesh is not None
    own = random((2, 3), mesh.device_mesh.get_rank())
    total = random((2, 3), 0) + random((2, 3), 1)
    x = DTensor.from_local(own, mesh.device_mesh, [Partial()]).requires_grad_()
    reduced = shard_map(
        lambda x: all_reduce(x, "tp", dst=I), mesh=mesh, in_specs=P(partial="tp"), out_specs=P()
    )
    y = reduced(x)
    same(y, total)
    (y * total).sum().backward()
    same(x.grad, total)  # the cotangent of every addend
    same(identity(mesh, P(invariant="tp"))(x), total)
    kept = identity(mesh, P(partial="tp"))(x)
    assert isinstance(kept, DTensor)
    assert kept.placements == (Partial(),)
    same(kept, total)
    same(reduced(total), total)  # a plain tensor is the value, given to the first rank


def test_a_partial_dtensor_keeps_the_addends_of_all_ranks(gloo: Gloo) -> None:
    run_on("gloo", partial, gloo)


def outputs(mesh: Mesh) -> None:
    x = random((4, 6), 0).requires_grad_()
    spec = P("tp")
    summed = shard_map(lambda x: x.sum(0), mesh=mesh, in_specs=spec, out_specs=P(partial="tp"))
    y = summed(x)
    assert isinstance(y, DTensor)
    assert y.placements == (Partial(),)
    same(y, x.sum(0))
    (y.full_tensor() ** 2).sum().backward()
    same(x.grad, torch.func.grad(lambda x: (x.sum(0) ** 2).sum())(x.detach()))

    def replicated(x: Tensor) -> Tensor:
        return convert(all_reduce(x.sum(0), "tp", dst=I), "tp", src=I, dst="R")

    z = shard_map(replicated, mesh=mesh, in_specs=spec, out_specs=P(replicate="tp"))(x.detach())
    assert not isinstance(z, DTensor)
    same(z, x.sum(0))


def test_a_result_is_a_dtensor_unless_it_is_whole(gloo: Gloo) -> None:
    run_on("gloo", outputs, gloo)


def reordered(mesh: Mesh) -> None:
    x = torch.arange(8.0).double()
    spec = P(("tp", "dp"))
    y = identity(mesh, spec)(x)
    assert isinstance(y, DTensor)
    same(y, x)
    same(identity(mesh, spec)(y), x)
    in_order = place(mesh, x, Shard(0), Shard(0))
    for entering, other in [(y, P(("dp", "tp"))), (in_order, spec)]:
        same(identity(mesh, other)(entering), x)


def test_a_tuple_out_of_mesh_order_is_kept_by_the_dtensor(gloo: Gloo) -> None:
    run_on("gloo", reordered, gloo, **GRID)


def shapes(mesh: Mesh) -> None:
    """The global shape and strides that torch is told are those of the whole tensor."""
    for shape in [(4, 6), (6, 4), (0, 4), (4, 0)]:
        for spec in (P("tp"), P(None, "tp")):
            for x in (torch.ones(shape), torch.ones(shape[::-1]).t()):
                y = identity(mesh, spec)(x)
                assert y.shape == shape
                assert y.full_tensor().shape == shape
                if y.numel():
                    assert y.stride() == x.stride()


def test_the_dtensor_knows_its_global_shape_and_strides(gloo: Gloo) -> None:
    run_on("gloo", shapes, gloo)


def waiting(mesh: Mesh) -> None:
    seen: list[type] = []

    def look(x: Tensor) -> Tensor:
        seen.append(type(x))
        return x * 1

    x = random((4, 3), 0)
    late = place(mesh, x, Shard(0)).redistribute(placements=[Replicate()], async_op=True)
    same(shard_map(look, mesh=mesh, in_specs=P(), out_specs=P())(late), x)
    assert seen == [Tensor]


def test_a_dtensor_that_is_still_received_enters_as_a_plain_tensor(gloo: Gloo) -> None:
    run_on("gloo", waiting, gloo)


def written(mesh: Mesh) -> None:
    x = place(mesh, random((4, 3), 0), Shard(0))
    with pytest.raises(ShardTypeError) as caught:
        shard_map(lambda x: x.add_(1), mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(x)
    assert str(caught.value) == (
        "<lambda>: the body wrote into its inputs, which are read-only; clone them:\n  x"
    )


def test_writing_into_a_dtensor_is_an_error(gloo: Gloo) -> None:
    run_on("gloo", written, gloo)


def foreign(mesh: Mesh) -> None:
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    x = distribute_tensor(random((4, 3), 0), other, [Replicate(), Replicate()], src_data_rank=None)
    with pytest.raises(MeshError) as caught:
        identity(mesh, P("tp"))(x)
    assert str(caught.value) == (
        f"A DTensor on {other} cannot enter a function on the process_group mesh (tp=2). Make the "
        "mesh of that DeviceMesh, make_mesh(device_mesh), or pass x.full_tensor()."
    )
    simulated = make_mesh((2,), ("tp",), kind="simulated")
    f = checked(lambda x: x * 1, mesh=simulated, in_specs=P("tp"), out_specs=P("tp"))
    compiled = torch.compile(f, backend="eager", fullgraph=True)
    for refusing in (identity(simulated, P("tp")), f, compiled):
        with pytest.raises(SpecError) as refused:
            refusing(x)
        assert str(refused.value).startswith(
            "<lambda>: the arguments do not match in_specs on the simulated mesh (tp=2):\n"
            "  x: is a DTensor; a simulated mesh takes plain tensors"
        )


def test_a_dtensor_of_another_mesh_is_refused(gloo: Gloo) -> None:
    run_on("gloo", foreign, gloo)


def pushed_forward(mesh: Mesh) -> None:
    x, t = random((4, 4), 0), random((4, 4), 1)
    whole = shard_map(
        lambda x: all_reduce(x.sin(), "tp", dst=I), mesh=mesh, in_specs=P("tp"), out_specs=P()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch loads what it deprecates
        pushed = torch.func.jvp(whole, (x,), (t,))[1]
    same(pushed, (t * x.cos()).reshape(2, 2, 4).sum(0))
    for out in (P("tp"), P(partial={"tp"})):
        f = shard_map(lambda x: x.sin(), mesh=mesh, in_specs=P("tp"), out_specs=out)
        with pytest.raises(TransformError) as caught:
            torch.func.jvp(f, (x,), (t,))
        assert str(caught.value) == (
            f"torch.func.jvp from outside cannot return a DTensor, here by {out!r}: torch has no "
            "forward mode for DTensors. Return a value that is equal on all ranks, call "
            "torch.func.jvp in the body, or use torch.func.jacfwd."
        )


def test_a_tangent_of_a_dtensor_is_refused_and_of_a_whole_result_is_right(gloo: Gloo) -> None:
    run_on("gloo", pushed_forward, gloo, shape=(2,), names=("tp",))


def rejects_local_values(mesh: Mesh) -> None:
    own = torch.ones(2)
    tree = {"axis": own, "dims": own, "placed": from_local(own, mesh, P("tp"))}
    with pytest.raises(SpecError) as caught:
        from_local(tree, mesh, {"axis": P("dp"), "dims": P(None, "tp"), "placed": P("tp")})
    assert str(caught.value) == (
        "from_local: the values do not match their specs on the process_group mesh (tp=2):\n"
        "  tree['axis']: P('dp') names 'dp', but the axes here are tp\n"
        "  tree['dims']: P(None, 'tp') has 2 entries, but the value has 1 dim\n"
        "  tree['placed']: is a DTensor already; from_local takes local tensors"
    )


def test_local_values_that_do_not_match_their_specs_are_listed(gloo: Gloo) -> None:
    run_on("gloo", rejects_local_values, gloo)
