"""A module's own instrumentation, patched forwards, hooks and attributes, stays in force."""

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardmap_torch import (
    ColwiseParallel,
    Mesh,
    RowwiseParallel,
    SpecError,
    functional,
    make_mesh,
    parallelize,
)
from tests.programs.support.harness import global_value, random, worker_mesh
from tests.support.golden import told
from tests.support.pool import Gloo

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()


def by_closure(m: Any) -> None:
    old = m[2].forward
    m[2].forward = lambda x: old(x) * 2


def by_default(m: Any) -> None:
    m[2].forward = lambda x, old=m[2].forward: old(x) * 2


def by_partial(m: Any) -> None:
    def scaled(module: nn.Module, x: Tensor) -> Any:
        return module._old(x) * 2  # type: ignore[operator]

    for each in m[0], m[2]:  # as accelerate patches modules
        each._old = each.forward
        each.forward = functools.update_wrapper(functools.partial(scaled, each), each.forward)


def by_method(m: Any) -> None:
    m[2].forward = MethodType(lambda self, x: nn.Linear.forward(self, x) * 2, m[2])


def of_the_root(m: Any) -> None:
    old = m.forward
    m.forward = lambda x: old(x) * 2


def of_the_root_by_partial(m: Any) -> None:
    m.forward = functools.partial(lambda module, x: module[2](module[1](module[0](x))) * 2, m)


def hooks(m: Any) -> None:
    m[0].register_forward_hook(lambda module, args, y: y * 2)
    m[2].register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    m[2].register_forward_hook(lambda module, args, y: y * module.bias.mean())
    m.register_forward_hook(lambda module, args, y: y + 1)


def a_hook_that_reads_another_module(m: Any) -> None:
    norm = m[0] = nn.Sequential(nn.LayerNorm(8).double(), m[0])
    m[2].register_forward_hook(lambda module, args, y: y * norm[0].weight)


def a_nested_list(m: Any) -> None:
    m.pairs = [(m[0], {"scale": 2.0, "last": m[2]})]
    m.forward = MethodType(
        lambda self, x: self.pairs[0][1]["last"](self[1](self.pairs[0][0](x) * 2.0)), m
    )


def triple(p: Tensor) -> None:
    assert p.grad is not None
    p.grad *= 3


def hooks_of_parameters(m: Any) -> None:
    m[2].weight.register_hook(lambda gradient: gradient * 2)
    m[0].weight.register_hook(lambda gradient: gradient * 5).remove()
    m[0].bias.register_post_accumulate_grad_hook(triple)


def a_gradient_that_is_there(m: Any) -> None:
    m(random((4, 8), 1)).sum().backward()


PATCHES: tuple[Callable[[Any], None], ...] = (
    *(by_closure, by_default, by_partial, by_method, of_the_root, of_the_root_by_partial),
    *(hooks, a_hook_that_reads_another_module, a_nested_list),
    *(hooks_of_parameters, a_gradient_that_is_there),
)


def runs_alike(mesh: Mesh) -> None:
    for patch in PATCHES:
        one, ours = mlp(), mlp()
        for each in (one, ours):
            patch(each)
        nested = patch is a_hook_that_reads_another_module
        parallelize(ours, mesh, {"0.1": PLAN["0"], "2": PLAN["2"]} if nested else PLAN)
        x = random((4, 8), 0)
        results = one(x), ours(x)
        for y in results:
            y.square().sum().backward()
        torch.testing.assert_close(results[1], results[0], msg=patch.__name__)
        for p, q in zip(ours.parameters(), one.parameters(), strict=True):
            assert p.grad is not None
            torch.testing.assert_close(global_value(p.grad), q.grad, msg=patch.__name__)


def test_what_patches_a_module_stays_in_force() -> None:
    runs_alike(make_mesh((2,), ("tp",), kind="simulated"))


def on_processes() -> None:
    runs_alike(worker_mesh((2,), ("tp",)))


def test_what_patches_a_module_stays_in_force_on_processes(gloo: Gloo) -> None:
    gloo(2).run(on_processes, timeout=120)


def test_a_pure_function_of_a_patched_module_uses_the_given_parameters() -> None:
    for patch in (by_closure, by_partial, hooks, a_nested_list):
        module = mlp()
        patch(module)
        params, apply = functional(module)
        others = {name: value * 0.5 for name, value in params.items()}
        expected = copy.deepcopy(module.state_dict())
        y, x = apply(others, random((4, 8), 0)), random((4, 8), 0)
        module.load_state_dict(others)
        torch.testing.assert_close(y, module(x), msg=patch.__name__)
        module.load_state_dict(expected)


class Scaled:
    """An object that refers to a module, which nothing follows."""

    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def __call__(self, x: Tensor) -> Any:
        return self.forward(x) * 2


def test_a_patch_that_hides_the_module_in_an_object_is_refused() -> None:
    module: Any = mlp()
    module.forward = Scaled(module.forward)
    with told(SpecError):
        parallelize(module, make_mesh((2,), ("tp",), kind="simulated"), PLAN)(random((4, 8), 0))
