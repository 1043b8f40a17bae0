"""Batched bodies under torch.compile: one graph of plain operations, nothing dropped."""

from collections.abc import Callable
from typing import Any, Final

import optree
import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.nn import functional

from examples.gpt.model import Config, init
from examples.gpt.optim import make_optimizer
from examples.gpt.step import sharded_step
from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    TransformError,
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    checkpoint,
    convert,
    grad,
    make_mesh,
    ppermute,
    reduce_scatter,
    shard_map,
    value_and_grad,
    vjp,
)
from shardmap_torch import random as draws
from shardmap_torch.optim import clip_by_global_norm
from tests.programs.support.everywhere import same
from tests.programs.support.harness import random, worker_mesh
from tests.support.fuzzing import sampled, sized
from tests.support.pool import Gloo

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]

Params = dict[str, Tensor]
Step = Callable[[Params, Tensor], Any]

MESH = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
TP = make_mesh((2,), ("tp",), kind="simulated")
SPECS = {"w1": P(None, "tp"), "w2": P("tp"), "scale": P()}


def params() -> Params:
    return {"w1": random((6, 8), 1), "w2": random((8, 6), 2), "scale": random((6,), 3)}


def compiled(f: Callable[..., Any], graphs: list[str], backend: str | None = None) -> Any:
    """Compiles without a graph break, and notes each graph, forward or backward."""

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.code)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    noting: Any = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    return torch.compile(f, backend=backend or noting, fullgraph=True, dynamic=False)


def _leaves(tree: Any) -> list[Tensor]:
    return optree.tree_leaves(tree)


def mlp(p: Params, x: Tensor) -> Tensor:
    """On one device."""
    return (torch.relu((x * p["scale"]) @ p["w1"]) @ p["w2"]).square().mean()


def loss(p: Params, x: Tensor) -> Tensor:
    h = torch.relu(convert(x * p["scale"], "tp", src=I, dst=R) @ p["w1"])
    return all_reduce(all_reduce(h @ p["w2"], "tp", dst=I).square().mean() / 2, "dp", dst=I)


def summed(p: Params, x: Tensor) -> Tensor:
    return loss({k: convert(w, "dp", src=I, dst=R) for k, w in p.items()}, x)


def descend(p: Params, x: Tensor) -> Any:
    value, grads = value_and_grad(summed)(p, x)
    return value, grads, {k: p[k] - 0.1 * grads[k] for k in p}


def pulled_twice(p: Params, x: Tensor) -> Any:
    value, pull = vjp(lambda p: summed(p, x), p)
    (first,), (second,) = pull(torch.ones_like(value)), pull(value.cos())
    return value, first, {k: first[k] - second[k] for k in p}


def by_torch(p: Params, x: Tensor) -> Any:
    grads, value = torch.func.grad_and_value(summed)(p, x)
    return value, grads, p


def twice(p: Params, x: Tensor) -> Any:
    grads = grad(lambda p: grad(summed)(p, x)["scale"].square().sum())(p)
    return summed(p, x), grads, p


@pytest.mark.parametrize("body", sampled([descend, pulled_twice, by_torch, twice], descend))
def test_a_step_with_its_gradients_is_one_graph_of_plain_operations(body: Step) -> None:
    p, x, graphs = params(), random((4, 6), 0), list[str]()
    f = shard_map(body, mesh=MESH, in_specs=(SPECS, P("dp")), out_specs=(P(), SPECS, SPECS))
    found = compiled(f, graphs)(p, x)
    same(_leaves(found), _leaves(f(p, x)))
    if body is not twice:
        grads, value = torch.func.grad_and_value(mlp)(p, x)
        same(_leaves(found[:2]), _leaves([value, grads]))
    (code,) = graphs
    assert "bmm" in code
    assert not any(word in code for word in ("c10d", "vmap", "batch_dim", "_apply_in_graph"))


