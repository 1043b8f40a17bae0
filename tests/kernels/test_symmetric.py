"""The adapter of torch's fused operators, with torch's references registered for the CPU."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch import I
from shardmap_torch.kernels import (
    all_gather_matmul,
    last_plan,
    matmul_all_reduce,
    matmul_reduce_scatter,
    symmetric,
)
from shardmap_torch.kernels.endpoint import Endpoint, endpoint_of
from shardmap_torch.kernels.planner import ASSUMED_GPU
from shardmap_torch.kernels.symmetric import OPERATORS, GpuId
from tests.kernels.support.calls import body, normal, values_and_gradients
from tests.kernels.support.symmetric import gather_of, scatter_of
from tests.support.pool import Gloo

SIGNATURES: Final[dict[str, dict[str, str]]] = {
    "fused_all_gather_matmul": {
        "A": "Tensor",
        "Bs": "List[Tensor]",
        "gather_dim": "int",
        "group_name": "str",
        "return_A": "bool",
    },
    "fused_matmul_reduce_scatter": {
        "A": "Tensor",
        "B": "Tensor",
        "reduce_op": "str",
        "scatter_dim": "int",
        "group_name": "str",
    },
}
"""The arguments that we pass, by name and type; torch may have others with defaults."""


def test_the_installed_torch_has_the_operators_for_cuda_with_our_arguments() -> None:
    assert symmetric.lacking("cuda") is None
    assert symmetric.lacking("cpu") == "symm_mem::fused_all_gather_matmul does not run on cpu"


def test_the_installed_operators_take_our_arguments() -> None:
    for name, ours in SIGNATURES.items():
        arguments = getattr(torch.ops.symm_mem, name).default._schema.arguments
        theirs = [(each.name, str(each.type)) for each in arguments]
        assert theirs[: len(ours)] == list(ours.items())
        assert all(each.has_default_value() for each in arguments[len(ours) :])


def test_an_operator_that_this_torch_lacks_is_named() -> None:
    with mock.patch.object(symmetric, "OPERATORS", ("fused_nothing",)):
        assert symmetric.lacking("cuda") == "this torch has no operator symm_mem::fused_nothing"
    with mock.patch("importlib.import_module", side_effect=ImportError):
        assert symmetric.lacking("cuda") == "this torch has none"


class Operators:
    """torch's own references of the operators, on the CPU; they check what CUDA's check."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.calls: list[str] = []
        self._torch: Any = importlib.import_module("torch.distributed._symmetric_memory")

    def gather(
        self, a: Tensor, bs: Sequence[Tensor], gather_dim: int, name: str, **options: bool
    ) -> tuple[Tensor, list[Tensor]]:
        self._check(a, gather_dim, name)
        assert options.get("return_A", True)  # torch leaves out what equals the default.
        run: Any = self._torch._fused_all_gather_matmul_fallback
        full, outs = run(a, bs, gather_dim, name, **options)
        return full, outs

    def scatter(self, a: Tensor, b: Tensor, reduce_op: str, scatter_dim: int, name: str) -> Tensor:
        self._check(a, scatter_dim, name)
        run: Any = self._torch._fused_matmul_reduce_scatter_fallback
        block: Tensor = run(a, b, reduce_op, scatter_dim, name)
        return block

    def _check(self, a: Tensor, dim: int, name: str) -> None:
        assert name == str(self.group.group_name)
        assert 0 <= dim < a.dim() - 1
        assert a.movedim(dim, 0).is_contiguous()
        self.calls.append("")


@contextmanager
def fused_body() -> Iterator[tuple[Operators, Endpoint]]:
    """A body whose axis 'tp' has a GPU's endpoint, and fused operators that run on the CPU."""
    library = torch.library.Library("symm_mem", "IMPL")
    with body() as backend:
        endpoint = endpoint_of(backend, ("tp",))
        endpoint.device = torch.device("cuda", 0)
        endpoint._refusals.append(None)
        operators = Operators(endpoint.group)
        library.impl(OPERATORS[0], operators.gather, "CPU")
        library.impl(OPERATORS[1], operators.scatter, "CPU")
        try:
            yield operators, endpoint
        finally:
            library._destroy()


def compare() -> list[float]:
    """Values, first and second gradients beside the composition's, and strided operands."""
    symmetric.lacking("cuda")
    found = []
    with fused_body() as (operators, _):
        for make in (gather_of, scatter_of):
            for dim, twice in ((0, False), (1, False), (-2, False), (0, True)):
                call, operands = make(dim)
                operands[1] = operands[1].t().contiguous().t()
                results = []
                for overlap in ("require", "off"):
                    before = len(operators.calls)
                    assert all(out.is_contiguous() for out in call(*operands, overlap=overlap))
                    results.append(
                        values_and_gradients(
                            lambda *leaves, call=call, overlap=overlap: call(
                                *leaves, overlap=overlap
                            ),
                            operands,
                            twice=twice,
                        )
                    )
                    ran = len(operators.calls) - before
                    assert (ran > 0) == (overlap == "require")
                for ours, truth in zip(*results, strict=True):
                    assert ours.shape == truth.shape
                    found.append(float((ours - truth).abs().max()))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_values_and_gradients_equal_the_composition(gloo: Gloo, size: int) -> None:
    for found in gloo(size).run(compare):
        assert len(found) > 30
        assert max(found) < 1e-10


