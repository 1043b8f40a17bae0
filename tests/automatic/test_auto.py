"""Global-view code gives what it gives on one device, and tells what moves."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from shardmap_torch import (
    I,
    Mesh,
    MeshError,
    P,
    ShapeDtype,
    ShardMapError,
    SpecError,
    all_reduce,
    auto,
    full,
    make_mesh,
    mark_sharding,
    shard_map,
)
from shardmap_torch.automatic.report import bytes_sent, shown
from tests.programs.support.everywhere import ON_EVERY_MESH, run_on
from tests.programs.support.harness import random
from tests.support.pool import Gloo

MESH, AXES = (2, 2), ("dp", "tp")
ABSTRACT = make_mesh((2, 4), AXES, kind="abstract")
WEIGHTS = {"w1": P(None, "tp"), "b1": P("tp"), "w2": P("tp"), "scale": P()}


def weights() -> dict[str, Tensor]:
    shapes = {"w1": (8, 16), "b1": (16,), "w2": (16, 8), "scale": (8,)}
    return {name: random(shape, i) for i, (name, shape) in enumerate(shapes.items())}


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """A loss as written for one device: layer norm, gelu, attention-like softmax, a mean."""
    h = functional.layer_norm(x, x.shape[-1:], params["scale"])
    y = functional.gelu(h @ params["w1"] + params["b1"]) @ params["w2"]
    scores = torch.softmax(y @ y.mT / math.sqrt(y.shape[-1]), -1)
    return (scores @ y + torch.ones(8, dtype=y.dtype)).square().mean()


def equals_one_device(mesh: Mesh) -> None:
    f = auto(loss, in_specs=(WEIGHTS, P("dp")), out_specs=P(), mesh=mesh)
    params, expected = weights(), weights()
    x = random((4, 6, 8), 9)
    for tree in (params, expected):
        for leaf in tree.values():
            leaf.requires_grad_()
    value, reference = f(params, x), loss(expected, x)
    torch.testing.assert_close(full(value), reference, rtol=1e-10, atol=1e-10)
    value.backward()
    reference.backward()
    for name, leaf in params.items():
        torch.testing.assert_close(full(leaf.grad), expected[name].grad, rtol=1e-10, atol=1e-10)


@ON_EVERY_MESH
def test_values_and_gradients_are_those_of_one_device(kind: Any, gloo: Gloo) -> None:
    run_on(kind, equals_one_device, gloo, MESH, AXES)


def lies_as_specified(mesh: Mesh) -> None:
    x = random((4, 4), 0)
    f = auto(lambda x: (x, {"y": x * 2, "n": 3}), in_specs=(P("dp"),), mesh=mesh,
             out_specs=(P(None, "tp"), {"y": P(), "n": None}))  # fmt: skip
    first, second = f(x)
    is_real = mesh.kind == "process_group"
    assert isinstance(first, DTensor) == is_real
    assert not isinstance(second["y"], DTensor)
    if isinstance(first, DTensor):
        assert first.placements == (Replicate(), Shard(1))
    assert full(first).equal(x)
    assert second["y"].equal(2 * x)
    assert second["n"] == 3


@ON_EVERY_MESH
def test_results_lie_by_their_specs(kind: Any, gloo: Gloo) -> None:
    run_on(kind, lies_as_specified, gloo, MESH, AXES)


def marks(mesh: Mesh) -> None:
    x = random((4, 4), 0).requires_grad_()
    for spec in (P("dp", "tp"), ("dp", None), (("dp", "tp"),), P()):
        marked = mark_sharding(mark_sharding(x, mesh, spec), mesh, P("tp"))
        assert isinstance(marked, DTensor) == (mesh.kind == "process_group")
        assert full(marked).equal(x)
        (grad,) = torch.autograd.grad(full(marked * marked).sum(), x)
        assert full(grad).equal(2 * x)


@ON_EVERY_MESH
def test_marks_change_layouts_and_no_values(kind: Any, gloo: Gloo) -> None:
    run_on(kind, marks, gloo, MESH, AXES)


def mixes(mesh: Mesh) -> None:
    """A function with explicit collectives in code whose communication is placed."""
    manual = shard_map(
        lambda h, w: all_reduce(h @ w, "tp", dst=I),
        mesh=mesh,
        in_specs=(P("dp", "tp"), P("tp")),
        out_specs=P("dp"),
    )
    specs = (P("dp"), P(None, "tp"), P("tp"))
    f = auto(
        lambda x, w1, w2: manual(torch.tanh(x @ w1), w2).square().sum(),
        in_specs=specs,
        out_specs=P(),
        mesh=mesh,
    )
    x, w1, w2 = random((4, 8), 0), random((8, 8), 1).requires_grad_(), random((8, 4), 2)
    expected = (torch.tanh(x @ w1) @ w2).square().sum()
    value = f(x, w1, w2)
    torch.testing.assert_close(full(value), expected, rtol=1e-10, atol=1e-10)
    found = [torch.autograd.grad(each, w1)[0] for each in (value, expected)]
    torch.testing.assert_close(full(found[0]), found[1], rtol=1e-10, atol=1e-10)


@ON_EVERY_MESH
def test_manual_functions_run_in_automatic_code(kind: Any, gloo: Gloo) -> None:
    run_on(kind, mixes, gloo, MESH, AXES)


def test_every_redistribution_is_told_by_line_and_bytes() -> None:
    def step(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = x @ w
        p = torch.softmax(h, -1)
        p = mark_sharding(p, ABSTRACT, ("dp", "tp"))
        return p @ v

    f = auto(step, in_specs=(P("dp"), P(None, "tp"), P("tp")), out_specs=P("dp"), mesh=ABSTRACT)
    w = torch.ones(8, 16, requires_grad=True)
    report = f.report(torch.ones(8, 8), w, ShapeDtype((16, 8)))
    lines = [line.strip() for line in str(report).splitlines()]
    assert [line.split("  # ")[0] for line in lines] == [
        "step on the abstract mesh (dp=2, tp=4), axes dp, tp:",
        "_softmax: float32[8, 16] (S(0), S(1)) -> (S(0), R), sends 192 B",
        "mark_sharding (asked for): float32[8, 16] (S(0), R) -> (S(0), S(1)), sends 0 B",
        "result: float32[8, 8] (S(0), P) -> (S(0), R), sends 192 B",
        "mark_sharding backward (asked for): float32[8, 16] (S(0), S(1)) -> (S(0), R), sends 192 B",
        "gradient: float32[8, 16] (P, R) -> (R, S(1)), sends 128 B",
        f"each rank sends {report.num_bytes} B",
    ]
    assert "test_auto.py" in lines[1]
    assert lines[1].endswith("p = torch.softmax(h, -1)")
    assert lines[4].endswith('p = mark_sharding(p, ABSTRACT, ("dp", "tp"))')
    assert report.num_bytes == 192 + 192 + 192 + 128
    assert [move.op for move in report.implicit] == ["_softmax", "result", "gradient"]


def test_what_fits_moves_nothing() -> None:
    f = auto(torch.mm, in_specs=(P("dp"), P(None, "tp")), out_specs=P("dp", "tp"), mesh=ABSTRACT)
    report = f.report(torch.ones(8, 8), torch.ones(8, 8))
    assert str(report).endswith("  nothing is redistributed\neach rank sends 0 B")


def test_fsdp_by_sharding_alone_gathers_weights_and_scatters_gradients() -> None:
    """Weights and batch over one axis: what FSDP does follows."""
    mesh = make_mesh((8,), ("fsdp",), kind="abstract")
    f = auto(
        lambda x, w: (x @ w).square().sum(),
        in_specs=(P("fsdp"), P("fsdp")),
        out_specs=P(),
        mesh=mesh,
    )
    report = f.report(torch.ones(4096, 16), torch.ones(16, 16, requires_grad=True))
    moves = [(move.op, shown(move.src), shown(move.dst)) for move in report.moves]
    assert moves == [
        ("mm", "S(0)", "R"),
        ("result", "P", "R"),
        ("mul", "R", "S(0)"),  # the cotangent of the sum, of which each rank takes its part
        ("gradient", "P", "S(0)"),
    ]


PLACEMENTS = st.sampled_from([Replicate(), Shard(0), Partial()])


@given(PLACEMENTS, PLACEMENTS, st.integers(2, 8))
def test_bytes_of_one_axis_are_those_of_the_ring(src: Any, dst: Any, n: int) -> None:
    global_bytes = 4 * 840  # a multiple of all sizes
    pair = (shown([src]), shown([dst]))
    expected = {
        ("S(0)", "R"): (n - 1) * global_bytes // n,
        ("P", "R"): 2 * ((n - 1) * global_bytes // n),
        ("P", "S(0)"): (n - 1) * global_bytes // n,
    }
    if pair not in (("S(0)", "P"),):
        found = bytes_sent([840], torch.float32, [src], [dst], [n])
        assert found == expected.get(pair, 0)


def raised(f: Callable[[], Any]) -> str:
    with pytest.raises(ShardMapError) as caught:
        f()
    return str(caught.value)


def test_what_cannot_run_says_so() -> None:
    f = auto(torch.neg, in_specs=(P("dp"),), out_specs=P(None, "tp"), mesh=ABSTRACT)
    with pytest.raises(MeshError) as caught:
        f(torch.ones(8))
    assert str(caught.value) == "neg: an abstract mesh has no data; use .report(...)."
    with pytest.raises(SpecError) as unfit:
        f.report(torch.ones(8))
    assert str(unfit.value) == (
        "neg: the specs do not match:\n  neg: P(None, 'tp') has 2 entries, shape (8,)"
    )


@torch.library.custom_op("automatic_test::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x.clone()


opaque.register_fake(torch.empty_like)


def test_an_operation_without_a_rule_is_named_with_its_line() -> None:
    def body(x: Tensor) -> Tensor:
        y: Tensor = opaque(x)
        return y

    f = auto(body, in_specs=(P("dp"),), out_specs=P(), mesh=ABSTRACT)
    text = raised(lambda: f.report(torch.ones(8, 8)))
    assert text.startswith(
        "auto: torch's sharding propagation cannot place automatic_test.opaque.default at "
        "test_auto.py:"
    )
    assert "y: Tensor = opaque(x)" in text
