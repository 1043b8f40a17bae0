"""Validation, the report of `validate_rule`, and Findings, which collects it."""

from dataclasses import dataclass, field

from shardmap_torch.errors import ShardTypeError, listing
from shardmap_torch.validate.numbers import Fault


@dataclass(frozen=True)
class Validation:
    """The claims that `validate_rule` tried, and those that hold.

    Attributes:
        name: name of the target.
        tried: number of runs on simulated ranks that were compared with the claims.
        shown: the claims that held.
        refused: the types of operands that the checker refuses, which have no claims.
    """

    name: str
    tried: int
    shown: tuple[str, ...]
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Formats the claims, one per line."""
        lines = [f"{self.name}: {len(self.shown)} claims hold in {self.tried} runs"]
        lines += [f"  {claim}" for claim in self.shown]
        return "\n".join(lines + [f"  refused: {refusal}" for refusal in self.refused])


@dataclass
class Findings:
    """Collects the outcome of each claim in each run.

    Attributes:
        name: name of the target.
        tried: the number of runs so far.
        held: the claims that held, in order.
        wrong: those that did not, each with its worst fault.
        refused: as in `Validation`.
    """

    name: str
    tried: int = 0
    held: dict[str, None] = field(default_factory=dict)
    wrong: dict[str, Fault] = field(default_factory=dict)
    refused: dict[str, None] = field(default_factory=dict)

    def note(self, claim: str, fault: Fault | None) -> None:
        """Records the outcome of one claim in one run."""
        if fault is None:
            self.held[claim] = None
        elif claim not in self.wrong or self.wrong[claim].worst < fault.worst:
            self.wrong[claim] = fault

    def report(self) -> Validation:
        """Returns the report.

        Raises:
            ShardTypeError: a claim does not hold.
        """
        if self.wrong:
            count = len(self.wrong)
            does = "claim does" if count == 1 else "claims do"
            raise ShardTypeError(
                listing(
                    f"validate_rule: {self.name}: {count} {does} not hold:",
                    [f"{claim}: {fault}" for claim, fault in self.wrong.items()],
                )
            )
        return Validation(self.name, self.tried, tuple(self.held), tuple(self.refused))
