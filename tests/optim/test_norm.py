"""Norms over sharded trees count every entry once, in a body and outside of it."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardmap_torch import (
    I,
    Mesh,
    OptimizerError,
    P,
    SpecError,
    all_reduce,
    device_put,
    explain,
    full,
    make_mesh,
    shard_map,
)
from shardmap_torch.optim import adamw, clip_by_global_norm, clip_grad_norm_, global_norm, sgd
from tests.optim.training import AXES, EXACT, MESH, SPECS, assert_equal, params
from tests.programs.support.everywhere import ON_EVERY_MESH, run_on
from tests.programs.support.harness import random, worker_mesh
from tests.support.golden import told
from tests.support.pool import Gloo

ORDERS = (1.0, 2.0, 3.0, math.inf)
BARE = {name: P(*spec.entries) for name, spec in SPECS.items()}


def norm_of(tree: dict[str, Tensor], ord: float = 2.0) -> Tensor:
    flat = torch.cat([leaf.flatten() for leaf in tree.values()])
    norm: Tensor = torch.linalg.vector_norm(flat, ord)
    return norm


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=EXACT, atol=0)


def counts_once(mesh: Mesh) -> None:
    for ord in ORDERS:
        body = partial(global_norm, specs=BARE, ord=ord)
        norm = shard_map(body, mesh=mesh, in_specs=(BARE,), out_specs=P(), check="global")
        close(norm(params()), norm_of(params(), ord))


@ON_EVERY_MESH
def test_the_norm_counts_every_entry_once(kind: Any, gloo: Gloo) -> None:
    run_on(kind, counts_once, gloo, MESH, AXES)


def clips(mesh: Mesh) -> None:
    body = partial(clip_by_global_norm, specs=BARE, max_norm=0.25)
    out = (BARE, P())
    clip = shard_map(body, mesh=mesh, in_specs=(BARE,), out_specs=out, check="global")
    clipped, norm = clip(params())
    close(norm, norm_of(params()))
    close(norm_of(full(clipped)), torch.tensor(0.25, dtype=torch.float64))


@ON_EVERY_MESH
def test_clipping_leaves_a_norm_of_the_bound(kind: Any, gloo: Gloo) -> None:
    run_on(kind, clips, gloo, MESH, AXES)


def test_a_smaller_norm_leaves_the_tree_bit_for_bit() -> None:
    tree = params()
    clipped, norm = clip_by_global_norm(tree, max_norm=1e3)
    close(norm, norm_of(tree))
    assert all(clipped[name].equal(tree[name]) for name in tree)
    zeros, norm = clip_by_global_norm([torch.zeros(3)])
    assert norm == 0
    assert zeros[0].equal(torch.zeros(3))


def test_clipping_has_a_derivative_also_by_the_norm() -> None:
    x = torch.tensor([3.0, 4.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: clip_by_global_norm([x, 2 * x])[0], x)


def test_one_scalar_is_reduced_for_each_set_of_axes() -> None:
    mesh = make_mesh(MESH, AXES, kind="abstract")
    specs = {"a": P("tp"), "b": P(None, "tp"), "c": P("dp", "tp"), "d": P("tp", "dp"), "e": P()}
    tree = {name: torch.ones(4, 4) for name in specs}
    body = partial(global_norm, specs=specs)
    text = str(explain(shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=P()), tree))
    reduced = [line.split(",")[0].strip() for line in text.splitlines() if "all_reduce" in line]
    assert reduced == ["all_reduce('tp'", "all_reduce(('dp'"]
    assert "of float32[]," in text


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from(ORDERS))
def test_the_norm_of_plain_trees_is_that_of_their_entries(sizes: list[int], ord: float) -> None:
    tree = {str(i): random((size,), i) for i, size in enumerate(sizes)}
    if sum(sizes):
        torch.testing.assert_close(global_norm(tree, ord=ord), norm_of(tree, ord))


@pytest.mark.parametrize("size", [2**18, 2**22])
def test_many_entries_are_added_precisely(size: int) -> None:
    # One dot product of the larger number is off by 7e-7, and a leaf with strides has none.
    leaf = torch.linspace(0.5, 1.5, size)
    expected = leaf.double().square().sum().sqrt()
    for x in (leaf, leaf.view(2, -1).T):
        torch.testing.assert_close(global_norm([x]).double(), expected, rtol=5e-7, atol=0)


def test_low_precision_is_added_in_float32() -> None:
    ones = torch.ones(1000, dtype=torch.bfloat16)  # bfloat16 has no 1001
    norm = global_norm([ones, ones[:1]])
    assert norm.dtype == torch.float32
    assert norm.square().item() == pytest.approx(1001, rel=1e-6)
    assert global_norm([ones.to(torch.complex64) * 1j]).item() == pytest.approx(1000**0.5)


# Outside of a body: DTensors and plain tensors, as they come.


def mixed(mesh: Mesh) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A tree of all sorts of DTensors, and the same as plain tensors."""
    plain = {name: random((5, 4), seed) for seed, name in enumerate("abcdef")}
    on = mesh.device_mesh
    assert on is not None
    tree: dict[str, Tensor] = {
        "a": plain["a"],
        "b": distribute_tensor(plain["b"], on, [Replicate(), Shard(1)]),
        "c": distribute_tensor(plain["c"], on, [Shard(0), Shard(1)]),  # 5 rows over 2 ranks
        "d": distribute_tensor(plain["d"], on, [Replicate(), Replicate()]),
        "e": DTensor.from_local(plain["e"] / 2, on, [Partial(), Replicate()]),
        "f": distribute_tensor(plain["f"], on, [Shard(0), Replicate()]),
    }
    return tree, plain


