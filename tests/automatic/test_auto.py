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
    P,
    SpecError,
    all_reduce,
    auto,
    full,
    make_mesh,
    mark_sharding,
    redistributions,
    shard_map,
)
from shardmap_torch.automatic.recording import bytes_sent, shown
from tests.programs.support.everywhere import claimed, run_on
from tests.programs.support.harness import random
from tests.support.golden import told
from tests.support.pool import Gloo

MESH, AXES = (2, 2), ("dp", "tp")
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


def marks(mesh: Mesh) -> None:
    x = random((4, 4), 0).requires_grad_()
    for spec in (P("dp", "tp"), ("dp", None), (("dp", "tp"),), P()):
        marked = mark_sharding(mark_sharding(x, mesh, spec), mesh, P("tp"))
        assert isinstance(marked, DTensor) == (mesh.kind == "process_group")
        assert full(marked).equal(x)
        (grad,) = torch.autograd.grad(full(marked * marked).sum(), x)
        assert full(grad).equal(2 * x)


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


def tells_every_redistribution(mesh: Mesh) -> None:
    def step(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        p = torch.softmax(x @ w, -1)
        return mark_sharding(p, None, ("dp", "tp")) @ v

    specs = (P("dp"), P(None, "tp"), P("tp"))
    f = auto(step, in_specs=specs, out_specs=P("dp"), mesh=mesh)
    x, w, v = random((8, 8), 0), random((8, 16), 1).requires_grad_(), random((16, 8), 2)
    with redistributions() as found:
        f(x, w, v).sum().backward()
    lines = [str(move) for move in found.moves]
    assert [line.split("  # ")[0] for line in lines] == MOVED
    assert lines[0].endswith("p = torch.softmax(x @ w, -1)")
    assert lines[1].endswith('return mark_sharding(p, None, ("dp", "tp")) @ v')
    assert sum(move.num_bytes for move in found.moves) == found.num_bytes
    assert [move.op for move in found.moves if move not in found.implicit] == ["mark_sharding"] * 2


MOVED = [
    "_softmax: float64[8, 16] (S(0), S(1)) -> (S(0), R) over dp, tp, sends 256 B",
    "mark_sharding (asked for): float64[8, 16] (S(0), R) -> (S(0), S(1)) over dp, tp, sends 0 B",
    "result: float64[8, 8] (S(0), P) -> (S(0), R) over dp, tp, sends 256 B",
    "mark_sharding (asked for): float64[8, 16] (S(0), S(1)) -> (S(0), R) over dp, tp, sends 256 B",
    "gradient backward: float64[8, 16] (P, R) -> (R, S(1)) over dp, tp, sends 512 B",
]


def test_every_redistribution_is_told_by_line_and_bytes(gloo: Gloo) -> None:
    run_on("gloo", tells_every_redistribution, gloo, MESH, AXES)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean of a loss": lambda x: functional.mse_loss(x, torch.ones_like(x)),
    "largest": lambda x: x.amax(0).sum(),
    "any": lambda x: (x > 1).any().double() * x.sum(),
}
"""Bodies for which torch's own rules give other values or gradients."""


def are_right_without_a_rule(mesh: Mesh) -> None:
    for name, body in LOSSES.items():
        f = auto(body, in_specs=(P("dp", "tp"),), out_specs=P(), mesh=mesh)
        x, y = (random((4, 8), 3).requires_grad_() for _ in range(2))
        pair = f(x), body(y)
        found = [torch.autograd.grad(each, to)[0] for each, to in zip(pair, (x, y), strict=True)]
        for ours, truth in (pair, found):
            torch.testing.assert_close(full(ours), truth, rtol=1e-10, atol=1e-10, msg=name)


def test_functions_without_a_right_rule_of_torchs_are_right(gloo: Gloo) -> None:
    run_on("gloo", are_right_without_a_rule, gloo, MESH, AXES)


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


def test_keyword_and_marked_arguments_are_static() -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    specs = (P("dp"), None)
    f = auto(lambda x, n, *, scale: x * n * scale, in_specs=specs, out_specs=P(), mesh=mesh)
    assert f(torch.ones(2), 3, scale=2).tolist() == [6.0, 6.0]


def test_results_that_the_specs_do_not_match_are_named() -> None:
    mesh = make_mesh((2, 2), AXES, kind="simulated")
    f = auto(torch.neg, in_specs=(P("dp"),), out_specs=P(None, "tp"), mesh=mesh)
    with told(SpecError):
        f(torch.ones(8))


test_on_every_mesh_of_two_axes = claimed(
    {
        "values and gradients are those of one device": equals_one_device,
        "results lie by their specs": lies_as_specified,
        "marks change layouts and no values": marks,
        "manual functions run in automatic code": mixes,
    },
    MESH,
    AXES,
)


def text_of(mesh: Mesh) -> None:
    said: list[str] = []

    def step(x: Tensor) -> Tensor:
        loss = x.square().sum()
        said.append(f"{loss:.1f}")
        return loss

    auto(step, in_specs=(P("tp"),), out_specs=P(), mesh=mesh)(torch.arange(4.0))
    assert said[-1] == "14.0"


@pytest.mark.parametrize("kind", ["vmap", pytest.param("gloo", marks=pytest.mark.slow)])
def test_the_text_of_a_number_is_that_of_the_global_one(kind: str, gloo: Gloo) -> None:
    run_on(kind, text_of, gloo)
