"""Fuzzes every operator of op_db and writes the first section of docs/coverage.md.

Run: .venv/bin/python -m tests.checker.support.fuzz_all
"""

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.checker.support import page
from tests.checker.support.fuzz import Report, cases, drawn, floors, try_types, written_in_place
from tests.checker.support.recorded_rows import overloads_met, record

SAMPLES: Final = 3
DRAWS: Final = 6
FLOORS: Final = ("V", "R, cotangent V", "R, cotangent P", "I")

# What the tables cannot accept, by what the refusal says.
DATA: Final = "and diverge"
RANDOM: Final = "would differ between ranks"
LAYOUT: Final = "strided"
UNKNOWN: Final = "nothing is known"
REASONS: Final = {
    DATA: "data-dependent",
    "depends on data": "data-dependent",
    RANDOM: "random",
    LAYOUT: "not strided",
    "_segment_reduce_backward": "its formula for ties is not linear",
    UNKNOWN: "unknown",
}


# Why nothing is tried, by a part of the name.
NOT_RUN: Final = {
    "jiterator": "needs a GPU",
    "attention_forward": "needs a GPU",
    "without_cudnn": "needs a GPU; elsewhere it is batch_norm",
    "sparse": "its operands are not strided",
    "_scaled_mm": "takes float8 only",
    "broadcast_shapes": "takes no tensors",
}


@dataclass
class Summary:
    """Findings of all trials of one operator.

    Attributes:
        name: of the operator, with its variant.
        smooth: whether it has a derivative.
        trials: how many were compared with the ranks.
        skipped: how many this build could not run.
        accepted: per kind of trial, how many samples were accepted.
        refused: per kind of trial, why.
        wrong: claims that do not hold.
    """

    name: str
    smooth: bool
    trials: int = 0
    skipped: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def note(self, kind: str, report: Report) -> None:
        """Counts one trial."""
        self.wrong += [f"{self.name}, operands {kind}: {each}" for each in report.wrong]
        if report.skipped is not None:
            self.skipped += 1
        elif report.refused is not None:
            self.refused.setdefault(kind, report.refused)
        else:
            self.trials += 1
            self.accepted[kind] += 1


def name_of(info: Any) -> str:
    return f"{info.name} {info.variant_test_name}".strip()


def runs_here(info: Any) -> bool:
    """Returns whether there is anything to fuzz: jiterator needs a GPU."""
    types = info.supported_dtypes("cpu")
    return bool({torch.float64, torch.complex128} & types) and "jiterator" not in info.name


def runs_forward(info: Any) -> bool:
    """Returns whether it takes only integers or bools, so that there is a forward to fuzz."""
    whole = torch.int64 in info.supported_dtypes("cpu") and "jiterator" not in info.name
    return whole and not runs_here(info)


def dtypes_of(info: Any, thorough: bool) -> Sequence[torch.dtype]:
    """float64, and complex128 in a thorough run or where there is no other; else int64."""
    both = [d for d in (torch.float64, torch.complex128) if d in info.supported_dtypes("cpu")]
    return (both if thorough else both[:1]) or [torch.int64]


def fuzz_operator(info: Any, samples: int, draws: int, thorough: bool = False) -> Summary:
    """All trials of one operator."""
    summary = Summary(name_of(info), info.supports_autograd and runs_here(info))
    rng = random.Random(info.name)
    for dtype in dtypes_of(info, thorough):
        for case in cases(info, dtype, samples):
            for kind, types in floors(case).items():
                summary.note(kind, try_types(case, types))
            for types in drawn(case, rng, draws):
                summary.note("random", try_types(case, types, rng.randrange(1 << 30)))
        variant = written_in_place(info)
        for case in cases(info, dtype, samples, variant) if variant else ():
            for types in [*floors(case).values(), *drawn(case, rng, draws)]:
                summary.note("in place", try_types(case, types, rng.randrange(1 << 30)))
    return summary


def reason_of(text: str) -> str:
    """The short form of a refusal."""
    return next((short for part, short in REASONS.items() if part in text), "no rule")