def outside(mesh: Mesh) -> None:
    tree, plain = mixed(mesh)
    for ord in ORDERS:
        close(global_norm(tree, ord=ord), norm_of(plain, ord))
    clipped, norm = clip_by_global_norm(tree, max_norm=0.25)
    close(norm, norm_of(plain))
    expected = {name: value * (0.25 / norm) for name, value in plain.items()}
    expected["e"] = expected["e"] * 1  # a sum stays one, each addend scaled
    assert_equal(full(clipped), expected)
    for name, value in tree.items():
        assert getattr(clipped[name], "placements", None) == getattr(value, "placements", None)


def in_place(mesh: Mesh) -> None:
    tree, plain = mixed(mesh)
    del tree["e"], plain["e"]  # no parameter is a sum
    weights = {name: value.requires_grad_() for name, value in tree.items()}
    for weight in weights.values():
        weight.grad = weight.detach().clone()
    norm = clip_grad_norm_([*weights.values(), torch.ones(1, requires_grad=True)], 0.25)
    close(norm, norm_of(plain))
    grads = {name: w.grad for name, w in weights.items() if w.grad is not None}
    assert_equal(full(grads), {name: value * (0.25 / norm) for name, value in plain.items()})


def steps(mesh: Mesh) -> None:
    """Our optimizers, and torch's on `as_dtensor=True`, update mixed trees as one device does."""
    tree, plain = mixed(mesh)
    del tree["e"], plain["e"]
    for optimizer in (adamw(0.1), sgd(0.1, momentum=0.9)):
        state, expected_state = optimizer.init(tree), optimizer.init(plain)
        new, expected = tree, plain
        for _ in range(2):
            new, state = optimizer.update(new, {**tree, "b": plain["b"]}, state)
            expected, expected_state = optimizer.update(expected, plain, expected_state)
        assert_equal(full(new), expected)
        for name, value in tree.items():
            assert getattr(new[name], "placements", None) == getattr(value, "placements", None)


def torch_itself(mesh: Mesh) -> None:
    """Calls torch where it refuses mixed trees, on those of `device_put(as_dtensor=True)`."""
    specs = {"w": P("dp", "tp"), "v": P(None, "tp"), "b": P()}
    plain = {name: random((4, 4), seed) for seed, name in enumerate(specs)}

    def gradients(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        loss = shard_map(
            lambda p: (
                all_reduce(p["w"].square().sum(), AXES, dst=I)
                + all_reduce(p["v"].square().sum(), "tp", dst=I)
                + p["b"].square().sum()
            ),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=P(),
        )
        loss(weights).backward()
        return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}

    placed = device_put(plain, mesh, specs, as_dtensor=True)
    weights = {name: value.requires_grad_() for name, value in placed.items()}
    grads = gradients(weights)
    assert all(isinstance(x, DTensor) for x in (*weights.values(), *grads.values()))
    assert_equal(full(grads), {name: 2 * value for name, value in plain.items()})
    norm = torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
    close(full(norm), 2 * norm_of(plain))
    scaled = {name: value * (0.5 / (2 * norm_of(plain) + 1e-6)) for name, value in plain.items()}
    assert_equal(full(grads), {name: 2 * value for name, value in scaled.items()})
    torch.optim.AdamW(weights.values(), lr=0.1, foreach=True).step()
    optimizer = adamw(0.1)
    expected, _ = optimizer.update(plain, full(grads), optimizer.init(plain))
    assert_equal(full(weights), expected)


def nothing_is_shared(mesh: Mesh) -> None:
    """Writing into what was placed leaves the given values alone."""
    given = {"w": torch.ones(4), "b": torch.ones(2)}
    placed = device_put(given, mesh, {"w": P("tp"), "b": P()}, as_dtensor=True)
    for value in placed.values():
        value.mul_(2)
    assert all(value.equal(torch.ones_like(value)) for value in given.values())
    partial_spec = P(partial={"dp", "tp"})
    assert full(device_put(given["w"], mesh, partial_spec, as_dtensor=True)).sum() == 4


@pytest.mark.parametrize("scenario", [outside, in_place, steps, torch_itself, nothing_is_shared])
def test_trees_of_dtensors_and_plain_tensors_need_no_specs(
    scenario: Callable[[Mesh], None], gloo: Gloo
) -> None:
    gloo(4).run(_in_worker, scenario)


def _in_worker(scenario: Callable[[Mesh], None]) -> None:
    scenario(worker_mesh(MESH, AXES))


def test_clipping_in_place_can_refuse_what_is_no_number() -> None:
    w = torch.ones(2, requires_grad=True)
    w.grad = torch.tensor([1.0, math.nan])
    with pytest.raises(OptimizerError) as caught:
        clip_grad_norm_(w, 1.0, error_if_nonfinite=True)
    assert str(caught.value) == "clip_grad_norm_: the norm of the gradients is nan."
    assert w.grad[0] == 1
    assert clip_grad_norm_([torch.ones(1, requires_grad=True)], 1.0) == 0


def in_a_body(specs: Any) -> Any:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    body = partial(global_norm, specs=specs)
    return shard_map(body, mesh=mesh, in_specs=(P("tp"),), out_specs=P())({"w": torch.ones(2)})


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "order": (lambda: global_norm([torch.ones(1)], ord=0.5), OptimizerError),
    "empty": (lambda: global_norm({}), OptimizerError),
    "no specs": (lambda: in_a_body(None), SpecError),
    "other tree": (lambda: in_a_body({"v": P()}), SpecError),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_has_no_norm_is_an_error(name: str) -> None:
    make, error = ERRORS[name]
    with told(error):
        make()
