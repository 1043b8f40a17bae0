"""The public operations on gloo processes: values, every gradient, plans, failures."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmap_torch import I, Mesh, P, R, all_gather, make_mesh, reduce_scatter, shard_map
from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.errors import KernelError, ShardTypeError
from shardmap_torch.kernels import (
    all_gather_matmul,
    last_plan,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from shardmap_torch.kernels.algorithms import gather_forward
from shardmap_torch.kernels.endpoint import endpoint_of
from shardmap_torch.kernels.executor import Choice
from shardmap_torch.kernels.planner import Fabric
from shardmap_torch.kernels.transport import GlooTransport, run
from tests.kernels.support.calls import (
    BALANCED,
    CALLS,
    SHAPES,
    Run,
    body,
    gather_call,
    normal,
    values_and_gradients,
)
from tests.support.fuzzing import sampled
from tests.support.golden import told
from tests.support.pool import Pool

Gloo = Callable[[int], Pool]
every_size = pytest.mark.parametrize("size", sampled((2, 3, 4), 3))

FAST_LINK = Fabric(latency=1e-6, bandwidth=1e12, flops=6e9)
LOOPBACK = Fabric(latency=1e-6, bandwidth=1e8, flops=6e9, overlap=0.0)


def random_cases(seed: int) -> Iterator[tuple[Any, int, bool]]:
    """Shapes, chunks and whether to save, the same on every rank."""
    draw = random.Random(seed)
    for _ in range(12):
        leading = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 3)))
        features = draw.randint(1, 6)
        dim = draw.randint(-len(leading) - 1, len(leading))
        tokens = math.prod(leading)  # matmul_all_reduce splits these, whatever the dim is.
        rows = min(tokens, features) if dim in (-1, len(leading)) else tokens
        yield (leading, features, dim), draw.randint(1, min(rows, 5)), draw.random() < 0.5


def compare_with_unfused(name: str, seed: int) -> list[tuple[str, float]]:
    """The largest difference from the unfused composition, case by case."""
    fixed = [(*case, True) for case in itertools.product(SHAPES, (1, 3), (False, True))]
    drawn = [(*case, False) for case in random_cases(seed)]
    worst = []
    with body():
        for shape, chunks, save, twice in fixed + drawn:
            results = []
            for overlap in ("require", "off"):
                call, operands = CALLS[name](shape, overlap, chunks, save)
                results.append(values_and_gradients(call, operands, twice=twice))
                plan = last_plan()
                assert plan is not None
                assert (plan.choice is None) == (overlap == "off"), plan
            difference = max(
                float((ours - truth).abs().max())
                for ours, truth in zip(*results, strict=True)
                if ours.shape == truth.shape or pytest.fail(f"{ours.shape} != {truth.shape}")
            )
            worst.append((f"{shape} chunks={chunks} save={save}", difference))
    return worst


@every_size
@pytest.mark.parametrize("name", CALLS)
def test_values_and_derivatives_equal_the_unfused_composition(
    gloo: Gloo, name: str, size: int
) -> None:
    for rank in gloo(size).run(compare_with_unfused, name, size):
        assert max(rank, key=lambda case: case[1])[1] < 1e-10


def compare_under_func_grad(name: str) -> list[tuple[str, float]]:
    """Compares by torch.func.grad, and by one torch.func.grad of another."""
    worst = []
    with body():
        for shape, save in itertools.product(SHAPES, (False, True)):
            results = []
            for overlap in ("require", "off"):
                call, operands = CALLS[name](shape, overlap, 2, save)

                def loss(*leaves: Tensor, call: Run = call) -> Tensor:
                    return sum((out.pow(2).sum() for out in call(*leaves)), torch.zeros(()))

                def slope(*leaves: Tensor, loss: Callable[..., Tensor] = loss) -> Tensor:
                    grads = torch.func.grad(loss, tuple(range(len(leaves))))(*leaves)
                    return sum((grad.pow(2).sum() for grad in grads), torch.zeros(()))

                every = tuple(range(len(operands)))
                grads = list(torch.func.grad(loss, every)(*operands))
                plan = last_plan()
                assert plan is not None
                is_overlapped = plan.choice is not None
                communicates = save or name != "matmul_all_reduce"  # For dst=I nothing is sent.
                assert plan.op.endswith("backward") == (overlap == "require" and communicates)
                assert is_overlapped == (overlap == "require")
                results.append([*grads, *torch.func.grad(slope, every)(*operands)])
            difference = max(
                float((ours - truth).abs().max() / (1 + truth.abs().max()))
                for ours, truth in zip(*results, strict=True)
            )
            worst.append((f"{shape} save={save}", difference))
    return worst


@pytest.mark.sample(1)
@every_size
@pytest.mark.parametrize("name", CALLS)
def test_torch_func_grad_overlaps_and_equals_the_unfused_composition(
    gloo: Gloo, name: str, size: int
) -> None:
    for rank in gloo(size).run(compare_under_func_grad, name):
        assert max(rank, key=lambda case: case[1])[1] < 1e-10


def only_some_need_gradients() -> list[float]:
    """Every subset of operands that needs a gradient, saved or gathered again."""
    differences = []
    with body():
        subsets = itertools.product((0, 1), repeat=5)
        for needs, save, used in itertools.product(subsets, (0, 1), (0, 1)):
            grads = []
            for overlap in ("require", "off"):
                call, operands = gather_call(SHAPES[1], overlap, 2, bool(save))
                leaves = [x.requires_grad_(bool(n)) for x, n in zip(operands, needs, strict=True)]
                out = call(*leaves)[used]  # The other output has no cotangent at all.
                reached = (leaves[0], leaves[1 + used], leaves[3 + used])
                needs_grad = [x for x in reached if x.requires_grad]
                if needs_grad:
                    grads.append(torch.autograd.grad(out.pow(2).sum(), needs_grad))
            for ours, truth in zip(*grads, strict=True) if grads else ():
                differences.append(float((ours - truth).abs().max()))
    return differences


def test_frozen_operands_and_unused_outputs_leave_the_other_gradients_right(gloo: Gloo) -> None:
    for differences in gloo(2).run(only_some_need_gradients):
        assert len(differences) > 50
        assert max(differences) < 1e-10


def results_of_repeats(dtype: torch.dtype) -> bool:
    """Returns whether five runs of everything agree bit for bit."""
    runs = []
    with body():
        for _ in range(5):
            tensors: list[Tensor] = []
            for make in CALLS.values():
                call, operands = make(SHAPES[1], "require", 2, True)
                low = [operand.to(dtype) for operand in operands]
                tensors += values_and_gradients(call, low, twice=False)
            runs.append(tensors)
    return all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_are_equal_bit_for_bit_from_run_to_run(gloo: Gloo, dtype: torch.dtype) -> None:
    assert all(gloo(3).run(results_of_repeats, dtype))


def saved_bytes(save_gathered: bool) -> dict[str, int]:
    """Bytes that a call holds until its backward, beside the operands' own."""
    packed: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        packed[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    x, w = normal(1, 6, 5, 4).requires_grad_(), normal(2, 4, 3).requires_grad_()
    with body(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = all_gather_matmul(x, w, "tp", overlap="require", save_gathered=save_gathered)
    torch.autograd.grad(y.sum(), (x, w))
    for operand in (x, w):
        assert packed.pop(operand.untyped_storage().data_ptr()) == operand.nbytes
    return {"extra": sum(packed.values()), "shard": x.nbytes}


@pytest.mark.parametrize("size", [2, 3])
def test_saving_the_gathered_operand_costs_a_shard_for_every_rank(gloo: Gloo, size: int) -> None:
    for found in gloo(size).run(saved_bytes, True):
        assert found["extra"] == size * found["shard"]
    for found in gloo(size).run(saved_bytes, False):
        assert found["extra"] == 0


def low_precision_errors(dtype: torch.dtype) -> list[float]:
    """Errors of the kernels' values and gradients against float64, in units of the dtype's eps."""
    eps = torch.finfo(dtype).eps
    errors = []
    with body():
        for make in CALLS.values():
            call, operands = make(SHAPES[1], "require", 2, True)
            low = [operand.to(dtype) for operand in operands]
            exact, _ = make(SHAPES[1], "off", 2, True)
            truth = values_and_gradients(exact, [x.double() for x in low], twice=False)
            actual = values_and_gradients(call, low, twice=False)
            errors += [
                float((ours.double() - true).abs().max() / true.abs().max() / eps)
                for ours, true in zip(actual, truth, strict=True)
            ]
    return errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_within_a_few_roundings_of_float64(gloo: Gloo, dtype: torch.dtype) -> None:
    for errors in gloo(2).run(low_precision_errors, dtype):
        # The cotangents are rounded too (half an eps), products once, sums over ranks once.
        assert max(errors) < 4


def plans() -> dict[str, str]:
    found = {}
    size = dist.get_world_size()

    def explain(name: str, rows: int, **options: Any) -> None:
        all_gather_matmul(torch.ones(rows, 8), torch.ones(8, 64), "tp", **options)
        found[name] = str(last_plan())

    with body():
        explain("pays", 512)
        explain("too small", 127)
        explain("off", 512, overlap="off")
        explain("small but required", 2, overlap="require")
        with torch.autocast("cpu", torch.bfloat16):
            explain("autocast", 512)
        torch.func.vmap(lambda x: all_gather_matmul(x, torch.ones(4, 2), "tp"))(torch.ones(2, 3, 4))
        found["vmap"] = str(last_plan())
        all_gather_matmul(torch.ones(512, 8), torch.ones(8, 64), "tp")
        x = torch.ones(512, 8, requires_grad=True)
        all_gather_matmul(x, torch.ones(8, 64), "tp").sum().backward()
        found["backward"] = str(last_plan())
        matmul_all_reduce(torch.ones(512 * size, 8), torch.ones(8, 64), "tp", dst=I)
        found["reduce"] = str(last_plan())
        x, w = torch.ones(512 * size, 8, requires_grad=True), torch.ones(8, 64)
        matmul_all_reduce(x, w, "tp", dst=R).sum().backward()
        found["backward of reduce"] = str(last_plan())
    with body(FAST_LINK):
        explain("nothing to hide", 512)
    with body(LOOPBACK):
        explain("cannot be hidden", 512)
    return found


def test_the_plan_tells_what_ran_and_why(gloo: Gloo) -> None:
    gather = "all_gather_matmul over 'tp': "
    assert gloo(2).run(plans)[0] == {
        "pays": gather + "gather/ring/4 (the model predicts +79% from overlap)",
        "too small": gather + "unfused (a rank's block has 127 rows; a chunk needs 128)",
        "off": gather + "unfused (overlap is off)",
        "small but required": gather
        + "gather/ring/1 (the model predicts +17% from overlap, required)",
        "autocast": gather + "unfused (autocast is active)",
        "vmap": gather + "unfused (a transform other than torch.func.grad and vjp is active)",
        "backward": "all_gather_matmul backward over 'tp': "
        "scatter/direct/4 (the model predicts +79% from overlap, required)",
        "reduce": "matmul_all_reduce over 'tp': "
        "reduce/direct/4 (the model predicts +6% from overlap)",
        "backward of reduce": "matmul_all_reduce backward over 'tp': "
        "sum/direct/4 (the model predicts +6% from overlap, required)",
        "nothing to hide": gather + "unfused (the model predicts +1% from overlap)",
        "cannot be hidden": gather + "unfused (the model predicts +0% from overlap)",
    }


def mistakes() -> list[str]:
    x, w = torch.ones(4, 3), torch.ones(3, 2)
    calls: list[Callable[[], Any]] = [
        lambda: all_gather_matmul(x, w.t(), "tp"),
        lambda: all_gather_matmul(x, (w, w), "tp", bias=(torch.ones(2),)),
        lambda: all_gather_matmul(x, w, "tp", bias=torch.ones(3)),
        lambda: all_gather_matmul(x, w, "tp", chunks=5),
        lambda: all_gather_matmul(x, w, "tp", overlap="always"),  # type: ignore[call-overload]
        lambda: all_gather_matmul(x.to(torch.int32), w, "tp", overlap="require"),
    ]
    texts = []
    with body():
        for call in calls:
            with pytest.raises(KernelError) as caught:
                call()
            texts.append(str(caught.value))
    return texts


def test_mistakes_are_told_with_their_numbers(gloo: Gloo) -> None:
    assert gloo(2).run(mistakes)[0] == [
        "all_gather_matmul: w has shape [2, 3], but the rows it multiplies have 3 features; pass "
        "[3, m] (a torch.nn.Linear keeps [m, 3]: pass weight.t()).",
        "all_gather_matmul: 2 weights and 1 biases; pass one for each.",
        "all_gather_matmul: bias has shape [3], but the result has 2 columns here; pass [2].",
        "all_gather_matmul over axis 'tp': chunks=5 splits a rank's block of 4 rows; it must "
        "be from "
        "1 to 4.",
        "all_gather_matmul: overlap='always' is none of auto, require, off.",
        "all_gather_matmul over axis 'tp' cannot overlap: the operands are not of one floating "
        'dtype.\nFix: pass overlap="auto" to run the unfused composition where overlap is not '
        "possible.",
    ]


def one_rank_stays_away(timeout: float) -> str:
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    transport = GlooTransport(group, "tp")
    if dist.get_rank() == 1:
        return "stayed away"
    x, w = torch.ones(4, 3), [torch.ones(3, 2)]
    try:
        run(gather_forward(transport, x, w, [None], 0, Choice("gather/ring", 1)))
    except KernelError as error:
        return str(error)
    return "no error"


def test_a_missing_peer_is_named_with_axis_and_step_within_the_timeout(gloo: Gloo) -> None:
    texts = gloo(3).run(one_rank_stays_away, 1.0)
    gloo(3).close()  # What the absent rank did not send is still expected.
    assert texts[1] == "stayed away"
    assert texts[2].startswith(
        "all_gather_matmul over axis 'tp': at step 1, rank 2 receives part 0 of block 1 from "
        "rank 1, and the transfer failed: "
    )
    assert texts[0].startswith("all_gather_matmul over axis 'tp': at step 2, rank 0 receives part ")


def dense_mlp(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x @ w1) @ w2


def mlp_on(mesh: Mesh, overlap: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Value and global gradients of a tensor-parallel MLP on `mesh`, and those of the dense one."""

    def body(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        hidden = all_gather_matmul(x, w1, "tp", overlap=overlap)
        return matmul_reduce_scatter(torch.nn.functional.gelu(hidden), w2, "tp", overlap=overlap)

    specs = (P("tp"), P(None, "tp"), P("tp"))
    mapped = shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("tp"))
    generator = torch.Generator().manual_seed(0)
    sizes = ((12, 5), (5, 24), (24, 5))
    leaves = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in sizes]
    results = []
    for function in (mapped, dense_mlp):
        operands = [leaf.clone().requires_grad_() for leaf in leaves]
        out = function(*operands)
        whole = out.full_tensor() if isinstance(out, DTensor) else out
        grads = torch.autograd.grad(whole.pow(2).sum(), operands)
        results.append([whole.detach(), *grads])
    return results[0], results[1]


def mlp_difference(overlap: str) -> float:
    mesh = make_mesh((dist.get_world_size(),), ("tp",))
    endpoint = endpoint_of(ProcessGroupBackend(mesh), ("tp",))
    endpoint._fabrics[torch.float64] = BALANCED
    ours, truth = mlp_on(mesh, overlap)
    return max(float((a - b).abs().max()) for a, b in zip(ours, truth, strict=True))


@pytest.mark.parametrize("size", sampled((2, 4), 2))
@pytest.mark.parametrize("overlap", ["require", "auto", "off"])
def test_an_mlp_of_overlapped_layers_equals_the_dense_one_on_processes(
    gloo: Gloo, size: int, overlap: str
) -> None:
    assert max(gloo(size).run(mlp_difference, overlap)) < 1e-10


@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
def test_an_mlp_of_overlapped_layers_equals_the_dense_on_a_simulated_mesh(simulate: Any) -> None:
    mesh = make_mesh((4,), ("tp",), kind="simulated", simulate=simulate)
    ours, truth = mlp_on(mesh, "auto")
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    with told(KernelError):
        mlp_on(mesh, "require")


def unfused_gather(x: Tensor, w: Tensor) -> Tensor:
    return all_gather(x, "tp", dst=R) @ w


def unfused_scatter(x: Tensor, w: Tensor) -> Tensor:
    return reduce_scatter(x @ w, "tp")


GATHER_SPECS = (P("tp"), P(None, "tp"))
SCATTER_SPECS = (P(None, "tp"), P("tp"))


@pytest.mark.parametrize(
    ("bodies", "in_specs", "wrong_out"),
    [
        pytest.param(
            (lambda x, w: all_gather_matmul(x, w, "tp"), unfused_gather),
            GATHER_SPECS,
            P(),
            id="the product varies with the columns of w",
        ),
        pytest.param(
            (lambda x, w: matmul_reduce_scatter(x, w, "tp"), unfused_scatter),
            SCATTER_SPECS,
            P(),
            id="the block varies",
        ),
    ],
)
def test_the_checker_rejects_what_it_rejects_of_the_composition(
    bodies: tuple[Callable[..., Tensor], ...], in_specs: tuple[P, ...], wrong_out: P
) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    mapped = [shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=wrong_out) for body in bodies]
    complaints = []
    for function in mapped:
        with pytest.raises(ShardTypeError) as caught:
            function(torch.ones(4, 4), torch.ones(4, 4))
        complaints.append(str(caught.value).splitlines()[1])
    overlapped, composition = complaints
    assert overlapped == composition
    assert "but the result varies over it" in composition
