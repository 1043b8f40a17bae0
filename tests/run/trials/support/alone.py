"""Programs that trials decide by themselves, each right, and wrong in ways that hide.

A body gets the name of its mistake; "" for none. Layouts are not asked.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    R,
    all_gather,
    all_reduce,
    axis_index,
    axis_size,
    check_program,
    convert,
    make_mesh,
    shard_map,
    shift,
)
from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.verify.request import Strictness
from shardmap_torch.checker.verify.verdict import Verdict, verify
from shardmap_torch.run import checked
from shardmap_torch.run.trials import by_numbers


def decide(f: Callable[..., Any], *args: Any) -> Verdict:
    """Checks a program by trials alone; they raise their own errors."""

    def alone(call: Call, strictness: Strictness) -> Verdict:
        axes = by_numbers._compared(call.mesh, strictness)
        verdict = verify(call, "local")
        by_numbers._compare(call, verdict, frozenset(), axes, verdict)
        return verdict

    with mock.patch.object(checked, "verify", alone):
        return check_program(f, *args)


@dataclass(frozen=True)
class Case:
    """A body over an axis "a", with its specs, arguments and mistakes."""

    body: Callable[..., Any]
    in_specs: tuple[P, ...]
    out_specs: Any
    arguments: Callable[[], list[Tensor]]
    wrong: str = ""
    ranks: int = 3

    def decide(self, wrong: str = "") -> Verdict:
        """Decides the body, or a mistaken one, by trials."""

        def body(*args: Tensor) -> Any:
            # One device is right, so that only the ranks are mistaken.
            return self.body(*args, wrong=wrong if axis_size("a") > 1 else "")

        body.__name__ = self.body.__name__
        mesh = make_mesh((self.ranks,), ("a",), kind="simulated")
        f = shard_map(
            body, mesh=mesh, in_specs=self.in_specs, out_specs=self.out_specs, check="global"
        )
        return decide(f, *self.arguments())


def total(x: Tensor, op: Any = "sum") -> Tensor:
    """Reduces over the ranks, to a value that varying ones may be combined with."""
    return convert(all_reduce(x, "a", dst=I, op=op), "a", src=I, dst=R)


def largest(x: Tensor) -> Tensor:
    """Takes the maximum over the ranks, without gradients."""
    return total(x.detach(), "max")


def start_of(x: Tensor, dim: int = 0) -> Tensor:
    """Returns where a rank's block begins."""
    return axis_index("a") * x.shape[dim]


