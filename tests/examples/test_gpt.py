"""The example GPT equals the same model on one device, gradient by gradient, on every mesh."""

import math
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import optree
import pytest
import torch
from torch import Tensor

from examples.gpt import data, model, plain, step
from examples.gpt.check import compare, tolerance
from examples.gpt.model import Config, Params
from examples.gpt.optim import make_optimizer
from examples.gpt.parallel import CHOICES, Parallel
from shardmap_torch import Mesh, P, ShardTypeError, full, make_mesh, shard_map
from shardmap_torch.kernels import Overlap, Plan, autograd, dispatch, last_plan
from shardmap_torch.kernels.planner import record
from shardmap_torch.optim import Optimizer, clip_by_global_norm, sync_gradients
from tests.support.fuzzing import sampled, sized
from tests.support.golden import told
from tests.support.pool import Gloo

CONFIG = Config(vocabulary=32, length=8, width=16, heads=4, hidden=24, layers=2, microbatches=2)
AXES = ("dp", "tp")
# The sharded model adds the same float64 numbers in another order; nothing else may differ.
EXACT = 1e-10


def params(config: Config = CONFIG) -> Params:
    """Float64 parameters in which no two leaves, and no two entries of a norm, are alike."""
    generator = torch.Generator().manual_seed(1)

    def disturb(p: Tensor) -> Tensor:
        return p + 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)

    without_stages = Parallel(config.parallel.chosen - {"pp"})
    drawn = model.init(replace(config, parallel=without_stages), 0, torch.float64)
    disturbed: Params = optree.tree_map(disturb, drawn)
    return model.stack_layers(disturbed) if config.parallel.has_stages else disturbed


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(CONFIG.vocabulary, (8, CONFIG.length + 1), generator=generator)


def by_name(loss: Tensor, grads: Params) -> dict[str, Tensor]:
    paths, leaves = optree.tree_paths(grads), optree.tree_leaves(grads)
    named = zip(paths, leaves, strict=True)
    return {"loss": loss} | {".".join(map(str, path)): leaf for path, leaf in named}


@cache
def on_one_device(config: Config = CONFIG) -> dict[str, Tensor]:
    return by_name(*plain.loss_and_grads(params(config), batch(), config.num_microbatches))


def on_mesh(
    sizes: tuple[int, ...], strategy: Any = "auto", check: Any = True, config: Config = CONFIG
) -> dict[str, Tensor]:
    """In a worker of the pool a process-group mesh, else a simulated one."""
    views = config.parallel.views(sizes, config.experts)
    mesh = make_mesh(sizes, config.parallel.mesh_axes, simulate=strategy, views=views)
    lies = model.specs(config)
    sharded = shard_map(
        partial(step.loss_and_grads, config=config),
        mesh=mesh,
        in_specs=(lies, P("dp")),
        out_specs=(P(), lies),
        check=check,
    )
    return by_name(*full(sharded(params(config), batch())))


def without_norm_sums(sizes: tuple[int, int], strategy: Any = "auto") -> dict[str, Tensor]:
    """The model with a bug: gradients of norm scales are each rank's own over "tp"."""
    with mock.patch.object(step, "sync_gradients", _forgetting):
        return on_mesh(sizes, strategy, check=False)


def _forgetting(grads: Params, lies: Params, axes: tuple[str, ...]) -> Params:
    without = optree.tree_map(lambda spec: P(*spec.entries), lies)
    return sync_gradients(grads, without, axes)


def wrong_leaves(actual: dict[str, Tensor], config: Config = CONFIG) -> set[str]:
    expected = on_one_device(config)
    assert list(actual) == list(expected)
    return {
        name
        for name, value in expected.items()
        if not torch.allclose(actual[name], value, rtol=EXACT, atol=EXACT)
    }


NORMS = {name for name in on_one_device() if "norm" in name}


@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [
        *[((1, 1), "auto"), ((2, 4), "vmap"), ((2, 4), "ranks")],
        *sized([], [((2, 4), "auto"), ((4, 2), "ranks")]),
    ],
)
def test_every_gradient_on_a_simulated_mesh_is_that_of_one_device(
    sizes: tuple[int, int], strategy: str
) -> None:
    assert wrong_leaves(on_mesh(sizes, strategy)) == set()


def test_a_missing_sum_shows_on_rank_threads_in_the_norms_and_nowhere_else() -> None:
    with told(ShardTypeError):
        without_norm_sums((2, 4), "ranks")


