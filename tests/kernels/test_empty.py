"""The kernels on operands of one dim, and on operands without elements."""

from collections.abc import Callable
from typing import Any

from shardmap_torch import R
from shardmap_torch.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from tests.kernels.support.calls import Run, body, normal, values_and_gradients
from tests.support.pool import Gloo

EMPTY: tuple[tuple[str, Callable[[Any], Run], list[tuple[int, ...]]], ...] = (
    ("no rows", lambda how: gathered(how), [(0, 4), (4, 3)]),
    ("no tokens in a block", lambda how: gathered(how, dim=1), [(0, 2, 4), (4, 3)]),
    ("no rows, again", lambda how: gathered(how, save_gathered=False), [(0, 4), (4, 3)]),
    ("no features", lambda how: gathered(how), [(2, 0), (0, 3)]),
    ("no columns", lambda how: gathered(how), [(2, 4), (4, 0)]),
    ("no features to scatter", lambda how: scattered(how), [(6, 0), (0, 3)]),
    ("no rows to scatter", lambda how: scattered(how), [(0, 4), (4, 3)]),
    ("no columns to sum", lambda how: summed(how), [(2, 4), (4, 0)]),
    ("one dim to scatter", lambda how: scattered(how), [(4,), (4, 6)]),
    ("one dim to sum", lambda how: summed(how), [(4,), (4, 3)]),
)


def gathered(overlap: Any, **options: Any) -> Run:
    return lambda x, w: (all_gather_matmul(x, w, "tp", overlap=overlap, **options),)


def scattered(overlap: Any) -> Run:
    return lambda x, w: (matmul_reduce_scatter(x, w, "tp", overlap=overlap),)


def summed(overlap: Any) -> Run:
    return lambda x, w: (matmul_all_reduce(x, w, "tp", dst=R, overlap=overlap),)


def differences_of_empty_operands() -> dict[str, float]:
    found = {}
    with body():
        for name, call, shapes in EMPTY:
            operands = [normal(seed, *shape) for seed, shape in enumerate(shapes)]
            ours, truth = (
                values_and_gradients(call(how), operands, twice=False) for how in ("require", "off")
            )
            assert [x.shape for x in ours] == [x.shape for x in truth]
            pairs = zip(ours, truth, strict=True)
            found[name] = sum(float((a - b).abs().sum()) for a, b in pairs)
    return found


def test_operands_of_one_dim_or_without_elements_equal_the_unfused_composition(gloo: Gloo) -> None:
    for found in gloo(3).run(differences_of_empty_operands):
        assert len(found) == len(EMPTY)
        assert max(found.values()) < 1e-10