def floats(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Draws arguments that need gradients."""
    return [torch.randn(shape).requires_grad_() for shape in shapes]


IDS = torch.tensor([0, 5, 3, 1, 4, 2])


def lookup(table: Tensor, ids: Tensor, wrong: str) -> Tensor:
    """Looks ids up in a table of which each rank has some rows."""
    start = start_of(table)
    if wrong == "offset of another block":
        start = (start + len(table)) % (3 * len(table))
    if wrong == "offset by one":
        start = start + 1
    local = ids - start
    owned = (local >= 0) & (local < len(table))
    if wrong == "border":
        owned = (local >= 0) & (local <= len(table))
    if wrong == "first row":
        owned = (local > 0) & (local < len(table))
    rows = table[local.clamp(0, len(table) - 1)]
    return all_reduce(rows if wrong == "no mask" else rows * owned[:, None], "a", dst=I)


def cross_entropy(logits: Tensor, targets: Tensor, wrong: str) -> Tensor:
    """Computes a loss of logits [n, v/r], smoothed, of targets from all classes."""
    top = logits.detach().amax(-1) if wrong == "local maximum" else largest(logits.amax(-1))
    exps = (logits - top[:, None]).exp().sum(-1)
    norm = top + (exps if wrong == "local softmax" else total(exps)).log()
    start = start_of(logits, 1) + int(wrong == "offset by one")
    local = targets - start
    owned = (local >= 0) & (local < logits.shape[1])
    found = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    hit = total(torch.where(owned, found, 0.0))
    smooth = "sum" if wrong == "sum of averages" else "mean"
    mean = total(logits.mean(-1), smooth)
    loss = (norm - 0.9 * hit - 0.1 * mean).mean()
    return all_reduce(loss, "a", dst=I, op="mean") if wrong.startswith("local") else loss


def masked_mean(x: Tensor, valid: Tensor, wrong: str) -> Tensor:
    """Averages over what is valid."""
    if wrong == "padding":
        return all_reduce(x.mean(), "a", dst=I, op="mean")
    kept = (x * valid).sum()
    if wrong == "local mean":
        return all_reduce(kept / (valid.sum() + 1e-6), "a", dst=I, op="mean")
    return all_reduce(kept, "a", dst=I) / (all_reduce(valid.sum(), "a", dst=I) + 1e-6)


def ring(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, wrong: str) -> Tensor:
    """Attends to keys that go round, but hidden ones, with a finite number in their place."""
    n, hidden = axis_size("a"), -1e9
    top = torch.full((len(q), 1), hidden, dtype=q.dtype)
    weight, out = torch.zeros_like(top), torch.zeros_like(q)
    for step in range(n - (wrong == "last block dropped")):
        scores = (q @ k.T).masked_fill(~valid, hidden)
        if wrong == "not hidden" and step == 1:
            scores = q @ k.T
        new = torch.maximum(top, scores.amax(1, keepdim=True)).detach()
        p, old = (scores - new).exp(), (top - new).exp()
        weight, out, top = weight * old + p.sum(1, keepdim=True), out * old + p @ v, new
        if step + 1 < n:
            k, v = shift(k, "a", 1), shift(v, "a", 1)
            valid = valid if wrong == "mask stays" else shift(valid, "a", 1)
    return out / weight


def causal(x: Tensor, wrong: str) -> Tensor:
    """Attends to what comes before, gathered."""
    every = all_gather(x, "a", dim=0, dst=R)
    if wrong == "order of blocks":
        every = every.unflatten(0, (3, -1)).flip(0).flatten(0, 1)
    rows = start_of(x) + torch.arange(len(x)) - int(wrong == "border")
    if wrong == "position":
        rows = torch.arange(len(x))
    hidden = rows[:, None] < torch.arange(len(every))
    scores = (x @ every.T).masked_fill(hidden, -math.inf)
    if wrong == "border":
        scores = (x @ every.T).masked_fill(hidden, -1e4)
    return scores.softmax(-1) @ every


def scan(gates: Tensor, x: Tensor, wrong: str) -> Tensor:
    """Computes h[i] = sigmoid(gates[i]) h[i - 1] + x[i] over a sharded sequence."""
    g, h, rows = gates.sigmoid(), torch.zeros_like(x[0]), []
    for i in range(len(x)):
        h = g[i] * h + x[i]
        rows.append(h)
    own, passed = torch.stack(rows), g.cumprod(0)
    carry = torch.zeros_like(h)
    for _ in range(1 if wrong == "one hop" else axis_size("a") - 1):
        carry = shift(own[-1] + passed[-1] * carry, "a", 1, wrap=wrong == "wraps")
        carry = carry.detach() if wrong == "detached" else carry
    return own + passed[:, None] * carry


def documents(x: Tensor, begins: Tensor, wrong: str) -> Tensor:
    """Adds up within documents, which begin where a boolean says."""
    doc = begins.cumsum(0)
    same = (doc[:, None] == doc) & torch.ones_like(doc[:, None] == doc).tril()
    own, passes = same.to(x.dtype) @ x, (doc[-1] == 0).to(x.dtype)
    carry = torch.zeros_like(own[-1:])
    for _ in range(1 if wrong == "one hop" else axis_size("a") - 1):
        carry = shift(
            own[-1:] + (1.0 if wrong == "all pass" else passes) * carry, "a", 1, wrap=False
        )
    return own + (doc == 0)[:, None] * carry


def greedy(logits: Tensor, wrong: str) -> Tensor:
    """Chooses the best of all classes, the first of those that are equal."""
    best, at = logits.max(-1)
    at = at if wrong == "local index" else at + start_of(logits, 1)
    values, places = (
        all_gather(best[None], "a", dim=0, dst=I),
        all_gather(at[None], "a", dim=0, dst=I),
    )
    if wrong == "last of equals":
        chosen = len(values) - 1 - values.flip(0).argmax(0)
    else:
        chosen = values.argmax(0)
    return places.gather(0, chosen[None])[0]


def top_two(logits: Tensor, wrong: str) -> Tensor:
    """Takes the two largest values of all classes."""
    count = 1 if wrong == "one of each" else min(2, logits.shape[1])
    values = logits.topk(count, -1).values
    return all_gather(values, "a", dim=1, dst=I).topk(2, -1).values


def chosen_sum(x: Tensor, flags: Tensor, wrong: str) -> Tensor:
    """Adds up over the ranks, of two values one."""
    added = total(x.sum(0)) if wrong != "no sum in a branch" else x.sum(0)
    chosen = torch.where(flags, added, total(x.square().sum(0)))
    return all_reduce((chosen * x).sum(0), "a", dst=I)


def routed(x: Tensor, places: Tensor, wrong: str) -> Tensor:
    """Gathers columns of rows by indices."""
    dim = 0 if wrong == "dims swapped" else 1
    return x.gather(dim, places)


def normalized(x: Tensor, wrong: str) -> Tensor:
    """Takes away the mean over all rows, and divides by the deviation."""
    mean = x.mean(0) if wrong == "local mean" else total(x.mean(0), "mean")
    square = x.square().mean(0) if wrong == "local square" else total(x.square().mean(0), "mean")
    return (x - mean) / (square - mean.square() + 1.0).sqrt()


def similar(x: Tensor, y: Tensor, wrong: str) -> Tensor:
    """Computes a contrastive loss of normalized pairs, with labels that are positions."""
    x, y = functional.normalize(x, dim=-1), functional.normalize(y, dim=-1)
    scores = x @ all_gather(y, "a", dim=0, dst=R).T
    labels = torch.arange(len(x)) + (0 if wrong == "labels of the first rank" else start_of(x))
    rows = scores.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    return -all_reduce(rows.mean(), "a", dst=I, op="sum" if wrong == "sum" else "mean")


def rotated(x: Tensor, positions: Tensor, table: Tensor, wrong: str) -> Tensor:
    """Turns rows by angles of their positions."""
    if wrong == "own positions":
        positions = torch.arange(len(x)).expand(len(x))
    angle = table[positions]
    return x * angle.cos() + x.flip(-1) * angle.sin()


def ignored(logits: Tensor, labels: Tensor, wrong: str) -> Tensor:
    """Averages a loss over labels that are not -100."""
    loss = functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    count = (labels != (-1 if wrong == "another number" else -100)).sum()
    if wrong == "local count":
        return all_reduce(loss / (count + 1e-6), "a", dst=I, op="mean")
    return all_reduce(loss, "a", dst=I) / (all_reduce(count, "a", dst=I) + 1e-6)


def dropped(x: Tensor, wrong: str) -> Tensor:
    """Drops entries on ranks."""
    return functional.dropout(x, 0.5) if wrong else x * 1.0


def capacity(x: Tensor, w: Tensor, wrong: str) -> Tensor:
    """Sends rows to the two best of all experts, of which each rank has some."""
    scores = x @ all_gather(w, "a", dim=1, dst=R)
    gates, places = scores.softmax(-1).topk(2, -1)
    local = places - start_of(w, 1) * (wrong != "experts of the first rank")
    mine = (local >= 0) & (local < w.shape[1])
    shares = (gates * mine)[..., None] * (x @ w).gather(1, local.clamp(0, w.shape[1] - 1))[
        ..., None
    ]
    return all_reduce(shares.sum((1, 2)), "a", dst=I)


def text(ids: Tensor, x: Tensor, wrong: str) -> Tensor:
    """Adds to rows a number that depends on the bucket of their position."""
    buckets = torch.bucketize(ids, torch.tensor([2, 4, 8]))
    return x + (buckets * (2 if wrong == "scaled" else 1))[:, None]


ROWS, EQUAL = P("a"), P()
COLUMNS = P(None, "a")

CASES = (
    Case(
        lookup,
        (ROWS, EQUAL),
        EQUAL,
        lambda: [*floats((6, 2)), IDS],
        "offset of another block,offset by one,border,first row,no mask",
    ),
    Case(
        cross_entropy,
        (COLUMNS, EQUAL),
        EQUAL,
        lambda: [*floats((6, 6)), IDS],
        "local maximum,local softmax,sum of averages,offset by one",
    ),
    Case(masked_mean, (ROWS, ROWS), EQUAL, lambda: [*floats((6,)), IDS > 0], "padding,local mean"),
    Case(
        ring,
        (ROWS,) * 4,
        ROWS,
        lambda: [*floats((6, 2), (6, 2), (6, 2)), IDS > 0],
        "last block dropped,not hidden,mask stays",
    ),
    Case(causal, (ROWS,), ROWS, lambda: floats((6, 2)), "order of blocks,position,border"),
    Case(scan, (ROWS, ROWS), ROWS, lambda: floats((48,), (48, 2)), "one hop,wraps,detached"),
    Case(
        documents,
        (ROWS, ROWS),
        ROWS,
        lambda: [*floats((48, 2)), torch.arange(48) % 9 == 0],
        "one hop,all pass",
    ),
    Case(greedy, (COLUMNS,), EQUAL, lambda: [torch.randn(4, 6)], "local index,last of equals"),
    Case(top_two, (COLUMNS,), EQUAL, lambda: [torch.randn(4, 6)], "one of each"),
    Case(
        chosen_sum,
        (ROWS, EQUAL),
        EQUAL,
        lambda: [*floats((6, 4)), torch.tensor([True, False, True, True])],
        "no sum in a branch",
    ),
    Case(
        routed,
        (ROWS, ROWS),
        ROWS,
        lambda: [*floats((6, 2)), (IDS % 2)[:, None].expand(6, 2).contiguous()],
        "dims swapped",
    ),
    Case(normalized, (ROWS,), ROWS, lambda: floats((6, 2)), "local mean,local square"),
    Case(
        similar, (ROWS, ROWS), EQUAL, lambda: floats((6, 2), (6, 2)), "labels of the first rank,sum"
    ),
    Case(
        rotated,
        (ROWS, ROWS, EQUAL),
        ROWS,
        lambda: [*floats((6, 2)), IDS, torch.randn(8, 1)],
        "own positions",
    ),
    Case(
        ignored,
        (ROWS, ROWS),
        EQUAL,
        lambda: [*floats((6, 4)), IDS % 4],
        "another number,local count",
    ),
    Case(dropped, (ROWS,), ROWS, lambda: floats((6, 2)), "masks of each rank"),
    Case(
        capacity,
        (EQUAL, COLUMNS),
        EQUAL,
        lambda: floats((4, 3), (3, 6)),
        "experts of the first rank",
    ),
    Case(text, (ROWS, ROWS), ROWS, lambda: [IDS, *floats((6, 2))], "scaled"),
)
