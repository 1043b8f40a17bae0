"""Bodies with hooks, and with functions that vmap cannot take, run as ranks on simulated meshes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from shardmap_torch import P, TransformError, check_program, checkpoint, make_mesh, shard_map
from shardmap_torch.checker.ir.own_functions import takes_vmap
from tests.checker.support.rejections import Plain, SetUp
from tests.support.golden import hold_own

Body = Callable[[Tensor, Tensor], Tensor]


class WithVmap(SetUp):
    generate_vmap_rule = True


APPLY: dict[type, Body] = {f: f.apply for f in (Plain, SetUp, WithVmap)}


def tensor_hook(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 2)
    return h


def input_hook(x: Tensor, w: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad * 2)
    return x @ w


def node_hook(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda grads: tuple(grad * 2 for grad in grads))
    return h


def edge_hook(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    if h.requires_grad:
        node = torch.autograd.graph.get_gradient_edge(h).node
        node.register_prehook(lambda grads: tuple(grad * 2 for grad in grads))
    return h


LINEAR = nn.Linear(8, 8, bias=False, dtype=torch.float64)


def thrice(module: nn.Module, into: Any, out: Any) -> tuple[Tensor]:
    tripled: Tensor = into[0] * 3
    return (tripled,)


LINEAR.register_full_backward_hook(thrice)


def module_hook(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = torch.func.functional_call(LINEAR, {"weight": w}, (x,))
    return y


def torch_checkpoint(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = torch.utils.checkpoint.checkpoint(
        lambda x, w: torch.tanh(x @ w), x, w, use_reentrant=False
    )
    return y


def saving_hooks(x: Tensor, w: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x * 2):
        return torch.sin(x @ w)


def legacy(x: Tensor, w: Tensor) -> Tensor:
    return APPLY[Plain](x, w)


def without_vmap(x: Tensor, w: Tensor) -> Tensor:
    return APPLY[SetUp](x, w)


def data(x: Tensor, w: Tensor) -> Tensor:
    return x @ w * x.data.sum(1, keepdim=True)


def detached_in_place(x: Tensor, w: Tensor) -> Tensor:
    return x @ w * x.clone().detach_().sum(1, keepdim=True)


def into_out(x: Tensor, w: Tensor) -> Tensor:
    return x @ w * torch.mul(x.detach(), 2, out=torch.empty_like(x))


REFUSED_BY_TORCH = [data, detached_in_place, into_out]
"""Bodies that torch itself refuses to batch."""


BODIES = [
    tensor_hook,
    input_hook,
    node_hook,
    edge_hook,
    module_hook,
    torch_checkpoint,
    saving_hooks,
    legacy,
    without_vmap,
]


def values(body: Body, *inputs: Tensor) -> list[Tensor]:
    """The result and its gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = body(*leaves)
    weights = torch.linspace(0.1, 1.3, y.numel(), dtype=y.dtype).reshape(y.shape)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), leaves)]


def inputs() -> tuple[Tensor, Tensor]:
    x, w = torch.linspace(-1, 1, 32), torch.linspace(-2, 1, 64)
    return x.double().reshape(4, 8), w.double().reshape(8, 8)


def mapped(body: Body, **kwargs: Any) -> Any:
    mesh = make_mesh((2,), ("dp",), kind="simulated", **kwargs)
    return shard_map(body, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"))


@pytest.mark.parametrize("body", [*BODIES, *REFUSED_BY_TORCH], ids=lambda body: body.__name__)
def test_simulated_meshes_run_as_one_device_what_vmap_would_drop_or_break(body: Body) -> None:
    assert not check_program(mapped(body), *(x.requires_grad_() for x in inputs())).batches
    # A hook that scales all of a cotangent does the same to each rank's part of it.
    for one, other in zip(values(mapped(body), *inputs()), values(body, *inputs()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def asking(x: Tensor, w: Tensor) -> Tensor:
    return x @ w * (2 if x.requires_grad else 3)


def own_gradient(x: Tensor, w: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad((leaf @ w).sum(), leaf)[0]


NAMES: dict[Body, str] = {
    asking: "a question for requires_grad.",
    node_hook: "grad_fn.",
    saving_hooks: "saved_tensors_hooks.",
    legacy: "Plain, a Function without a rule for vmap.",
}


@pytest.mark.parametrize("body", [*BODIES, asking, own_gradient], ids=lambda body: body.__name__)
def test_a_mesh_that_says_vmap_refuses_them_and_names_the_line(body: Body) -> None:
    with pytest.raises(TransformError) as error:
        mapped(body, simulate="vmap")(*(x.requires_grad_() for x in inputs()))
    what, where, fix = str(error.value).splitlines()
    head = f"{body.__name__}: one batched program drops, or cannot run, what single ranks run: "
    assert what.startswith(head + NAMES.get(body, ""))
    assert where.startswith("  at test_own_functions.py:")
    hold_own(fix)


def test_what_vmap_can_take_runs_there() -> None:
    for check in (True, False):
        mesh = make_mesh((2,), ("dp",), kind="simulated", simulate="vmap")
        specs = P("dp"), P(replicate={"dp"})
        f = shard_map(with_vmap, mesh=mesh, in_specs=specs, out_specs=P("dp"), check=check)
        for one, other in zip(values(f, *inputs()), values(with_vmap, *inputs()), strict=True):
            torch.testing.assert_close(one, other)


def with_vmap(x: Tensor, w: Tensor) -> Tensor:
    return APPLY[WithVmap](x, w)


def own_checkpoint(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(lambda x, w: torch.tanh(x @ w), x, w)


@pytest.mark.parametrize("body", [with_vmap, own_checkpoint, torch.matmul])
def test_what_vmap_can_take_stays_batched(body: Body) -> None:
    assert check_program(mapped(body), *(x.requires_grad_() for x in inputs())).batches


def test_a_function_is_looked_at_by_what_it_overrides() -> None:
    assert [takes_vmap(f) for f in (Plain, SetUp, WithVmap)] == [False, False, True]


def in_a_transform(x: Tensor, w: Tensor) -> Tensor:
    gradient: Tensor = torch.func.grad(lambda x: APPLY[SetUp](x, w).sum())(x)
    return gradient


def test_functions_in_a_transform_of_the_body_are_seen_too() -> None:
    assert not check_program(mapped(in_a_transform), *inputs()).batches


def test_functions_are_as_before_after_a_check() -> None:
    base: Any = torch.autograd.function._SingleLevelFunction
    before = base.__dict__.get("apply")  # one whose backward communicates stays known
    check_program(mapped(legacy), *inputs())
    assert base.__dict__.get("apply") is before