def plans() -> dict[str, str]:
    symmetric.lacking("cuda")
    x, w = normal(1, 4, 3), normal(2, 3, 2)
    told = {}

    def tell(name: str, call: Callable[..., Any], *operands: Any, **options: Any) -> None:
        call(*operands, "tp", overlap="require", **options)
        told[name] = str(last_plan()).split(" over 'tp': ")[1]

    with fused_body() as (_, endpoint):
        tell("gather", all_gather_matmul, x, w)
        tell("scatter", matmul_reduce_scatter, x, w)
        leaf = x.clone().requires_grad_()
        matmul_reduce_scatter(leaf, w, "tp", overlap="require").sum().backward()
        told["backward"] = str(last_plan())
        tell("reduce", matmul_all_reduce, x, w, dst=I)
        tell("last dim", matmul_reduce_scatter, x, w, dim=1)
        tell("again", all_gather_matmul, x, w, save_gathered=False)
        tell("chunks", all_gather_matmul, x, w, chunks=2)
        assert endpoint.fabric(x.dtype) is not ASSUMED_GPU  # `body` assumed another.
        assert endpoint.fabric(torch.int8) is ASSUMED_GPU
    with fused_body() as (_, endpoint):
        endpoint._refusals[:] = ["ranks 0 and 1 are on different hosts"]
        tell("refused", all_gather_matmul, x, w)
    return told


def test_what_the_operators_cannot_do_our_schedules_do_and_the_plan_tells_why(gloo: Gloo) -> None:
    told = gloo(2).run(plans)[0]
    fused = "symmetric memory/1 (required, and the GPUs share memory)"
    assert {name: plan for name, plan in told.items() if fused in plan} == {
        "gather": fused,
        "scatter": fused,
        "backward": "matmul_reduce_scatter backward over 'tp': " + fused,
    }
    others = {
        name: (plan.split(" ")[0], plan.split("; ")[1])
        for name, plan in told.items()
        if fused not in plan
    }
    because = "not on symmetric memory: "
    assert others == {
        "reduce": ("reduce/direct/1", because + "it has no operator for matmul_all_reduce)"),
        "last dim": ("scatter/direct/1", because + "the last dim is sharded)"),
        "again": ("gather/ring/1", because + "save_gathered=False gathers twice)"),
        "chunks": ("gather/ring/2", because + "chunks are asked for)"),
        "refused": ("gather/ring/1", because + "ranks 0 and 1 are on different hosts)"),
    }


def answers() -> list[object]:
    """Returns what all answer where one rank lacks something, and which checks were made."""
    group = dist.group.WORLD
    assert group is not None
    found: list[object] = []
    for bad in ("lacking", "unreachable", "failing", None):
        asked: list[str] = []

        def check(name: str, bad: str | None = bad, asked: list[str] = asked) -> Any:
            def answer(*_: object) -> str | None:
                asked.append(name)
                return f"{name} on rank 1" if name == bad and dist.get_rank() == 1 else None

            return answer

        with (
            mock.patch.object(symmetric, "lacking", check("lacking")),
            mock.patch.object(symmetric, "unreachable", check("unreachable")),
            mock.patch.object(symmetric, "failing", check("failing")),
            mock.patch.object(GpuId, "of", return_value=GpuId("host", "gpu")),
        ):
            found += [symmetric.refusal(group, torch.device("cuda", 0)), tuple(asked)]
    return found


def test_all_ranks_give_the_answer_of_the_one_that_refuses_and_none_goes_on(gloo: Gloo) -> None:
    checks = ("lacking", "unreachable", "failing")
    expected: list[object] = []
    for made in (1, 2, 3):
        expected += [f"{checks[made - 1]} on rank 1", checks[:made]]
    assert gloo(3).run(answers) == [[*expected, None, checks]] * 3


HERE = GpuId("here", "a")


@pytest.mark.parametrize(
    ("peer", "allowed", "why"),
    [
        (GpuId("here", "b"), None, None),
        (GpuId("there", "b"), None, "ranks 0 and 1 are on different hosts"),
        (GpuId("here", "unseen"), None, "rank 0 does not see the GPU of rank 1"),
        (GpuId("here", "c"), None, "the GPU of rank 0 cannot read that of rank 1"),
        (
            GpuId("here", "a"),
            None,
            "ranks 0 and 1 share a GPU, and TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is not 1",
        ),
        (GpuId("here", "a"), "1", None),
    ],
)
def test_a_gpu_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, peer: GpuId, allowed: str | None, why: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(symmetric, "_gpu", lambda index: "abc"[index])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) == (0, 1))
    if allowed is None:
        monkeypatch.delenv(symmetric.OVERLAPPING, raising=False)
    else:
        monkeypatch.setenv(symmetric.OVERLAPPING, allowed)
    assert symmetric.unreachable(torch.device("cuda", 0), [HERE, peer], 0) == why


def test_a_workspace_that_cannot_be_made_is_a_reason_not_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch.distributed._symmetric_memory as module

    def fail(name: str, min_size: int) -> None:
        raise RuntimeError("CUDA driver error: invalid device ordinal\nat somewhere")

    entered: list[torch.device] = []

    def enter(device: torch.device) -> nullcontext[None]:
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(module, "get_symm_mem_workspace", fail)
    gpu = torch.device("cuda", 1)
    assert symmetric.failing("0", gpu) == (
        "its workspace cannot be made: CUDA driver error: invalid device ordinal"
    )
    monkeypatch.setattr(module, "get_symm_mem_workspace", lambda name, min_size: None)
    assert symmetric.failing("0", gpu) is None
    assert entered == [gpu, gpu]
