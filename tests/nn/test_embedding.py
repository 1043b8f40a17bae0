"""Lookups in sharded tables equal one device; an id that does not exist shows."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    LayerError,
    P,
    Partial,
    R,
    S,
    V,
    make_mesh,
    redistribute,
    shard_map,
    validate_rule,
)
from shardmap_torch.nn import vocab_parallel_embedding
from shardmap_torch.nn.embedding import own_embeddings
from tests.nn.support.cases import Case, budget, integers, over_dp, random
from tests.support.golden import told

IDS, TABLE = integers(12, 4, 6), random(12, 8)


def embed(ids: Tensor, table: Tensor, dst: Any) -> Tensor:
    return vocab_parallel_embedding(ids, over_dp(table), "tp", dst=dst)


def embed_to(ids: Tensor, table: Tensor, dst: Any) -> Tensor:
    return redistribute(embed(ids, table, dst), "tp", src=dst, dst=S(1))


SPECS = P("dp"), P("tp")
CASES = {
    "to I": Case(partial(embed, dst=I), functional.embedding, SPECS, P("dp"), (IDS, TABLE)),
    "to S(1)": Case(
        partial(embed, dst=S(1)), functional.embedding, SPECS, P("dp", "tp"), (IDS, TABLE)
    ),
    "to R": Case(
        partial(embed_to, dst=R), functional.embedding, SPECS, P("dp", "tp"), (IDS, TABLE)
    ),
    "to Partial, summed later": Case(
        partial(embed_to, dst=Partial), functional.embedding, SPECS, P("dp", "tp"), (IDS, TABLE)
    ),
}


def test_the_gradient_of_the_table_stays_sharded() -> None:
    assert budget(CASES["to I"]) == ({"all_reduce": 1}, {})
    assert budget(CASES["to S(1)"]) == ({"reduce_scatter": 1}, {"all_gather": 1})


@pytest.mark.parametrize("batch", [P(), P("dp"), P(None, "dp")])
def test_the_lookup_keeps_its_promise(batch: P) -> None:
    region = own_embeddings("tp").typed(batch, P(), ranks=(2, 2))
    assert validate_rule(region, IDS, TABLE, num_ranks=2)


def test_an_id_that_does_not_exist_is_nan_and_spoils_no_other() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    f = shard_map(
        partial(vocab_parallel_embedding, axis="tp"), mesh=mesh, in_specs=SPECS_TP, out_specs=P()
    )
    rows = f(torch.tensor([-1, 0, 11, 12]), TABLE)
    assert rows.isnan().all(1).tolist() == [True, False, False, True]
    assert rows[1:3].equal(TABLE[[0, 11]])


def test_ids_may_have_a_smaller_dtype_than_numbers_of_rows() -> None:
    mesh, table = make_mesh((2,), ("tp",), kind="simulated"), random(600, 2)
    lookup = partial(vocab_parallel_embedding, axis="tp")
    rows = shard_map(lookup, mesh=mesh, in_specs=SPECS_TP, out_specs=P())
    ids = torch.tensor([0, 255], dtype=torch.uint8)
    assert rows(ids, table).equal(table[[0, 255]])


SPECS_TP = P(), P("tp")


@pytest.mark.parametrize(
    ("ids", "table", "dst"),
    [
        (torch.zeros(2), torch.zeros(4, 2), I),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(4, 2), V),
    ],
)
def test_arguments_that_do_not_match_are_refused(ids: Tensor, table: Tensor, dst: Any) -> None:
    with told(LayerError):
        vocab_parallel_embedding(ids, table, "tp", dst=dst)
