"""A layer beside the same on one device: values and the gradient of every leaf, on every mesh."""

import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardmap_torch import I, Mesh, P, R, convert, device_put, full, make_mesh, shard_map, trace
from tests.support.fuzzing import sized
from tests.support.pool import Gloo

EXACT = 1e-10  # float64: the same numbers added in another order
AXES = ("dp", "tp")


@dataclass(frozen=True)
class Case:
    """A layer in a body, and the same on one device.

    Attributes:
        body: takes local tensors and returns one.
        reference: the same of global tensors.
        in_specs: of the inputs.
        out_spec: of the result.
        inputs: global; gradients are taken for those that are floating.
        sizes: of the mesh axes "dp" and "tp".
    """

    body: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    in_specs: tuple[P, ...]
    out_spec: P
    inputs: tuple[Tensor, ...]
    sizes: tuple[int, int] = (2, 2)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def over_dp(weight: Tensor) -> Tensor:
    """For a weight that each rank of "dp" uses on other rows of the batch."""
    return convert(weight, "dp", src=I, dst=R)


def outcome(
    f: Callable[..., Tensor], case: Case, place: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """The value, and the gradient of every floating input behind a random cotangent."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in case.inputs]
    y = f(*leaves)
    smooth = [x for x in leaves if x.requires_grad]
    cotangent = place(random(*y.shape, seed=7))
    grads = torch.autograd.grad(y, smooth, cotangent, allow_unused=True, materialize_grads=True)
    found: list[Tensor] = full([y.detach(), *grads])
    return found


def expected(case: Case) -> list[Tensor]:
    return outcome(case.reference, case, lambda c: c)


def on_mesh(case: Case, mesh: Mesh, check: Any = "global") -> list[Tensor]:
    f = mapped(case, mesh, check)
    return outcome(f, case, lambda c: device_put(c, mesh, P(*case.out_spec.entries)))


def mapped(case: Case, mesh: Mesh, check: Any = "global") -> Callable[..., Tensor]:
    f: Callable[..., Tensor] = shard_map(
        case.body, mesh=mesh, in_specs=case.in_specs, out_specs=case.out_spec, check=check
    )
    return f


def assert_equals_one_device(case: Case, simulate: Any) -> None:
    mesh = make_mesh(case.sizes, AXES, kind="simulated", simulate=simulate)
    assert_close(on_mesh(case, mesh), expected(case))


def assert_equal_on_processes(cases: Mapping[str, Case], module: str, gloo: Gloo) -> None:
    """Runs all cases of a module, by its table, in one call of each pool: over "tp" only."""
    by_size: dict[int, list[str]] = {}
    for name, case in cases.items():
        by_size.setdefault(case.sizes[1], []).append(name)
    for size, names in by_size.items():
        for found in gloo(size).run(_in_worker, module, size, names, timeout=200):
            for name in names:
                assert_close(found[name], expected(cases[name]))


def _in_worker(module: str, size: int, names: Sequence[str]) -> dict[str, list[Tensor]]:
    cases: Mapping[str, Case] = importlib.import_module(module).CASES
    mesh, check = make_mesh((1, size), AXES), sized(True, "global")
    return {name: on_mesh(cases[name], mesh, check) for name in names}


def assert_close(actual: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert len(actual) == len(wanted)
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=EXACT, atol=EXACT)


Budget = dict[str, int]


def budget(case: Case, axis: str = "tp") -> tuple[Budget, Budget]:
    """The collectives over an axis that send something, forward and backward, by name."""
    mesh = make_mesh(case.sizes, AXES, kind="simulated")
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in case.inputs]
    counts: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for equation in trace(mapped(case, mesh), *leaves).collectives:
        assert equation.collective is not None
        if axis in equation.collective.axes and equation.sent:
            counts[equation.backward][equation.collective.name] += 1
    return dict(counts[0]), dict(counts[1])
