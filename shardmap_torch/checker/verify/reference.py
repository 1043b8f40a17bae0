"""The one-device reference program, with which global strictness compares a body."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from shardmap_torch.checker.interpreter.spots import Spots
from shardmap_torch.checker.ir.paths import Branch
from shardmap_torch.core.source_location import Site, error_site
from shardmap_torch.errors import ShardTypeError

if TYPE_CHECKING:
    from shardmap_torch.checker.spmd.recorder import Recorder


@dataclass(frozen=True)
class OneDevice:
    """The program on one device: every axis has one rank, and no collective does anything.

    Attributes:
        steps: the steps of the program.
        branches: the branches that it has taken.
        numbers: those that it has made of values taken from tensors, with their lines.
        failure: the exception that it raised, or None if it has returned.
        spots: its calls, if a repair is tried.
    """

    steps: "Recorder"
    branches: Sequence[Branch]
    numbers: Mapping[str, Site | None]
    failure: Exception | None
    spots: Spots | None

    def require(
        self, name: str, branches: Sequence[Branch], numbers: Mapping[str, Site | None]
    ) -> None:
        """Raises an error that occurred on one device only, or where the programs differ."""
        if isinstance(self.failure, ShardTypeError):
            raise self.failure
        if self.failure is not None:
            raise ShardTypeError(
                f"{name}: check='global': on one device the body fails: "
                f"{type(self.failure).__name__}: {self.failure}\n"
                f"  at {error_site(self.failure)}\n"
                "Fix: write sizes that are right on one device too: -1, x.shape[...], or a size "
                "divided by axis_size(axis)."
            ) from self.failure
        for mine, other in zip_longest(branches, self.branches, fillvalue="no branch"):
            if mine != other:
                raise ShardTypeError(
                    f"{name}: check='global': on one device the body takes other branches.\n"
                    f"  on a rank: {mine}\n  on one device: {other}\n{_SIZES}"
                )
        pairs = zip_longest(numbers.items(), self.numbers.items(), fillvalue=("none", None))
        for (here, site), (there, _) in pairs:
            if here != there:
                raise ShardTypeError(
                    f"{name}: check='global': a number made of values taken from tensors is {here} "
                    f"on a rank and {there} on one device.\n  at {site}\n{_SIZES}"
                )


_SIZES: Final = "Fix: multiply sizes by axis_size(axis)."
