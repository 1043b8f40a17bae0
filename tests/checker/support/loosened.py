"""Fates of the rows of the rule tables, each loosened in one place.

Run, which writes a section of docs/coverage.md: .venv/bin/python -m tests.checker.support.loosened
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

import torch
from torch._ops import OpOverload

from shardmap_torch.checker.rules.rule import Row
from tests.checker.support import page
from tests.checker.support.calls import Call, calls_of, every_row
from tests.checker.support.extra_calls import extra_calls
from tests.checker.support.mutants import mutants
from tests.checker.support.true_mutants import TRUE
from tests.checker.support.validate import missing, validate

# Kernels that a CPU does not have; test_rules_gpu.py tries them.
ON_GPU: Final = frozenset(
    """_fused_rms_norm_backward.default cudnn_batch_norm_backward.default
    _scaled_dot_product_flash_attention.default _flash_attention_forward.default
    _scaled_dot_product_efficient_attention.default _efficient_attention_forward.default
    _scaled_dot_product_cudnn_attention.default
    _scaled_dot_product_flash_attention_backward.default _flash_attention_backward.default
    _scaled_dot_product_cudnn_attention_backward.default
    _scaled_dot_product_efficient_attention_backward.default _efficient_attention_backward.default
    """.split()
)

ROWS: Final = {
    str(op).removeprefix("aten."): (op, row)
    for op, row in every_row().items()
    if row.refuse is None and str(op).removeprefix("aten.") not in ON_GPU
}

REFUTED: Final = "refuted by numbers"
UNSHOWN: Final = "claims what no call shows"
HOLDS: Final = "true as well"


@cache
def calls_to_try(op: OpOverload) -> Sequence[Call]:
    torch.manual_seed(0)
    return [*calls_of(op), *extra_calls(op)]


def fate_of(op: OpOverload, row: Row) -> str:
    """Returns what the tests of rows would say of a loosened row.

    Refuted: a claim does not hold, or the kernel refuses what the row allows. Unshown: nothing is
    wrong, but no call shows all that the row claims, which the tests demand of every row. True as
    well: all its claims are seen to hold.
    """
    try:
        findings = validate(op, row, calls_to_try(op), stop=True)
    except (RuntimeError, ValueError):
        return REFUTED
    if findings.wrong:
        return REFUTED
    return UNSHOWN if missing(op, row, findings) else HOLDS


def fates(name: str) -> dict[str, str]:
    """The fate of each loosening of one row."""
    op, row = ROWS[name]
    return {what: fate_of(op, each) for what, each in mutants(op, row)}


def holding(fates: Mapping[str, str]) -> set[str]:
    """The loosenings that nothing catches."""
    return {what for what, fate in fates.items() if fate == HOLDS}


def section(found: Mapping[str, Mapping[str, str]]) -> str:
    """Writes the section on loosened rows of the page on coverage."""
    count = Counter(fate for each in found.values() for fate in each.values())
    rows = [
        (f"`{name}`", what, why) for name, reasons in TRUE.items() for what, why in reasons.items()
    ]
    text = (
        f"Each of {len(found)} rows of the rule tables was loosened in every way that "
        f"`tests/checker/support/mutants.py` knows, which makes {count.total()} rows that "
        f"claim more: "
        f"{count[REFUTED]} are refuted by numbers; {count[UNSHOWN]} claim what no call on a "
        f"CPU shows, and the tests let no such row pass; {count[HOLDS]} hold as well, for the "
        f"reasons below. Rows of {len(ON_GPU)} kernels that only a GPU has are not among them."
    )
    head = ("row", "loosened", "why it holds")
    return page.section("Loosened rows", "loosened", text, page.table(head, rows))


def main() -> int:
    """Loosens every row; the exit status says whether one came through unexpectedly."""
    page.begin()
    found = {name: fates(name) for name in ROWS}
    passed = [name for name, each in found.items() if holding(each) != TRUE.get(name, {}).keys()]
    fine = "every loosened row is caught, but those that are known to hold"
    return page.finish(section(found), passed, fine)


if __name__ == "__main__":
    sys.exit(main())
