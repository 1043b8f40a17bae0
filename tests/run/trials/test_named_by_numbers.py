"""check="global": mistakes that numbers, or where a value comes from, name; and their repairs."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    all_gather,
    all_reduce,
    axis_index,
    check_program,
    convert,
    make_mesh,
    shard_map,
)
from shardmap_torch.optim import global_norm
from tests.checker.support import daily_layers
from tests.checker.support.outcomes import outcome
from tests.checker.support.printed import RIGHT, Source, fate_of
from tests.support.golden import hold

Body = Callable[..., Any]

MESH: Final = make_mesh((2,), ("tp",), kind="simulated")
IDS: Final = torch.tensor([[0, 5, 3, 6], [7, 2, 2, 1]])


def values(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def best(x: Tensor, head: Tensor, start: Callable[[int], Any], op: Any, other: int) -> Tensor:
    logits = convert(x, "tp", src=I, dst=R) @ head
    own, at = logits.max(-1)
    top = all_reduce(own, "tp", op="max", dst=I)
    at = torch.where(own == top, at + start(logits.shape[-1]), other)
    return all_reduce(at, "tp", op=op, dst=I)


def indices_within_the_shard(x: Tensor, head: Tensor) -> Tensor:
    return best(x, head, lambda n: 0, "sum", 0)


def indices_of_one_device(x: Tensor, head: Tensor) -> Tensor:
    return best(x, head, lambda n: axis_index("tp") * n, "min", 10**9)


def indices_of_gathered(x: Tensor, head: Tensor) -> Tensor:
    logits = convert(x, "tp", src=I, dst=R) @ head
    return all_gather(logits, "tp", dim=1, dst=I).argmax(-1)


def rows_of_other_ranks_are_added(table: Tensor, ids: Tensor) -> Tensor:
    n = table.shape[0]
    own = (ids - axis_index("tp") * n).clamp(0, n - 1)
    return all_reduce(functional.embedding(own, table), "tp", dst=I)


def rows_by_index_of_other_ranks_are_added(table: Tensor, ids: Tensor) -> Tensor:
    n = table.shape[0]
    return all_reduce(table[(ids - axis_index("tp") * n).clamp(0, n - 1)].tanh(), "tp", dst=I)


def owned_rows(table: Tensor, ids: Tensor) -> Tensor:
    n = table.shape[0]
    first = axis_index("tp") * n
    rows = functional.embedding((ids - first).clamp(0, n - 1), table)
    owned = (ids >= first) & (ids < first + n)
    return all_reduce(torch.where(owned.unsqueeze(-1), rows, 0.0), "tp", dst=I)


def owned_rows_of_tanh(table: Tensor, ids: Tensor) -> Tensor:
    return owned_rows(table.tanh(), ids)


def norm_of_norms(x: Tensor) -> Tensor:
    norm: Tensor = torch.stack([x.norm(), x.norm()]).norm()
    return all_reduce(norm, "tp", dst=I)


def root_of_squares(x: Tensor) -> Tensor:
    return all_reduce(2 * x.square().sum(), "tp", dst=I).sqrt()


def norm_of_the_library(x: Tensor) -> Tensor:
    norm: Tensor = global_norm([x, x], [P("tp"), P("tp")])
    return norm


def turned(x: Tensor, positions: Tensor) -> Tensor:
    return x * positions.to(x.dtype)[:, None].cos()


def positions_of_a_shard(x: Tensor) -> Tensor:
    return turned(x, torch.arange(x.shape[0]))


def positions_of_one_device(x: Tensor) -> Tensor:
    return turned(x, torch.arange(x.shape[0]) + axis_index("tp") * x.shape[0])


def triangle_of_a_shard(x: Tensor) -> Tensor:
    keys = all_gather(x, "tp", dim=0, dst=R)
    return (x @ keys.T * torch.ones(x.shape[0], keys.shape[0]).tril()) @ keys


def triangle_of_scores(x: Tensor) -> Tensor:
    keys = all_gather(x, "tp", dim=0, dst=R)
    return (x @ keys.T).triu() @ keys


def compared(x: Tensor, at: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    keys = all_gather(x, "tp", dim=0, dst=R)
    rows = torch.arange(x.shape[0]) + axis_index("tp") * x.shape[0]
    mask = at(rows[:, None], torch.arange(keys.shape[0]))
    return torch.where(mask, x @ keys.T, 0.0) @ keys


ROW, COLUMN = P("tp"), P(None, "tp")

Case = tuple[Any, P, tuple[Any, ...], Body, tuple[Body, ...]]


def triangle(cut: Body, at: Body) -> Case:
    right = (lambda x: compared(x, at),)
    return ROW, ROW, (values(8, 4),), lambda x: cut(x @ x.T) @ x, right


CASES: Final[dict[Body, Case]] = {
    indices_within_the_shard: (
        (P(), COLUMN),
        P(),
        (values(6, 4), values(4, 8)),
        lambda x, head: (x @ head).argmax(-1),
        (indices_of_one_device, indices_of_gathered),
    ),
    rows_of_other_ranks_are_added: (
        (ROW, P()),
        P(),
        (values(8, 4), IDS),
        lambda table, ids: table[ids],
        (owned_rows,),
    ),
    rows_by_index_of_other_ranks_are_added: (
        (ROW, P()),
        P(),
        (values(8, 4), IDS),
        lambda table, ids: table[ids].tanh(),
        (owned_rows_of_tanh,),
    ),
    norm_of_norms: (
        ROW,
        P(),
        (values(8, 4),),
        lambda x: torch.cat([x, x]).norm(),
        (root_of_squares, norm_of_the_library),
    ),
    positions_of_a_shard: (
        ROW,
        ROW,
        (values(8, 4),),
        lambda x: turned(x, torch.arange(8)),
        (positions_of_one_device,),
    ),
    triangle_of_a_shard: triangle(torch.tril, torch.ge),
    triangle_of_scores: triangle(torch.triu, torch.le),
}
"""Of each mistake specs, arguments, what one device computes, and what its text asks for."""


def mapped(body: Body, case: Case) -> Body:
    return shard_map(body, mesh=MESH, in_specs=case[0], out_specs=case[1], check="global")


@pytest.mark.parametrize("body", CASES, ids=lambda body: body.__name__)
def test_the_mistake_is_named_and_its_repair_is_what_one_device_computes(body: Body) -> None:
    case = CASES[body]
    with pytest.raises(ShardTypeError) as error:
        check_program(mapped(body, case), *case[2])
    hold("named_by_numbers.txt", body.__name__, str(error.value))
    for repaired in case[4]:
        found = outcome(mapped(repaired, case), case[2])
        for mine, other in zip(found, outcome(case[3], case[2]), strict=True):
            torch.testing.assert_close(mine, other)


HALO: Final = """\
def halo(x, w):
    beside = {}
    both = torch.cat([beside, x], 0)
    return both[:-1] @ w + both[1:]
in_specs = (P('tp'), P())
out_specs = P('tp')
"""

SENT: Final = {
    "a halo sent down": (
        "shift(x[-1:], 'tp', -1, wrap=False)",
        "shift(x[-1:], 'tp', 1, wrap=False)",
    ),
    "a halo by pairs": (
        "ppermute(x[-1:], 'tp', [(at, at - 1) for at in range(1, axis_size('tp'))])",
        "ppermute(x[-1:], 'tp', [(at - 1, at) for at in range(1, axis_size('tp'))])",
    ),
}


@pytest.mark.usefixtures("repairs")
@pytest.mark.parametrize("name", SENT)
def test_a_value_sent_the_other_way_is_named_with_the_way_that_is_right(name: str) -> None:
    args = [values(8, 3), values(3, 3)]
    wrong, right = (
        Source("halo", HALO.format(sent), daily_layers, args, False) for sent in SENT[name]
    )
    fate = fate_of(wrong, right)
    assert fate is not None
    hold("named_by_numbers.txt", name, fate.message)
    assert fate.fate == RIGHT
