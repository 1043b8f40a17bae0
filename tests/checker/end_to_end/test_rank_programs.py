"""Everyday programs per rank with raw torch.distributed are accepted, and no mutants of them."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    P,
    ShardTypeError,
    axis_group,
    check_rank_program,
    full,
    make_mesh,
    shard_map,
)
from shardmap_torch.core.tree import flatten
from tests.checker.support import rank_programs
from tests.checker.support.rejections import numbers

# torch renames some of the calls.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

SOURCE: Final = Path(rank_programs.__file__)
RANKS: Final = make_mesh((2,), ("tp",), kind="simulated", simulate="ranks")
ONE: Final = make_mesh((1,), ("tp",), kind="simulated", simulate="ranks")

ROWS, COLUMNS, WHOLE = P("tp"), P(None, "tp"), P()
Program = tuple[Any, Any, tuple[Any, ...]]


def random(*shape: int, seed: int = 0) -> Tensor:
    return numbers(*shape, grad=False, seed=seed)


PROGRAMS: Final[dict[str, Program]] = {
    "ddp_step": ((WHOLE, ROWS, ROWS), WHOLE, (random(4, 2), random(8, 4), random(8, 2))),
    "ddp_hooks": ((WHOLE, ROWS, ROWS), WHOLE, (random(4, 2), random(8, 4), random(8, 2))),
    "zero1": (
        (WHOLE, ROWS, ROWS, ROWS),
        (WHOLE, ROWS),
        (random(8), random(8, seed=1), random(8, 4), random(8, 2)),
    ),
    "ring_attention": (
        (ROWS, ROWS, ROWS),
        ROWS,
        (random(8, 4), random(8, 4, seed=1), random(8, 4, seed=2)),
    ),
    "early_return": ((COLUMNS, ROWS), WHOLE, (random(4, 8), random(8, 2))),
    "chunk_and_gather": ((WHOLE, WHOLE), WHOLE, (random(8, 4), random(4, 2))),
    "sequence_norm": (
        (ROWS, WHOLE, ROWS),
        (ROWS, WHOLE),
        (random(8, 4), random(4), random(8, 4, seed=3)),
    ),
    "functional_sum": ((COLUMNS, ROWS), WHOLE, (random(4, 8), random(8, 2))),
    "functional_autograd": (
        (ROWS, (COLUMNS, ROWS)),
        ROWS,
        (random(8, 4), (random(4, 8), random(8, 4))),
    ),
    "asynchronous": ((COLUMNS, ROWS, WHOLE), WHOLE, (random(4, 8), random(8, 2), random(4, 2))),
    "clip": ((ROWS, WHOLE), (ROWS, WHOLE), (random(8), random(3))),
    "sync_batch_norm": ((ROWS,), ROWS, (random(8, 3),)),
    "vocabulary_lookup": ((WHOLE, ROWS), WHOLE, (torch.arange(12).view(3, 4) % 8, random(8, 4))),
    "token_mean": ((ROWS, ROWS), WHOLE, (random(8), (random(8, seed=5) > 0).double())),
    "ulysses": ((ROWS,), ROWS, (random(8, 4, 3),)),
    "halo": ((ROWS, WHOLE), ROWS, (random(8, 3), random(3))),
    "accumulate": (
        (WHOLE, COLUMNS, COLUMNS),
        WHOLE,
        (random(4, 2), random(2, 4, 4), random(2, 4, 2)),
    ),
    "logsumexp": ((COLUMNS,), WHOLE, (random(4, 8),)),
    "top_token": ((COLUMNS,), WHOLE, (random(4, 8),)),
    "nn_functional": ((COLUMNS, ROWS), WHOLE, (random(4, 8), random(8, 2))),
    "loss_metric": ((ROWS, ROWS), WHOLE, (random(8, 2), random(8, 2, seed=4))),
    "experts": ((COLUMNS, ROWS), COLUMNS, (random(4, 6, 3), random(4, 3, 3))),
}
"""Specs of the arguments and of the results, and global arguments."""

MUTANTS: Final = [
    ("ddp_step", "dist.all_reduce(g, group=G)\n", "pass\n"),
    ("ddp_step", "g /= dist.get_world_size(G)", "pass"),
    ("ddp_step", "0.1 * g", "0.1 * g / dist.get_world_size(G)"),
    ("ddp_step", "functional.mse_loss(x @ w, y)", "functional.mse_loss(x @ w, y, reduction='sum')"),
    ("ddp_hooks", "op=dist.ReduceOp.AVG, ", ""),
    ("ddp_hooks", "dist.all_reduce(grad, op=dist.ReduceOp.AVG, group=G)", "pass"),
    ("ddp_hooks", "w.register_hook(average)", "pass"),
    ("zero1", "op=dist.ReduceOp.AVG, ", ""),
    ("zero1", ".chunk(size)[rank]", ".chunk(size)[0]"),
    ("zero1", ".chunk(size)[rank]", ".chunk(size)[rank - 1]"),
    ("zero1", "m = 0.9 * m + shard", "m = 0.9 * m + g.chunk(size)[rank]"),
    ("ring_attention", "range(size)", "range(size - 1)"),
    ("ring_attention", "k, v = next_k, next_v", "k = next_k"),
    ("ring_attention", "acc = acc * scale", "acc = acc"),
    (
        "ring_attention",
        "dist.P2POp(dist.isend, v.contiguous()",
        "dist.P2POp(dist.isend, k.contiguous()",
    ),
    ("ring_attention", "if step + 1 < size:", "if step + 2 < size:"),
    ("early_return", "dist.all_reduce(y, group=G)", "pass"),
    ("early_return", "y = x @ w\n", "y = x @ w + 1\n"),
    ("early_return", "return y\n    dist", "return 2 * y\n    dist"),
    (
        "early_return",
        "dist.all_reduce(y, group=G)",
        "dist.all_reduce(y, op=dist.ReduceOp.MAX, group=G)",
    ),
    ("chunk_and_gather", "[rank]", "[0]"),
    ("chunk_and_gather", "torch.cat(parts, 0)", "torch.cat(parts[::-1], 0)"),
    ("chunk_and_gather", "torch.cat(parts, 0)", "torch.stack(parts).sum(0).repeat(size, 1)"),
    ("chunk_and_gather", "[rank] @ w", "[rank - 1] @ w"),
    ("sequence_norm", "dist.all_reduce(g, group=G)", "pass"),
    (
        "sequence_norm",
        "dist.all_reduce(g, group=G)",
        "dist.all_reduce(g, op=dist.ReduceOp.AVG, group=G)",
    ),
    ("functional_sum", '"sum"', '"avg"'),
    ("functional_sum", 'funcol.all_reduce(x @ w, "sum", G)', "x @ w"),
    ("functional_autograd", '"sum"', '"avg"'),
    ("functional_autograd", 'w[0]) @ w[1], "sum"', 'w[0] + 1) @ w[1] + 1, "sum"'),
    ("asynchronous", "work.wait()\n    return", "return"),
    ("asynchronous", "y = x @ w", "y = x @ w + v"),
    ("asynchronous", "z = v.sin()", "z = v.sin() + y"),
    ("clip", "dist.all_reduce(total, group=G)", "pass"),
    ("clip", "total = g.square().sum()", "total = g.square().sum() + h.square().sum()"),
    ("clip", "total = g.square().sum()", "total = g.square().sum().sqrt()"),
    ("sync_batch_norm", "dist.all_reduce(stats, group=G)", "pass"),
    ("sync_batch_norm", "dist.all_reduce(count, group=G)", "pass"),
    ("sync_batch_norm", "x.sum(0), x.sq", "x.mean(0), x.sq"),
    ("vocabulary_lookup", "dist.all_reduce(found, group=G)", "pass"),
    ("vocabulary_lookup", "start = rank * rows", "start = 0"),
    ("vocabulary_lookup", ".masked_fill(outside[..., None], 0.0)", ""),
    ("vocabulary_lookup", "(ids >= start + rows)", "(ids > start + rows)"),
    ("vocabulary_lookup", "rank * rows", "rank * (rows - 1)"),
    ("token_mean", "dist.all_reduce(both, group=G)", "dist.all_reduce(both[0], group=G)"),
    ("token_mean", "dist.all_reduce(both, group=G)", "pass"),
    ("token_mean", "return both[0] / both[1]", "return both[0] / mask.sum()"),
    ("ulysses", "torch.cat(got, 0)", "torch.cat(got[::-1], 0)"),
    ("ulysses", "x.chunk(size, 1)", "x.chunk(size, 0)"),
    ("ulysses", "torch.cat(got, 1)", "torch.cat(got[::-1], 1)"),
    ("halo", "x[-1:].contiguous()", "x[:1].contiguous()"),
    ("halo", "torch.cat([left, x, right])", "torch.cat([right, x, left])"),
    ("halo", "torch.cat([left, x, right])", "torch.cat([x[-1:], x, x[:1]])"),
    ("accumulate", "op=dist.ReduceOp.AVG, ", ""),
    ("accumulate", "dist.all_reduce(total, op=dist.ReduceOp.AVG, group=G)", "pass"),
    ("logsumexp", "dist.all_reduce(total, group=G)", "pass"),
    ("logsumexp", "dist.all_reduce(top, op=dist.ReduceOp.MAX, group=G)", "pass"),
    (
        "logsumexp",
        "dist.all_reduce(total, group=G)",
        "dist.all_reduce(total, op=dist.ReduceOp.AVG, group=G)",
    ),
    ("top_token", "at = at + rank * x.shape[-1]", "pass"),
    ("top_token", "best = torch.stack(values).argmax(0)", "best = torch.stack(values).argmin(0)"),
    ("top_token", "dist.all_gather(values, value, group=G)", "values = [value] * size"),
    ("nn_functional", "all_reduce(x @ w, group=G)", "x @ w"),
    ("loss_metric", "op=dist.ReduceOp.AVG, ", ""),
    ("loss_metric", "dist.all_reduce(shown, op=dist.ReduceOp.AVG, group=G)", "pass"),
    ("experts", "dist.all_to_all_single(back, hidden, group=G)", "back = hidden"),
    ("experts", "dist.all_to_all_single(inbox, x.contiguous(), group=G)", "inbox = x"),
    (
        "experts",
        "inbox.view(size, -1, *x.shape[1:])",
        "inbox.view(-1, size, *x.shape[1:]).transpose(0, 1)",
    ),
    ("experts", "hidden, w))", "hidden, w[:1].expand_as(w)))"),
]
"""A program, what is replaced in it, and by what; each is wrong on two ranks alone."""


def arguments(name: str, mesh: Any) -> dict[str, Any]:
    in_specs, out_specs, _ = PROGRAMS[name]
    return {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs, "check": "global"}


def outcome(name: str, mesh: Any, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    monkeypatch.setattr(rank_programs, "G", axis_group(mesh, "tp"))
    mapped: Any = shard_map(getattr(rank_programs, name), **arguments(name, mesh))
    return [full(x) for x in flatten(mapped(*PROGRAMS[name][2]))[0]]


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_accepted_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outcome(name, ONE, monkeypatch)
    torch.testing.assert_close(outcome(name, RANKS, monkeypatch), expected)


def mutated(name: str, old: str, new: str, path: Path) -> ModuleType:
    """Imports the programs with a line of one of them replaced."""
    before, start, after = SOURCE.read_text().partition(f"def {name}(")
    assert old in after.split("\n\n\ndef ")[0]
    path.write_text(before + start + after.replace(old, new, 1))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.sample(12)
@pytest.mark.parametrize(("name", "old", "new"), MUTANTS)
def test_a_mutant_is_refused_with_a_line(name: str, old: str, new: str, tmp_path: Path) -> None:
    module: Any = mutated(name, old, new, tmp_path / "mutant.py")
    module.G = axis_group(RANKS, "tp")
    with pytest.raises(ShardTypeError, match=r"mutant\.py:\d+"):
        check_rank_program(getattr(module, name), *PROGRAMS[name][2], **arguments(name, RANKS))


@pytest.mark.parametrize("name", ["pipeline", "broadcast_weights"])
def test_ranks_that_run_other_lines_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_programs, "G", axis_group(RANKS, "tp"))
    x, w = random(4, 3), random(2, 3, 3)
    specs: dict[str, Any] = {"in_specs": (WHOLE, ROWS), "out_specs": WHOLE}
    with pytest.raises(ShardTypeError, match="branches on a number that differs by rank"):
        check_rank_program(getattr(rank_programs, name), x, w, mesh=RANKS, **specs)
