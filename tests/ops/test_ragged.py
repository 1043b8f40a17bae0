"""Rows go where data sends them, with their gradients, and what does not match is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    CollectiveError,
    I,
    P,
    ShardMapError,
    ShardTypeError,
    TransformError,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    check_program,
    full,
    local_region,
    make_mesh,
    ragged_all_to_all,
    shard_map,
    trace,
)
from tests.nn.support.cases import (
    AXES,
    Case,
    assert_equal_on_processes,
    assert_equals_one_device,
    expected,
    on_mesh,
    random,
)
from tests.support.golden import told
from tests.support.pool import Gloo

ROWS, ROOM = 6, 9
"""Rows of each of four ranks, and what it has room for."""

TABLE = torch.tensor([[1, 3, 0, 0], [2, 0, 4, 0], [0, 0, 0, 6], [1, 2, 1, 1]])
"""Row s: what rank s of four sends to each."""


def exchanged(x: Tensor, over: Any = "tp") -> Tensor:
    sizes = TABLE[axis_index(over)][: axis_size(over)]  # global strictness tries one rank too
    return ragged_all_to_all(x, over, send_sizes=sizes, length=x.shape[0] * ROOM // ROWS)[0]


def exchanged_in_region(x: Tensor, over: Any) -> Tensor:
    spec = P(over)
    return local_region(
        partial(exchanged, over=over), in_types=(spec,), out_types=spec, trusted=True
    )(x)


def by_hand(x: Tensor) -> Tensor:
    """Gives the four ranks what TABLE sends to each."""
    blocks = [
        own.split([*sizes, ROWS - sum(sizes)])
        for own, sizes in zip(x.split(ROWS), TABLE.tolist(), strict=True)
    ]
    received = [torch.cat([own[rank] for own in blocks]) for rank in range(4)]
    return torch.cat([torch.cat([y, y.new_zeros(ROOM - len(y), 2)]) for y in received])


def routed(x: Tensor) -> Tensor:
    """Sends positive rows to the last rank, and the others to the first: data decides."""
    last = axis_size("tp") - 1
    target = (x[:, 0] > 0).long() * last
    order = target.argsort(stable=True)
    sizes = (target.unsqueeze(1) == torch.arange(last + 1)).sum(0)
    here, received = ragged_all_to_all(x.index_select(0, order), "tp", send_sizes=sizes)
    made = here * torch.where(axis_index("tp") == last, here, here.sum() - here)
    back, _ = ragged_all_to_all(made, "tp", send_sizes=received, length=x.shape[0])
    return back.index_select(0, order.argsort())


def routed_on_one_device(x: Tensor) -> Tensor:
    """Routes over two halves of each "dp" shard; negative rows get a factor of all of them."""
    made = []
    for rows in x.chunk(2) if x.shape[0] == 24 else [x]:
        low = torch.where(rows[:, :1] > 0, torch.zeros_like(rows), rows)
        made.append(torch.where(rows[:, :1] > 0, rows * rows, rows * (low.sum() - rows)))
    return torch.cat(made)


def in_region(x: Tensor) -> Tensor:
    spec = P(("dp", "tp"))
    return local_region(routed, in_types=(spec,), out_types=spec, trusted=True)(x)


BATCH = P(("dp", "tp"))
CASES = {
    "four ranks": Case(
        partial(exchanged_in_region, over="tp"),
        by_hand,
        (P("tp"),),
        P("tp"),
        (random(24, 2),),
        (1, 4),
    ),
    "data": Case(in_region, routed_on_one_device, (BATCH,), BATCH, (random(12, 3),), (1, 2)),
}
SEVERAL = {
    **CASES,
    "two axes as one": Case(
        partial(exchanged_in_region, over=("tp", "dp")),
        by_hand,
        (P(("tp", "dp")),),
        P(("tp", "dp")),
        (random(24, 2),),
        (2, 2),
    ),
    "over one of two axes": Case(
        in_region, routed_on_one_device, (BATCH,), BATCH, (random(24, 3),)
    ),
}


@pytest.mark.parametrize("simulate", ["ranks", "auto"])
@pytest.mark.parametrize("name", SEVERAL)
def test_values_and_gradients_are_those_of_one_device(name: str, simulate: Any) -> None:
    assert_equals_one_device(SEVERAL[name], simulate)


def test_on_processes_values_and_gradients_are_those_of_one_device(gloo: Gloo) -> None:
    assert_equal_on_processes(CASES, __name__, gloo)


def test_on_processes_axes_in_another_order_than_the_mesh_act_as_one(gloo: Gloo) -> None:
    for found in gloo(4).run(_over_both):
        torch.testing.assert_close(found, by_hand(SEVERAL["two axes as one"].inputs[0]))


def _over_both() -> Tensor:
    case = SEVERAL["two axes as one"]
    mesh = make_mesh((2, 2), AXES)
    f = shard_map(case.body, mesh=mesh, in_specs=case.in_specs, out_specs=case.out_spec)
    found: Tensor = full(f(*case.inputs))
    return found


def test_groups_of_processes_may_exchange_different_numbers_of_rows(gloo: Gloo) -> None:
    # Ranks compare what they do at later calls.
    wanted = expected(SEVERAL["over one of two axes"])
    for repeats in gloo(4).run(_in_two_groups):
        for found in repeats:
            torch.testing.assert_close(found, [x.detach() for x in wanted])


def _in_two_groups() -> list[list[Tensor]]:
    mesh = make_mesh((2, 2), AXES)
    return [on_mesh(SEVERAL["over one of two axes"], mesh) for _ in range(3)]


def mapped(body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate=options.pop("simulate", "auto"))
    f: Callable[..., Any] = shard_map(
        body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), **options
    )
    return f


def test_only_sizes_and_rows_are_sent_and_the_backward_sends_rows() -> None:
    f = shard_map(
        lambda x: all_reduce(exchanged(x).sum(), "tp", dst=I),
        mesh=make_mesh((4,), ("tp",), kind="simulated"),
        in_specs=P("tp"),
        out_specs=P(),
    )
    found = [
        (str(each), each.backward)
        for each in trace(f, random(24, 2).requires_grad_()).collectives
        if "ragged" in str(each.collective)
    ]
    assert [backward for _, backward in found] == [False, True]
    assert "ragged_all_to_all('tp', V -> V)" in found[1][0]


def test_equal_sizes_may_be_written_as_numbers() -> None:
    f = mapped(lambda x: ragged_all_to_all(x, "tp", send_sizes=[1, 1], length=2)[0])
    assert f(torch.arange(4.0)).tolist() == [0, 2, 1, 3]


def test_outside_of_a_region_it_is_refused_under_global_strictness() -> None:
    def body(x: Tensor) -> Tensor:
        sizes = [1] * axis_size("tp")
        return ragged_all_to_all(x, "tp", send_sizes=sizes, length=x.shape[0])[0]

    check_program(mapped(body), torch.arange(4.0))
    with pytest.raises(ShardTypeError, match="a literal is not what it is on one device"):
        check_program(mapped(body, check="global"), torch.arange(4.0))


def test_the_result_of_one_rank_is_not_taken_for_its_operand() -> None:
    """Over an axis of one rank collectives are the identity; this one still clears rows."""
    mesh = make_mesh((1, 2), ("ep", "dp"), kind="simulated")
    f = shard_map(
        lambda x: ragged_all_to_all(x, "ep", send_sizes=[1], length=x.shape[0])[0],
        mesh=mesh,
        in_specs=P(("ep", "dp")),
        out_specs=P(("ep", "dp")),
        check="global",
    )
    with pytest.raises(ShardTypeError, match="its rows go to the ranks that data names"):
        check_program(f, torch.arange(4.0))


@pytest.mark.parametrize("check", [True, "global"])
def test_a_sum_over_ranks_that_is_pending_cannot_be_exchanged(check: Any) -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        return ragged_all_to_all((x @ w).relu() * 0 + x @ w, "tp", send_sizes=[1, 1], length=2)[0]

    mesh = make_mesh((2,), ("tp",), kind="simulated")
    specs = P(partial="tp"), P()
    f = shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("tp"), check=check)
    with pytest.raises(ShardTypeError):
        check_program(f, torch.ones(2, 2), torch.ones(2, 2))


def sizes_of_ranks(*table: list[int], **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: ragged_all_to_all(
        x, "tp", send_sizes=torch.tensor(table)[axis_index("tp")], **options
    )[0]


REFUSED: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any]]] = {
    "no integers": (lambda x: ragged_all_to_all(x, "tp", send_sizes=x[:2])[0], {}),
    "too few": (lambda x: ragged_all_to_all(x, "tp", send_sizes=[1])[0], {}),
    "no length": (
        lambda x: ragged_all_to_all(x, "tp", send_sizes=[1, 1], length=cast(Any, 1.5))[0],
        {},
    ),
    "no room for the length": (
        lambda x: ragged_all_to_all(x, "tp", send_sizes=[1, 1], length=2**62)[0],
        {},
    ),
    "no rows": (lambda x: ragged_all_to_all(x.sum(), "tp", send_sizes=[1, 1])[0], {}),
    "more than there are": (sizes_of_ranks([1, 1], [1, 2]), {}),
    "negative": (sizes_of_ranks([1, 1], [-1, 2]), {}),
    "no room": (sizes_of_ranks([2, 0], [1, 1], length=2), {}),
    "batched": (sizes_of_ranks([1, 1], [1, 1]), {"simulate": "vmap"}),
    "same dim, uneven": (
        lambda x: all_to_all(x, "tp", split_dim=0, concat_dim=0, split_sizes=[1, 1]),
        {},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_explained(name: str) -> None:
    body, options = REFUSED[name]
    with told(ShardMapError):
        mapped(body, **options)(torch.arange(4.0))


def test_all_processes_refuse_what_one_of_them_has_no_room_for(gloo: Gloo) -> None:
    assert len(set(gloo(2).run(_without_room))) == 1


def _without_room() -> str:
    mesh = make_mesh((2,), ("tp",))
    body = sizes_of_ranks([2, 0], [1, 1], length=2)
    with pytest.raises(CollectiveError) as caught:
        shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(torch.arange(4.0))
    return str(caught.value)


def test_examples_of_a_vmap_are_refused() -> None:
    def body(x: Tensor) -> Tensor:
        def one(row: Tensor) -> Tensor:
            sizes = (row > 0).long().sum().expand(2)
            return ragged_all_to_all(row, "tp", send_sizes=sizes)[0]

        return torch.vmap(one)(x)

    with told(TransformError):
        mapped(body, simulate="ranks", check=False)(torch.ones(4, 3))


# ------------------------------------------------------------- an all-to-all along one dim


def transposed(x: Tensor) -> Tensor:
    return all_to_all(x, "tp", split_dim=-1, concat_dim=1)


def transposed_in_region(x: Tensor) -> Tensor:
    spec = P("dp", "tp")
    return local_region(transposed, in_types=(spec,), out_types=spec, trusted=True)(x)


def transposed_on_one_device(x: Tensor) -> Tensor:
    blocks: Tensor = x.unflatten(1, (2, 2, -1))
    return blocks.transpose(1, 2).flatten(1)


ONE_DIM = Case(
    transposed_in_region,
    transposed_on_one_device,
    (P("dp", "tp"),),
    P("dp", "tp"),
    (random(2, 12),),
)
CASES["one dim"] = SEVERAL["one dim"] = ONE_DIM


def test_an_exchange_along_one_dim_can_be_batched() -> None:
    assert_equals_one_device(ONE_DIM, "vmap")


def test_an_exchange_along_one_dim_is_not_the_identity_of_one_device() -> None:
    mesh = make_mesh((2, 2), AXES, kind="simulated")
    spec = P("dp", "tp")
    f = shard_map(transposed, mesh=mesh, in_specs=spec, out_specs=spec, check="global")
    # Its blocks and ranks trade places, which no spec says.
    with pytest.raises(ShardTypeError, match="sharded over 'tp' within each of 2 blocks"):
        check_program(f, random(2, 12))