def level(summary: Summary) -> str:
    """precise: all floors accepted; partly, refused, not run."""
    if not summary.trials and not summary.refused:
        return "not run"
    missing = [kind for kind in FLOORS if kind in summary.refused]
    if not missing:
        return "precise"
    return "refused" if len(missing) == len(FLOORS) else "partly"


def partials(summary: Summary) -> str:
    """The floating operands that may be P while the others are R."""
    numbers = [k.removeprefix("P in ") for k in sorted(summary.accepted) if k.startswith("P in ")]
    return ", ".join(numbers)


def _row(summary: Summary) -> str:
    if level(summary) == "not run":
        why = next((why for part, why in NOT_RUN.items() if part in summary.name), "")
        return f"| `{summary.name}` | not run |  | {why} |"
    gaps = "; ".join(
        f"{kind}: {reason_of(summary.refused[kind])} (`{summary.refused[kind].split(':')[0]}`)"
        for kind in FLOORS
        if kind in summary.refused
    )
    return f"| `{summary.name}` | {level(summary)} | {partials(summary)} | {gaps} |"


def _groups(summaries: Sequence[Summary]) -> Iterator[str]:
    """Yields a row of operators for each set of operands that may be P."""
    groups: dict[str, list[str]] = {}
    for each in summaries:
        groups.setdefault(partials(each), []).append(f"`{each.name}`")
    for which, names in sorted(groups.items()):
        yield f"| {which or 'none'} | {', '.join(sorted(names))} |"


def document(summaries: Sequence[Summary]) -> str:
    """The coverage page."""
    levels = Counter(level(each) for each in summaries)
    ordered = sorted(summaries, key=lambda each: each.name)
    smooth = [each for each in summaries if each.smooth and each.trials + len(each.refused)]
    both = [each for each in smooth if not {"V", "R, cotangent V"} & each.refused.keys()]
    pending = [each for each in smooth if "R, cotangent P" not in each.refused]
    lines = [
        "# Operators that the checker can type",
        "",
        "Generated by `make fuzz` from PyTorch's operator database "
        f"(torch {torch.__version__.split('+')[0]}); do not edit.",
        "",
        f"Of {len(summaries)} operators: "
        + ", ".join(f"{count} {what}" for what, count in sorted(levels.items()))
        + f". {sum(each.trials for each in summaries)} trials, forward and backward, were compared "
        f"with what the ranks compute; {sum(len(each.wrong) for each in summaries)} were wrong.",
        "",
        f"Of {len(smooth)} differentiable operators {len(both)} "
        f"({100 * len(both) / max(1, len(smooth)):.1f} %) are accepted forward and backward with "
        "all operands V, and with all R and cotangents V; "
        f"{len(pending)} also with cotangents that are pending sums (P).",
        "",
        "*precise*: accepted with all operands V, with all R (cotangents V, and P), and with all "
        "I. *P in*: the floating operands, counted from 0, each of which may be P while the others "
        "are R. First the precise ones, by *P in*, then all others. *random*: the operator draws "
        "numbers, so its I operand meets a V. *data-dependent*: ranks would get different shapes "
        "or Python values. *no rule*: not known to be linear.",
        "",
        "| P in | precise operators |",
        "|---|---|",
        *_groups([each for each in ordered if level(each) == "precise"]),
        "",
        "| operator | level | P in | refused |",
        "|---|---|---|---|",
        *(_row(each) for each in ordered if level(each) != "precise"),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Fuzzes everything; the exit status says whether anything was wrong."""
    page.begin()
    summaries = [
        fuzz_operator(info, SAMPLES, DRAWS, thorough=True)
        if runs_here(info) or runs_forward(info)
        else Summary(name_of(info), info.supports_autograd)
        for info in op_db
    ]
    record({name_of(info): overloads_met(info) for info in op_db if runs_here(info)})
    wrong = [claim for each in summaries for claim in each.wrong]
    print(sum(each.trials for each in summaries), "trials")
    return page.finish(document(summaries), wrong, "no wrong claim")


if __name__ == "__main__":
    sys.exit(main())
