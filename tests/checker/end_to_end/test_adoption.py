"""Programs of people who tried the library, by the files they came in, against one device.

Those whose files are not named here have tests of their own: repairs in `verify/test_repairs.py`,
closures in `test_transform.py`, mixed trees in `optim/test_norm.py`, random numbers in
`run/test_drawing.py`, custom backwards and hooks in `spmd/test_user_code.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import P, ShardTypeError, shard_map
from tests.checker.support.one_device import ONE, RANKS, numbers
from tests.checker.support.outcomes import outcome
from tests.support.fuzzing import sampled

# torch's own forward mode scripts some decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

Body = Callable[..., Any]

X: Final = numbers(4, 8)
W: Final = numbers(8)
CACHE: Final = (numbers(1, 2, 8, 4), numbers(1, 2, 1, 4), torch.tensor(2))
HEADS: Final = P(None, "a")


def one_hot_in_a_gradient(x: Tensor) -> Tensor:
    def loss(x: Tensor) -> Tensor:
        return (functional.one_hot(x.topk(1, -1)[1], 8)[:, 0] * x * x).sum()

    found: Tensor = torch.func.grad(loss)(x)
    return found


def cache_in_place(c: Tensor, k: Tensor, pos: Tensor) -> Tensor:
    c = c.clone()
    c[:, :, pos : pos + 1] = k
    return c


WRITES: Final = (CACHE, (HEADS, HEADS, P()), HEADS)

PROGRAMS: Final[dict[str, tuple[Body, Sequence[Tensor], Any, Any]]] = {
    "one_hot of topk": (lambda x: functional.one_hot(x.topk(2, -1)[1], 8), (X,), P("a"), P("a")),
    "one_hot in a gradient": (one_hot_in_a_gradient, (X,), P("a"), P("a")),
    "cache_write_global in place": (cache_in_place, *WRITES),
    "Jacobian by columns": (
        lambda x, w: torch.func.jacfwd(lambda w: (x @ w).tanh())(w),
        *((X, W), (P("a"), P()), P("a")),
    ),
}


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.sample(13)
@pytest.mark.parametrize("check", sampled([True, "global"], "global"))
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_a_user_is_accepted_and_right(name: str, check: Any) -> None:
    body, args, in_specs, out_specs = PROGRAMS[name]
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    found = outcome(shard_map(body, mesh=RANKS, check=check, **specs), args)
    assert_equal(found, outcome(shard_map(body, mesh=ONE, **specs), args))


def test_a_slice_scatter_at_the_position_of_a_tensor_is_refused_with_another_way() -> None:
    """`cache[:, :, pos : pos + 1] = k` does the same, and is accepted."""
    _, args, in_specs, out_specs = PROGRAMS["cache_write_global in place"]
    f = shard_map(
        lambda c, k, pos: torch.slice_scatter(c, k, 2, pos, pos + 1),
        mesh=RANKS,
        in_specs=in_specs,
        out_specs=out_specs,
    )
    with pytest.raises(ShardTypeError, match="asks for a plain Python number from a tensor"):
        f(*args)