def test_the_checker_rejects_a_missing_sum_and_names_the_gradient() -> None:
    with (
        mock.patch.object(step, "sync_gradients", _forgetting),
        pytest.raises(ShardTypeError, match=r"final_norm.*: pending over 'tp' too"),
    ):
        on_mesh((2, 4))


def optimizer_of(config: Config, steps: int = 4) -> Optimizer:
    return make_optimizer(config, steps, warmup=2, max_norm=0.1)


def train(
    mesh: Mesh | None, steps: int = 4, overlap: Overlap = "off", parallel: str = "dp+tp+sp"
) -> list[float]:
    """Losses of a few steps that clip, warm up and decay; without a mesh on one device."""
    config = replace(CONFIG, overlap=overlap, parallel=Parallel.of(parallel))
    weights = params(config)
    if mesh is None:
        return train_with_torch(weights, steps)
    optimizer = optimizer_of(config, steps)
    sharded = step.sharded_step(mesh, config, optimizer)
    state = optimizer.init(weights)
    losses = []
    for _ in range(steps):
        weights, state, loss = sharded(weights, state, batch())
        losses.append(loss.item())
    return losses


def train_with_torch(weights: Params, steps: int) -> list[float]:
    """Trains by torch's AdamW and schedule."""
    leaves = [leaf.requires_grad_() for leaf in optree.tree_leaves(weights)]
    groups = [
        {"params": [leaf for leaf in leaves if (leaf.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    losses = []
    for number in range(1, steps + 1):
        loss, grads = plain.loss_and_grads(weights, batch())
        clipped, _ = clip_by_global_norm(optree.tree_leaves(grads), max_norm=0.1)
        for leaf, grad in zip(leaves, clipped, strict=True):
            leaf.grad = grad.detach()
        for group in optimizer.param_groups:
            cosine = 0.55 + 0.45 * math.cos(math.pi * number / steps)
            group["lr"] = 4e-3 * cosine * min(number / 2, 1)
        optimizer.step()
        losses.append(loss.item())
    return losses


@cache
def trained_on_one_device() -> list[float]:
    return train(None)


@pytest.mark.parametrize("strategy", sampled(["vmap", "ranks"], "vmap"))
def test_training_on_a_simulated_mesh_has_the_losses_of_one_device(strategy: Any) -> None:
    losses = train(make_mesh((2, 4), AXES, simulate=strategy))
    assert losses == pytest.approx(trained_on_one_device(), rel=EXACT)
    assert losses[-1] < losses[0]


def train_overlapped(sizes: tuple[int, int]) -> tuple[list[float], list[float], list[str]]:
    """Losses with and without overlap, and what the kernels' plans of a few steps were."""
    mesh = make_mesh(sizes, AXES)
    plans: list[Plan] = []

    def recorded(plan: Plan) -> Plan:
        plans.append(plan)
        return record(plan)

    with (
        mock.patch.object(autograd, "record", recorded),
        mock.patch.object(dispatch, "record", recorded),
    ):
        losses = train(mesh, overlap="require")
    assert (last := last_plan()) is not None
    assert last.choice is not None
    ran = [plan for plan in plans if plan.reason != "the body is being checked, not run"]
    return losses, train(mesh), [f"{plan.op}: {bool(plan.choice)}" for plan in ran]


@pytest.mark.parametrize("sizes", sampled([(1, 2), (1, 4), (2, 2)], (1, 2)))
def test_layers_that_overlap_have_the_losses_of_layers_that_do_not(
    gloo: Gloo, sizes: tuple[int, int]
) -> None:
    num_columns, num_rows = 2 * CONFIG.layers + 1, 2 * CONFIG.layers
    for losses, plain_losses, plans in gloo(sizes[0] * sizes[1]).run(train_overlapped, sizes):
        assert losses == pytest.approx(plain_losses, rel=EXACT)
        assert losses == pytest.approx(trained_on_one_device(), rel=EXACT)
        assert Counter(plans) == {
            "all_gather_matmul: True": 4 * num_columns,
            "all_gather_matmul backward: True": 4 * num_columns,
            "matmul_reduce_scatter: True": 4 * num_rows,
            "matmul_reduce_scatter backward: True": 4 * num_rows,
        }


TRAINED = {
    "dp": (4,),
    "tp": (4,),
    "tp+sp": (4,),
    "dp+tp": (2, 2),
    "fsdp": (4,),
    "fsdp+tp+sp": (2, 2),
    "zero": (4,),
    "zero+tp": (2, 2),
    "cp": (4,),
    "cp+tp+sp": (2, 2),
    "pp+tp": (2, 2),
    "pp+tp+sp": (2, 2),
    "fsdp+pp": (2, 2),
    "zero+pp": (2, 2),
}
SMALLER = {"pp": (2,), "dp+pp": (2, 2)}
OVER_8_RANKS = {
    "dp+cp+tp+sp": (2, 2, 2),
    "fsdp+cp+tp+sp": (2, 2, 2),
    "zero+cp+tp+sp": (2, 2, 2),
    "dp+pp+tp": (2, 2, 2),
    "dp+pp+tp+sp": (2, 2, 2),
    "fsdp+pp+tp+sp": (2, 2, 2),
    "zero+pp+tp+sp": (2, 2, 2),
    "cp+pp+tp": (2, 2, 2),
}
OVER_FOUR_AXES = {
    "dp+cp+pp+tp": (2, 2, 2, 2),
    "fsdp+cp+pp+tp+sp": (2, 2, 2, 2),
    "zero+cp+pp+tp+sp": (2, 2, 2, 2),
}
# The ranks of "dp" are seen as "edp" and "ep", beside other axes.
MIXTURES = {
    "ep": (4,),
    "ep+tp": (2, 2),
    "ep+cp": (2, 2),
    "ep+tp+sp": (2, 2),
    "ep+pp": (2, 2),
    "fsdp+ep": (4,),
    "zero+ep": (4,),
}
MIXTURES_OVER_8_RANKS = {
    "fsdp+ep+tp+sp": (4, 2),
    "zero+ep+tp+sp": (4, 2),
    "ep+pp+tp+sp": (2, 2, 2),
    "fsdp+ep+pp": (4, 2),
    "zero+ep+pp": (4, 2),
}
MIXTURES_OVER_FOUR_AXES = {
    "ep+cp+tp": (4, 2, 2),
    "fsdp+ep+cp+tp+sp": (4, 2, 2),
    "fsdp+ep+pp+tp+sp": (4, 2, 2),
    "zero+ep+cp+pp+tp+sp": (2, 2, 2, 2),
}
ON_8_PROCESSES = OVER_8_RANKS | MIXTURES_OVER_8_RANKS
SIZES = TRAINED | SMALLER | ON_8_PROCESSES | OVER_FOUR_AXES | MIXTURES | MIXTURES_OVER_FOUR_AXES


def chosen(parallel: str, experts: int = 2) -> Config:
    return replace(CONFIG, parallel=Parallel.of(parallel), experts=experts)


def by_choice(parallel: str, strategy: Any = "auto", check: Any = "global") -> dict[str, Tensor]:
    config = chosen(parallel)
    sizes = config.parallel.mesh_sizes(SIZES[parallel])
    return on_mesh(sizes, strategy, check=check, config=config)


@pytest.mark.parametrize(
    "parallel",
    sampled(SIZES, "fsdp+cp+tp+sp", "fsdp+ep+pp+tp+sp"),
)
def test_every_choice_has_the_gradients_of_one_device(parallel: str) -> None:
    assert wrong_leaves(by_choice(parallel, "auto"), chosen(parallel)) == set()


@pytest.mark.parametrize("parallel", sampled(SIZES, "zero+ep+tp+sp"))
def test_every_choice_on_rank_threads_has_the_gradients_of_one_device(parallel: str) -> None:
    assert wrong_leaves(by_choice(parallel, "ranks"), chosen(parallel)) == set()


@pytest.mark.parametrize("parallel", sampled(["ep", "ep+cp+tp"], "ep+cp+tp"))
def test_more_experts_than_groups_of_ranks_have_the_gradients_of_one_device(parallel: str) -> None:
    config = chosen(parallel, experts=4)
    sizes = config.parallel.mesh_sizes(SIZES[parallel])
    assert wrong_leaves(on_mesh(sizes, "auto", check="global", config=config), config) == set()


@pytest.mark.fuzz
@pytest.mark.parametrize("parallel", ON_8_PROCESSES)
def test_every_choice_on_8_processes_has_the_gradients_of_one_device(
    parallel: str, gloo: Gloo
) -> None:
    for actual in gloo(8).run(by_choice, parallel, timeout=300):
        assert wrong_leaves(actual, chosen(parallel)) == set()


@pytest.mark.parametrize("parallel", sampled(["fsdp+pp+tp+sp", "fsdp+ep+tp+sp"], "fsdp+ep+tp+sp"))
def test_choices_on_8_processes_that_check_nothing_have_the_gradients_of_one_device(
    parallel: str, gloo: Gloo
) -> None:
    """Eight workers compute for 1.4 s in all; in `make fuzz` they check too."""
    for actual in gloo(8).run(by_choice, parallel, "auto", False, timeout=120):
        assert wrong_leaves(actual, chosen(parallel)) == set()


@pytest.mark.parametrize("parallel", sampled([*MIXTURES, "fsdp+pp", "zero+pp"], "fsdp+ep"))
def test_choices_on_4_processes_have_the_gradients_of_one_device(parallel: str, gloo: Gloo) -> None:
    check = sized(False, "global")  # on simulated ranks they are checked above
    for actual in gloo(4).run(by_choice, parallel, "auto", check, timeout=120):
        assert wrong_leaves(actual, chosen(parallel)) == set()


def train_by(parallel: str) -> list[float]:
    config = chosen(parallel)
    sizes = config.parallel.mesh_sizes(SIZES[parallel])
    return train(make_mesh(sizes, config.parallel.mesh_axes, simulate="ranks"), parallel=parallel)


@pytest.mark.parametrize("parallel", sampled(TRAINED, "pp+tp"))
def test_training_by_every_choice_on_processes_has_the_losses_of_one_device(
    parallel: str, gloo: Gloo
) -> None:
    for losses in gloo(4).run(train_by, parallel):
        assert losses == pytest.approx(trained_on_one_device(), rel=EXACT)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("tp+dq", "'dq' is none of dp, fsdp, zero, ep, cp, pp, tp, sp"),
        ("dp+sp", "sp needs tp: it shards what tp leaves unsharded between its layers"),
        ("dp+zero", "dp and zero exclude each other: zero shards the batch as dp does"),
        ("dp+fsdp", "dp and fsdp exclude each other: fsdp shards the batch as dp does"),
        ("fsdp+zero", "fsdp and zero exclude each other: fsdp shards the moments too"),
    ],
)
def test_choices_that_make_no_sense_are_refused(text: str, error: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is compared
        Parallel.of(text)
    assert str(caught.value) == error


def test_all_other_combinations_make_sense() -> None:
    names = [name for name in CHOICES if name != "sp"]
    for number in range(1, 2 ** len(names)):
        chosen = {name for at, name in enumerate(names) if number >> at & 1}
        if len(chosen & {"dp", "fsdp", "zero"}) <= 1:
            parallel = Parallel.of("+".join(chosen))
            specs = optree.tree_leaves(model.specs(replace(CONFIG, parallel=parallel)))
            assert all(isinstance(spec, P) for spec in specs)


def test_float32_gradients_are_within_the_stated_tolerance() -> None:
    sharded = step.sharded_loss_and_grads(make_mesh((2, 4), AXES), CONFIG)
    errors = compare(sharded, params(), batch(), torch.float32)
    assert list(errors) == list(on_one_device())
    assert 0 < max(errors.values()) <= tolerance(torch.float32, 8 * CONFIG.length) < 2e-6


def test_a_gradient_that_is_wrong_fails_the_check_by_name() -> None:
    def doubled(weights: Params, tokens: Tensor) -> tuple[Tensor, Params]:
        loss, grads = plain.loss_and_grads(weights, tokens)
        grads["layers"][1]["down"] = grads["layers"][1]["down"] * 1.001
        return loss, grads

    with pytest.raises(AssertionError, match=r"\{'layers\.1\.down': 0\.0[01]"):
        compare(doubled, params(), batch(), torch.float32)


def test_the_text_has_the_entropies_that_the_demo_states() -> None:
    text = data.load_text()
    # The help topics differ a little between versions of Python.
    assert data.unigram_entropy(text) == pytest.approx(3.26, abs=0.05)
    assert data.bigram_entropy(text) == pytest.approx(2.45, abs=0.05)


def test_batches_are_windows_of_the_text_that_depend_on_the_seed_alone() -> None:
    text = torch.arange(100)
    first, again, other = (data.sample_batch(text, 8, 4, seed) for seed in (0, 0, 1))
    assert first.shape == (4, 9)
    assert first.equal(again)
    assert not first.equal(other)
    assert (first.diff() == 1).all()
