"""Random programs of one class of mistakes: each is refused, or is what the truth says.

A generator draws a `Trial` from a random number generator. A trial knows the truth (one device, a
function that was never checked before, the strategy of single ranks) and compares the checker's
answer with it.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from shardmap_torch import ShardMapError

REFUSED: Final = "refused"
EQUAL: Final = "equal"
WRONG: Final = "wrong"


class Trial(Protocol):
    """One program.

    Attributes:
        right: whether it is a right program by how it was made; of others the truth decides.
    """

    @property
    def right(self) -> bool: ...

    def fate(self) -> str:
        """Returns REFUSED, EQUAL to the truth, or WRONG."""
        ...


@dataclass
class Tally:
    """Fates of many trials.

    Attributes:
        fates: of all trials.
        rights: of those that are right by how they were made.
        wrong: programs that were accepted and are not the truth, or that broke the checker.
    """

    fates: Counter[str] = field(default_factory=Counter)
    rights: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def note(self, seed: int, trial: Trial) -> None:
        """Runs one trial and counts it."""
        try:
            fate, text = trial.fate(), ""
        except Exception as error:  # Anything else than a refusal is a defect of the checker.
            fate, text = WRONG, f" {type(error).__name__}: {error}"
        self.fates[fate] += 1
        if trial.right:
            self.rights[fate] += 1
        if fate == WRONG:
            self.wrong.append(f"seed {seed}: {trial}{text}")


def tally(draw: Callable[[random.Random], Trial], seeds: Iterable[int]) -> Tally:
    """Runs the trial of each seed."""
    found = Tally()
    for seed in seeds:
        found.note(seed, draw(random.Random(seed)))
    return found


def fate_against(run: Callable[[], Sequence[Any]], truth: Callable[[], Sequence[Any]]) -> str:
    """Compares results of checked code with the truth: tensors up to rounding, all else equal."""
    try:
        found = run()
    except ShardMapError:
        return REFUSED
    except Exception as error:  # The program's own, if the truth has it too.
        if _raised(truth) is type(error):
            return REFUSED
        raise
    expected = truth()
    same = len(found) == len(expected) and all(map(is_same, found, expected))
    return EQUAL if same else WRONG


def _raised(truth: Callable[[], object]) -> type[Exception] | None:
    try:
        truth()
    except Exception as error:
        return type(error)
    return None


def is_same(x: Any, y: Any) -> bool:
    """Compares two results; ranks add the same float64 numbers in another order."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and torch.allclose(x, y, rtol=1e-9, atol=1e-10, equal_nan=True)
    return type(x) is type(y) and bool(x == y)


def numbers(*shape: int) -> Tensor:
    """Draws numbers in float64, the same each time."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def differentiated(f: Callable[..., Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    """Returns the value of `f` and its gradients, by a cotangent of numbers that all differ."""
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    y = f(*leaves)
    if not y.requires_grad:
        return [y]
    cotangent = torch.linspace(0.5, 2.0, y.numel(), dtype=y.dtype).reshape(y.shape)
    return [y.detach(), *torch.autograd.grad(y, leaves, cotangent, materialize_grads=True)]