def moved(x: Tensor, w: Tensor) -> Tensor:
    """Movements of every shape over two axes, a maximum, and an index."""
    y = all_reduce(x.sin(), "tp", dst=R, op="max") * (x + axis_index(("tp", "dp")))
    y = ppermute(y, "dp", [(0, 1)]) + all_gather(y, "tp", dim=1, dst=R).sum(1, keepdim=True)
    y = all_to_all(y, "dp", split_dim=1, concat_dim=0).reshape(y.shape) * all_reduce(
        w, ("dp", "tp"), dst=R
    )
    return reduce_scatter(y @ y.t(), "tp", dim=0)


def squared(x: Tensor) -> Tensor:
    return all_reduce(x * x, "tp", dst=R) * x


def nested(x: Tensor, w: Tensor) -> Tensor:
    inner = shard_map(squared, in_specs=P("tp"), out_specs=P("tp"))
    return inner(x.cos()) * all_reduce(w.sum(), "dp", dst=R)


@pytest.mark.parametrize("body", sampled([moved, nested], moved))
@pytest.mark.parametrize("backend", sampled([None, "inductor"], None))
def test_values_and_gradients_from_outside_are_those_of_eager_code(
    body: Callable[..., Tensor], backend: str | None
) -> None:
    axes = {"dp"} if body is nested else None
    whole = P("dp") if body is nested else P(("dp", "tp"))
    f = shard_map(body, mesh=MESH, in_specs=whole, out_specs=whole, axis_names=axes)
    graphs = list[str]()

    def derived(f: Callable[..., Tensor]) -> list[Tensor]:
        xs = random((8, 2), 0).requires_grad_(), random((8, 2), 1).requires_grad_()
        y = f(*xs)
        return [y.detach(), *torch.autograd.grad(y.cos().sum(), xs)]

    for actual, expected in zip(derived(compiled(f, graphs, backend)), derived(f), strict=True):
        same(actual, expected)
    assert len(graphs) == (2 if backend is None else 0)  # forward and backward


