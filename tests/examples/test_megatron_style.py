"""Megatron's mappings, loss and layers, written per rank, are right as they are, and no mutants."""

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from examples.megatron_style.check import loss_on, parameters
from examples.megatron_style.cross_entropy import VocabularyParallelCrossEntropy
from examples.megatron_style.mappings import (
    AllToAll,
    CopyToRegion,
    GatherFirst,
    GatherLast,
    ReduceFromRegion,
    ReduceScatterFirst,
    ScatterFirst,
    ScatterLast,
    apply,
)
from examples.megatron_style.model import Config
from shardmap_torch import Mesh, P, ShardMapError, axis_group, full, make_mesh, shard_map
from tests.programs.support.everywhere import KINDS, run_on, same
from tests.support.pool import Gloo

SOURCES: Final = Path(__file__).parents[2] / "examples" / "megatron_style"

X: Final = torch.arange(192.0, dtype=torch.float64).sin().reshape(4, 6, 8)
W: Final = torch.arange(64.0, dtype=torch.float64).cos().reshape(8, 8)
TARGET: Final = torch.arange(24).reshape(4, 6) * 5 % 8
ROWS, LAST, COLUMNS = P("tp"), P(None, None, "tp"), P(None, "tp")

Body = Callable[[Any, Tensor, Tensor, Tensor], Any]


