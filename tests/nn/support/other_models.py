"""Parts of models other than GPTs, put together from the layers, equal one device."""

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import I, P, R, S, all_reduce, all_to_all
from shardmap_torch.nn import column_linear, positions, row_linear, vocab_parallel_embedding
from tests.nn.support.cases import Case, integers, over_dp, random


def scored(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attends [b, t, h, k] with a bias [h, t, s] of relative positions, as T5 does."""
    scores = torch.einsum("bthk,bshk->bhts", q, k) + bias
    return torch.einsum("bhts,bshk->bthk", scores.softmax(-1), v)


def biases(table: Tensor, length: int, other: int) -> Tensor:
    """Looks up a bias [n, h] by distance, clipped to the table -> [h, t, s]."""
    apart = positions(other) - positions(length)[:, None]
    return table[(apart + table.shape[0] // 2).clamp(0, table.shape[0] - 1)].permute(2, 0, 1)


def cross_attention(x: Tensor, memory: Tensor, *weights: Tensor) -> Tensor:
    q, kv, out, table = map(over_dp, weights)
    k, v = column_linear(memory, kv, "tp").unbind(-2)
    bias = biases(table, x.shape[1], memory.shape[1])
    return x + row_linear(scored(column_linear(x, q, "tp"), k, v, bias), out, "tp")


def cross_attention_one_device(x: Tensor, memory: Tensor, *weights: Tensor) -> Tensor:
    q, kv, out, table = weights
    k, v = torch.einsum("bsd,dhxk->xbshk", memory, kv)
    made = scored(torch.einsum("btd,dhk->bthk", x, q), k, v, biases(table, 4, 6))
    return x + torch.einsum("bthk,hkd->btd", made, out)


def scan(x: Tensor, step: Tensor, decay: Tensor, into: Tensor, outof: Tensor) -> Tensor:
    """Runs a selective state space: x, step [b, t, e], decay [e, n], into and outof [b, t, n]."""
    state = torch.zeros(x.shape[0], x.shape[2], decay.shape[1], dtype=x.dtype)
    found = []
    for at in range(x.shape[1]):
        amount = step[:, at, :, None]
        state = (
            state * torch.exp(-amount * decay.exp())
            + amount * into[:, at, None] * (x[:, at, :, None])
        )
        found.append((state * outof[:, at, None]).sum(-1))
    return torch.stack(found, 1)


def convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """A causal convolution of each channel: x [b, t, e], kernel [e, 1, 3]."""
    y = functional.conv1d(x.mT, kernel, padding=2, groups=x.shape[-1])
    return functional.silu(y[..., : x.shape[1]].mT)


def state_space(x: Tensor, *weights: Tensor) -> Tensor:
    enter, kernel, select, steps, decay, leave = map(over_dp, weights)
    h, gate = column_linear(x, enter, "tp").unbind(-2)
    h = convolved(h, kernel)
    rank, into, outof = row_linear(h, select, "tp", dst=R).split([2, 3, 3], -1)
    made = scan(h, functional.softplus(rank @ steps), decay, into, outof)
    return row_linear(made * functional.silu(gate), leave, "tp")


def state_space_one_device(x: Tensor, *weights: Tensor) -> Tensor:
    enter, kernel, select, steps, decay, leave = weights
    h, gate = torch.einsum("btd,dxe->xbte", x, enter)
    h = convolved(h, kernel)
    rank, into, outof = (h @ select).split([2, 3, 3], -1)
    made = scan(h, functional.softplus(rank @ steps), decay, into, outof)
    y: Tensor = (made * functional.silu(gate)) @ leave
    return y


def bags(tables: Tensor, ids: Tensor) -> Tensor:
    """Adds up the rows of each bag: tables [n, v, d], ids [b, n, bag] -> [b, n, d]."""
    found: Tensor = torch.vmap(lambda table, at: table[at].sum(1), (0, 1), 1)(tables, ids)
    return found


def recommend(dense: Tensor, pooled: Tensor, rows: Tensor) -> Tensor:
    """Products of all pairs of features, as DLRM takes them."""
    features = torch.cat([torch.stack([dense, rows], 1), pooled], 1)
    return (features @ features.mT).flatten(1).tanh()


def tables_over_ranks(x: Tensor, ids: Tensor, big: Tensor, tables: Tensor, rows: Tensor) -> Tensor:
    """Whole tables on each rank, and one whose rows are sharded; then examples are."""
    pooled = all_to_all(bags(over_dp(tables), ids), "tp", split_dim=0, concat_dim=1)
    own = vocab_parallel_embedding(big, over_dp(rows), "tp", dst=S(0))
    return recommend(x, pooled, own)


def tables_on_one_device(
    x: Tensor, ids: Tensor, big: Tensor, tables: Tensor, rows: Tensor
) -> Tensor:
    return recommend(x, bags(tables, ids), rows[big])


def messages(nodes: Tensor, source: Tensor, to: Tensor, weight: Tensor) -> Tensor:
    """Adds up what edges, sharded over "dp", bring to each node [n, d]."""
    sent = column_linear(nodes, weight, "tp")
    found = torch.zeros_like(sent).index_add(0, to, over_dp(sent)[source])
    return all_reduce(found, "dp", dst=I).tanh()


def messages_on_one_device(nodes: Tensor, source: Tensor, to: Tensor, weight: Tensor) -> Tensor:
    sent = nodes @ weight
    return torch.zeros_like(sent).index_add(0, to, sent[source]).tanh()


BATCH = P(("dp", "tp"))
CASES = {
    "cross attention": Case(
        cross_attention,
        cross_attention_one_device,
        (P("dp"), P("dp"), P(None, "tp"), P(None, "tp"), P("tp"), P(None, "tp")),
        P("dp"),
        (
            *(random(8, 4, 8), random(8, 6, 8), random(8, 4, 2), random(8, 4, 2, 2)),
            *(random(4, 2, 8), random(5, 4)),
        ),
    ),
    "state space": Case(
        state_space,
        state_space_one_device,
        (P("dp"), P(None, None, "tp"), P("tp"), P("tp"), P(None, "tp"), P("tp"), P("tp")),
        P("dp"),
        (
            *(random(8, 5, 6), random(6, 2, 8), random(8, 1, 3), random(8, 8)),
            *(random(2, 8), random(8, 3), random(8, 6)),
        ),
    ),
    "embedding tables": Case(
        tables_over_ranks,
        tables_on_one_device,
        (BATCH, P("dp", "tp"), P("dp"), P("tp"), P("tp")),
        BATCH,
        (
            *(random(8, 3), integers(6, 8, 4, 2), integers(12, 8)),
            *(random(4, 6, 3), random(12, 3)),
        ),
    ),
    "messages along edges": Case(
        messages,
        messages_on_one_device,
        (P(), P("dp"), P("dp"), P(None, "tp")),
        P(None, "tp"),
        (random(6, 4), integers(6, 8), integers(6, 8, seed=1), random(4, 8)),
    ),
}