class Odd(torch.autograd.Function):
    """Its backward is no derivative of its forward, so that it shows if it is left out."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    setup_context = staticmethod(lambda ctx, inputs, output: None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 7


def odd(x: Tensor) -> Tensor:
    y: Tensor = Odd.apply(x)  # type: ignore[no-untyped-call]
    return y * 2


def odd_inside(x: Tensor) -> Tensor:
    found: Tensor = grad(lambda x: odd(x).sum())(x)
    return found


FUNCTIONS = (
    "it applies autograd Functions, and under torch.func.vmap torch.compile leaves their backward "
    "out"
)
ROUNDS = (
    "one batched program does not round gradients as comm_dtype and grad_comm_dtype say, which "
    "runs of single ranks do"
)
RANKS = (
    'simulate="ranks" runs it in a thread for each rank; make the mesh with simulate="auto" or '
    '"vmap"'
)


def rounded(x: Tensor) -> Tensor:
    total: Tensor = all_reduce(
        x, "tp", dst=R, comm_dtype=torch.float32, grad_comm_dtype=torch.bfloat16
    )
    return total * x


@pytest.mark.parametrize(
    ("body", "simulate", "obstacle"),
    [
        (rounded, "auto", ROUNDS),
        (odd_inside, "auto", FUNCTIONS),
        (torch.sin, "ranks", RANKS),
        pytest.param(odd, "vmap", FUNCTIONS, marks=pytest.mark.fuzz),
    ],
)
def test_what_a_batched_trace_would_lose_is_refused(
    body: Callable[[Tensor], Tensor], simulate: Any, obstacle: str
) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate=simulate)
    f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    x = random((4,), 0).requires_grad_(body is not odd_inside)
    with pytest.raises(TransformError) as caught:
        compiled(f, [])(x)
    assert str(caught.value).startswith(
        f"{body.__name__}: torch.compile cannot compile what was checked: {obstacle}. Call it "
        "uncompiled.\n"
    )
    same(torch.compile(f, backend="eager")(x), f(x))  # it breaks the graph, and runs uncompiled


def dropped(w: Tensor, x: Tensor, key: Tensor) -> Tensor:
    h = draws.dropout(key, checkpoint(lambda w, x: torch.tanh(x @ w), w, x), 0.1, spec=P("dp"))
    entropy = functional.cross_entropy(h, x.argmax(-1))
    return all_reduce(entropy, "dp", op="mean", dst=I)


def accumulated(mesh: Mesh) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """A step that recomputes, draws dropout, averages cross entropies, accumulates and clips."""

    @shard_map(mesh=mesh, in_specs=(P(), P(None, "dp"), P()), out_specs=P(), check="global")
    def step(w: Tensor, x: Tensor, key: Tensor) -> Any:
        grads = torch.zeros_like(w)
        for at, rows in enumerate(x.unbind(0)):
            _, gradient = value_and_grad(dropped)(w, rows, draws.fold_in(key, at))
            grads = grads + all_reduce(gradient, "dp", dst=I) / 2
        clipped, norm = clip_by_global_norm({"w": grads}, P(), 0.5)
        return w - 0.1 * clipped["w"], norm

    return step


SIZES: Final = sized([(4, 1)], [(4, 1), (6, 2), (4, 2)])
"""Rows of a call, and how many graphs there are then."""


def assert_compiles_once_a_size(mesh: Mesh, *sizes: tuple[int, int]) -> None:
    step, graphs = accumulated(mesh), list[str]()
    run, w, key = compiled(step, graphs), random((8, 8), 0), draws.key(0)
    for rows, count in sizes:
        x = random((2, rows, 8), rows)
        same(run(w, x, key), step(w, x, key))
        assert len(graphs) == count


def test_a_step_that_recomputes_draws_accumulates_and_clips_compiles_once_a_size() -> None:
    assert_compiles_once_a_size(make_mesh((2,), ("dp",), kind="simulated"), *SIZES)


def test_each_size_is_compiled_once() -> None:
    f, graphs = shard_map(squared, mesh=TP, in_specs=P("tp"), out_specs=P("tp")), list[str]()
    run = compiled(f, graphs)
    for rows, count in ((4, 1), (6, 2), (4, 2)):
        x = random((rows,), rows)
        same(run(x), f(x))
        assert len(graphs) == count


def on_processes() -> None:
    assert_compiles_once_a_size(worker_mesh((2,), ("dp",)), *SIZES)


@pytest.mark.fuzz  # 14 s; tests/autodiff/test_gradients_compiled.py compiles a step there
def test_such_a_step_compiles_once_a_size_on_processes(gloo: Gloo) -> None:
    gloo(2).run(on_processes, timeout=200)


def test_an_unchecked_batched_body_is_not_compiled() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate="vmap")
    f = shard_map(torch.sin, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check=False)
    with pytest.raises(TransformError) as caught:
        compiled(f, [])(random((4,), 0))
    assert str(caught.value).startswith(
        "sin: torch.compile cannot compile an unchecked body on a simulated mesh: torch drops what "
        "one batched program does not have. Check it, compile on a process-group mesh, or call it "
        "uncompiled.\n"
    )


def test_a_transform_outside_is_refused() -> None:
    """Dynamo would take what it differentiates for something that receives no gradient."""
    f = shard_map(
        lambda x: all_reduce((x**2).sum(), "tp", dst=I), mesh=TP, in_specs=P("tp"), out_specs=P()
    )
    with pytest.raises(Exception, match=r"cannot be compiled under a torch\.func transform"):
        compiled(torch.func.grad(f), [])(random((4,), 0))


@pytest.mark.fuzz
@pytest.mark.slow
def test_the_step_of_the_gpt_example_compiles_and_is_the_eager_one() -> None:
    """After uncompiled steps, whose caches Dynamo finds."""
    config = Config(vocabulary=32, length=8, width=16, heads=4, hidden=24, layers=1)
    adam, start = make_optimizer(config, 10), init(config, 0, torch.float64)
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated", simulate="vmap")
    tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(0))
    f, ends = sharded_step(mesh, config, adam), list[Any]()
    for step in (f, compiled(f, [])):
        p, state, _ = step(start, adam.init(start), tokens)
        ends.append(_leaves(step(p, state, tokens)))
    for actual, expected in zip(*ends, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