def _plain(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return x @ w


def _loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy((x @ w).flatten(0, 1), target.flatten())


PROGRAMS: Final[dict[str, tuple[Body, tuple[P, P], P, Callable[..., Tensor]]]] = {
    "copy": (lambda g, x, w, t: apply(CopyToRegion, x, g) @ w, (P(), COLUMNS), LAST, _plain),
    "reduce": (lambda g, x, w, t: apply(ReduceFromRegion, x @ w, g), (LAST, ROWS), P(), _plain),
    "scatter last": (
        lambda g, x, w, t: apply(ReduceFromRegion, apply(ScatterLast, x, g) @ w, g),
        *((P(), ROWS), P(), _plain),
    ),
    "gather last": (
        lambda g, x, w, t: apply(GatherLast, apply(CopyToRegion, x, g) @ w, g),
        *((P(), COLUMNS), P(), _plain),
    ),
    "scatter first": (
        lambda g, x, w, t: apply(ScatterFirst, x, g) @ w,
        *((P(), P()), ROWS, _plain),
    ),
    "gather first": (
        lambda g, x, w, t: apply(GatherFirst, x, g) @ w,
        *((ROWS, COLUMNS), LAST, _plain),
    ),
    "reduce-scatter": (
        lambda g, x, w, t: apply(ReduceScatterFirst, x @ w, g),
        *((LAST, ROWS), ROWS, _plain),
    ),
    "all-to-all": (
        lambda g, x, w, t: apply(AllToAll, apply(AllToAll, x, g).tanh(), g) @ w,
        *((ROWS, P()), ROWS, lambda x, w, t: x.tanh() @ w),
    ),
    "cross entropy": (
        lambda g, x, w, t: apply(
            VocabularyParallelCrossEntropy, apply(CopyToRegion, x, g) @ w, t, g
        ).mean(),
        *((P(), COLUMNS), P(), _loss),
    ),
}


def equal_one_device(name: str, check: Any, mesh: Mesh) -> None:
    body, in_specs, out_specs, expected = PROGRAMS[name]
    run = partial(body, axis_group(mesh, "tp"))
    f = shard_map(run, mesh=mesh, in_specs=(*in_specs, P()), out_specs=out_specs, check=check)
    found = []
    for function in (f, expected):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        y = full(function(x, w, TARGET))
        found.append((y, *torch.autograd.grad(y.sin().sum(), (x, w))))
    same(*found)


@pytest.mark.sample(8)
@pytest.mark.parametrize("check", [True, "global"])
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mapping_is_that_of_one_device(name: str, kind: Any, check: Any, gloo: Gloo) -> None:
    run_on(kind, partial(equal_one_device, name, check), gloo)


TOKENS: Final = torch.arange(16).view(4, 4) * 5 % 16


def outcome(loss: Callable[..., Tensor], config: Config) -> list[Tensor]:
    params = {name: x.requires_grad_() for name, x in parameters(config).items()}
    found = full(loss(params, TOKENS, (TOKENS + 1) % 16))
    return [found.detach(), *torch.autograd.grad(found, list(params.values()))]


def equal_model(config: Config, check: Any, mesh: Mesh) -> None:
    alone = make_mesh((1, 1), ("dp", "tp"), kind="simulated")
    expected = outcome(loss_on(alone, config, True), config)
    same(outcome(loss_on(mesh, config, check), config), expected)


CONFIGS: Final = [Config(16, 8, 2, 1, 4, sequence) for sequence in (False, True)]


@pytest.mark.sample(1, "sequence-ranks-global")
@pytest.mark.parametrize(
    ("kind", "check"),
    [("ranks", True), ("ranks", "global"), ("gloo", "global")],
)
@pytest.mark.parametrize("config", CONFIGS, ids=["tensor", "sequence"])
def test_the_model_is_that_of_one_device(config: Config, kind: Any, check: Any, gloo: Gloo) -> None:
    run_on(kind, partial(equal_model, config, check), gloo, (2, 2), ("dp", "tp"))


# ------------------------------------------------------------------------------------ mutants

MAPPINGS, LOSS, MODEL = "mappings.py", "cross_entropy.py", "model.py"

SIZE: Final = "dist.get_world_size(group)"
SUM: Final = "dist.all_reduce(x, group=group)"
OWN: Final = "[dist.get_rank(group)].contiguous()"
LARGEST: Final = "dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)"
CHOSEN: Final = "dist.all_reduce(chosen, group=group)"
NORMALIZER: Final = "dist.all_reduce(normalizer, group=group)"
START: Final = "start = dist.get_rank(group) * count"
LEAVE: Final = "apply(ReduceFromRegion, h, self.tp_group)"
ENTER: Final = "apply(CopyToRegion, h, self.tp_group)"
SCATTER: Final = "apply(ReduceScatterFirst, h, self.tp_group)"
PROJ: Final = 'self.leave(functional.linear(mixed, params[f"{layer}.proj.weight"]))'
DOWN: Final = 'self.leave(functional.linear(functional.gelu(up), params[f"{layer}.down.weight"]))'
FROM: Final = "start = dist.get_rank(self.tp_group) * words.shape[0]"
MEAN: Final = "apply(ReduceFromRegion, losses.mean(), self.dp_group)"
BACK: Final = "return gathered(grads[0], ctx.group), None\n\n\nclass "

MUTANTS: Final[list[tuple[str, str, str, int]]] = [
    # Mappings without their message, or with another.
    (MAPPINGS, SUM, "pass", 0),
    (MAPPINGS, SUM, "dist.all_reduce(x, dist.ReduceOp.MAX, group)", 0),
    (MAPPINGS, SUM, "dist.all_reduce(x, dist.ReduceOp.AVG, group)", 0),
    (MAPPINGS, "return total(grads[0], ctx.group), None", "return grads[0], None", 0),
    (MAPPINGS, "return total(x, group)", "return x.view_as(x)", 0),
    (MAPPINGS, "return total(x, group)", f"return total(x, group) * {SIZE}", 0),
    (MAPPINGS, "return x.view_as(x)", "return total(x, group)", 0),
    (MAPPINGS, "return x.view_as(x)", f"return x / {SIZE}", 0),
    (MAPPINGS, "dist.all_gather_single(out, x.contiguous(), group=group)", "out.zero_()", 1),
    (MAPPINGS, "dist.all_gather_single(out, x", "dist.all_gather_single(out, 2 * x", 1),
    (MAPPINGS, "dist.reduce_scatter_single(out, x.contiguous(), group=group)", "out.zero_()", 1),
    (MAPPINGS, "dist.reduce_scatter_single(out, x", "dist.reduce_scatter_single(out, 2 * x", 1),
    (
        MAPPINGS,
        "return scattered(grads[0], ctx.group)",
        "return own_part(grads[0], 0, ctx.group)",
        1,
    ),
    (MAPPINGS, "return scattered(x, group)", "return own_part(x, 0, group)", 1),
    (MAPPINGS, "return scattered(x, group)", f"return scattered(x, group) / {SIZE}", 1),
    (MAPPINGS, OWN, "[0].contiguous()", 1),
    (MAPPINGS, OWN, "[size - 1 - dist.get_rank(group)].contiguous()", 1),
    (MAPPINGS, OWN, "[dist.get_rank(group) - 1].contiguous()", 1),
    (MAPPINGS, "return own_part(x, 0, group)", f"return own_part(x, 0, group) * {SIZE}", 1),
    (
        MAPPINGS,
        f"{BACK}GatherFirst",
        f"return grads[0].repeat({SIZE.replace('group', 'ctx.group')}"
        ", 1, 1), None\n\n\nclass GatherFirst",
        1,
    ),
    (
        MAPPINGS,
        f"{BACK}AllToAll",
        "return total(gathered(grads[0], ctx.group), ctx.group), None\n\n\nclass AllToAll",
        1,
    ),
    # The loss.
    (LOSS, LARGEST, "pass", 0),
    (LOSS, LARGEST, "dist.all_reduce(largest, group=group)", 0),
    (LOSS, LARGEST, LARGEST.replace("MAX", "MIN"), 0),
    (LOSS, CHOSEN, "pass", 0),
    (LOSS, CHOSEN, "dist.all_reduce(chosen, op=dist.ReduceOp.MAX, group=group)", 0),
    (LOSS, NORMALIZER, "pass", 0),
    (LOSS, NORMALIZER, "dist.all_reduce(normalizer, op=dist.ReduceOp.AVG, group=group)", 0),
    (LOSS, START, "start = 0", 0),
    (LOSS, START, "start = dist.get_rank(group) * (count - 1)", 0),
    (LOSS, START, "start = dist.get_rank(group) * count + dist.get_rank(group)", 0),
    (LOSS, START, f"start = ({SIZE} - 1 - dist.get_rank(group)) * count", 0),
    (LOSS, "end = start + count", f"end = start + count * {SIZE}", 0),
    (LOSS, ".masked_fill(outside, 0.0)", "", 0),
    (LOSS, "(target < start) |", "(target <= start) |", 0),
    (LOSS, "(target >= end)", "(target > end)", 0),
    (LOSS, "1.0 - outside.flatten()", "1.0 - 0 * outside.flatten()", 0),
    (LOSS, "exp / normalizer.unsqueeze(-1)", "exp / exp.sum(-1, keepdim=True)", 0),
    (LOSS, "exp / normalizer", f"exp / {SIZE} / normalizer", 0),
    (LOSS, "return normalizer.log() - chosen", f"return normalizer.log() - chosen / {SIZE}", 0),
    # The model: a wrong group, or a mapping that is left out, doubled, or in another's place.
    (MODEL, ENTER, ENTER.replace("tp", "dp"), 0),
    (MODEL, ENTER, "h", 0),
    (MODEL, ENTER, LEAVE, 0),
    (MODEL, LEAVE, LEAVE.replace("tp", "dp"), 0),
    (MODEL, LEAVE, "h", 0),
    (MODEL, LEAVE, f"apply(ReduceFromRegion, {LEAVE}, self.tp_group)", 0),
    (MODEL, "apply(GatherFirst, h, self.tp_group)", "apply(GatherFirst, h, self.dp_group)", 1),
    (MODEL, SCATTER, SCATTER.replace("tp", "dp"), 1),
    (MODEL, SCATTER, "apply(ScatterFirst, h, self.tp_group)", 1),
    (MODEL, "apply(ScatterFirst, positions, self.tp_group)", "positions[: h.shape[0]]", 1),
    (MODEL, MEAN, MEAN.replace("dp", "tp"), 0),
    (MODEL, MEAN, "losses.mean()", 0),
    (MODEL, "losses.mean()", "losses.sum()", 0),
    (MODEL, "targets, self.tp_group)", "targets, self.dp_group)", 0),
    (MODEL, FROM, "start = 0", 0),
    (MODEL, FROM, FROM.replace("tp", "dp"), 0),
    (MODEL, "end = start + words.shape[0]", "end = start + words.shape[0] + 1", 0),
    (MODEL, "found = found.masked_fill(outside.unsqueeze(-1), 0.0)", "pass", 0),
    (MODEL, "h = self.leave(found)", "h = found", 0),
    (MODEL, 'self.enter(h), params[f"{layer}.qkv', 'h, params[f"{layer}.qkv', 0),
    (MODEL, 'self.enter(h), params[f"{layer}.up', 'h, params[f"{layer}.up', 0),
    (MODEL, PROJ, PROJ[len("self.leave(") : -1], 0),
    (MODEL, DOWN, DOWN[len("self.leave(") : -1], 0),
    (MODEL, PROJ, f'{PROJ[:-2]}, params[f"{{layer}}.proj.bias"]))', 0),
    (MODEL, DOWN, f'{DOWN[:-2]}, params[f"{{layer}}.down.bias"]))', 0),
    (MODEL, "q @ k.transpose(-1, -2)", "q * size @ k.transpose(-1, -2)", 0),
    (MODEL, "h + positions", "h + positions * (1 + dist.get_rank(self.tp_group))", 0),
]
"""A file, what is replaced in it by what, and which of `CONFIGS` shows it. Each differs between
ranks and one device."""


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the example, as a package of its own."""
    package = tmp_path / "mutated_megatron"
    package.mkdir()
    for path in SOURCES.glob("*.py"):
        text = path.read_text().replace("examples.megatron_style", "mutated_megatron")
        (package / path.name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.startswith("mutated_megatron")]:
        del sys.modules[name]


@pytest.mark.sample(4)
@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_a_mutant_is_refused(number: int, copied: Path) -> None:
    file, old, new, at = MUTANTS[number]
    text = (copied / file).read_text()
    assert old in text
    (copied / file).write_text(text.replace(old, new, 1))
    check = importlib.import_module("mutated_megatron.check")
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
    with pytest.raises((ShardMapError, RuntimeError)):
        outcome(check.loss_on(mesh, CONFIGS[at]), CONFIGS[at])
