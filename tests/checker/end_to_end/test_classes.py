"""Random programs of each class of mistakes are refused, or are what the truth says."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import pytest

from shardmap_torch.checker.guards.state import State
from shardmap_torch.checker.interpreter.collectives import AbstractBackend
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.spmd import equivalence
from shardmap_torch.checker.spmd.gradients import Gradients
from shardmap_torch.core.autograd_state import RECORDING
from shardmap_torch.run.drawing import Drawing
from shardmap_torch.run.safety.own_state import Undone
from tests.checker.support.classes import randomness, training
from tests.checker.support.classes.report import CLASSES
from tests.checker.support.classes.trials import EQUAL, REFUSED, tally
from tests.support.fuzzing import sized
from tests.support.pool import Gloo

pytestmark = pytest.mark.usefixtures("quiet")

SEEDS: Final = range(10_000, sized(10_005, 10_200))
WITHOUT_REFUSALS: Final = ("captured state", "impurity", "randomness")
"""Classes in which refusals are compared as well, or nothing that is drawn is refused."""


@pytest.mark.parametrize("name", CLASSES)
def test_a_random_program_is_refused_or_what_the_truth_says(name: str) -> None:
    found = tally(CLASSES[name], SEEDS)
    assert found.wrong == []
    assert found.fates[EQUAL] > 0
    assert (found.fates[REFUSED] > 0) == (name not in WITHOUT_REFUSALS)


@pytest.mark.parametrize("seed", sized(range(2), range(30)))
def test_both_strictnesses_accept_a_right_training_step(seed: int) -> None:
    assert training.drawn(random.Random(seed)).fate() == EQUAL


@pytest.mark.parametrize("seed", sized(range(1), range(20)))
@pytest.mark.parametrize("place", training.SUMS_ELSEWHERE)
def test_local_strictness_refuses_sums_of_something_else_than_gradients(
    place: str, seed: int
) -> None:
    step = replace(training.drawn(random.Random(seed)), mistake=f"sums {place} instead")
    assert not step.is_accepted("local")


def test_processes_of_different_seeds_draw_what_simulated_ranks_draw(gloo: Gloo) -> None:
    bodies = [randomness.drawn(random.Random(seed)) for seed in sized(SEEDS[:4], SEEDS)]
    expected = [body.values_on(randomness.MESHES["ranks"]) for body in bodies]
    for found in gloo(4).run(randomness.in_worker, bodies, timeout=600):
        for body, one, other in zip(bodies, found, expected, strict=True):
            assert body.judged([one, other]) == EQUAL, body


def _nothing(*args: Any, **kwargs: Any) -> None: ...


BREAKS: Final[dict[str, tuple[str, Any, str, Callable[..., Any]]]] = {
    "a backward is not compared with one device": (
        "backwards of one's own", Gradients, "require", _nothing,
    ),
    "what a checkpoint runs again is not seen": (
        "backwards of one's own", AbstractBackend, "seeing", lambda self: nullcontext(),
    ),
    "nothing that is captured has changed": (
        "captured state", State, "holds", lambda self: True,
    ),
    "gradients that ranks alone do not record are not seen": (
        "cut gradients", equivalence, "grad_mode", lambda: RECORDING,
    ),
    "hooks are batched": ("hooks", Interpreter, "needs_ranks", _nothing),
    "what a check changes is not undone": (
        "impurity", Undone, "restore", _nothing,
    ),
    "draws are each rank's own": (
        "randomness", Drawing, "seed", lambda self, types: self._seed() + self._place["dp"],
    ),
}  # fmt: skip


@pytest.mark.fuzz
@pytest.mark.parametrize("name", BREAKS)
def test_random_programs_see_what_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, where, what, instead = BREAKS[name]
    monkeypatch.setattr(where, what, instead)
    assert any(tally(CLASSES[found], [seed]).wrong for seed in range(500))
