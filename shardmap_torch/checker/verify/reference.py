"""The one-device reference program, with which global strictness compares a body."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from shardmap_torch.checker.ir.paths import Branch
from shardmap_torch.checker.ir.repairs import Spot
from shardmap_torch.errors import ShardTypeError

if TYPE_CHECKING:
    from shardmap_torch.checker.spmd.recorder import Recorder


@dataclass(frozen=True)
class OneDevice:
    """The program on one device: every axis has one rank, and no collective does anything.

    Attributes:
        steps: the steps of the program.
        branches: the branches that it has taken.
        numbers: the numbers that it has made of values taken from tensors.
        failure: the exception that it raised, or None if it has returned.
        runs: how often each call has run, if a repair is tried.
    """

    steps: "Recorder"
    branches: Sequence[Branch]
    numbers: Sequence[str]
    failure: Exception | None
    runs: Mapping[Spot, int]

    def require(self, name: str, branches: Sequence[Branch], numbers: Sequence[str]) -> None:
        """Raises an error that occurred on one device only, or where the programs differ."""
        if self.failure is not None:
            raise ShardTypeError(
                f"{name}: check='global': on one device the body fails: "
                f"{type(self.failure).__name__}: {self.failure}\nFix: write sizes that are right "
                "on one device too: -1, x.shape[...], or a size divided by axis_size(axis)."
            ) from self.failure
        if list(branches) != list(self.branches):
            raise ShardTypeError(
                f"{name}: check='global': on one device the body takes other branches."
            )
        pairs = zip_longest(numbers, self.numbers, fillvalue="none")
        for here, there in pairs:
            if here != there:
                raise ShardTypeError(
                    f"{name}: check='global': a number made of values taken from tensors is {here} "
                    f"on a rank and {there} on one device.\nFix: multiply sizes by "
                    "axis_size(axis)."
                )
