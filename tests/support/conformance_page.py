"""Writes docs/conformance.md from the cells that tests/programs/test_conformance.py runs.

python -m tests.support.conformance_page
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

from tests.programs.support.conformance import (
    COMPLEX,
    DTYPES,
    HALVES,
    INTEGERS,
    MEMORY,
    MODES,
    ONLY_MOVED,
    WIDE,
    Cell,
    cells,
    hurting,
    runs_of,
)

PAGE: Final = Path(__file__).parents[2] / "docs/conformance.md"

GROUPS: Final = (WIDE, HALVES, COMPLEX, INTEGERS, (torch.bool,), ONLY_MOVED)

HEAD: Final = """\
# The same numbers on every mesh

<!-- Made by `python -m tests.support.conformance_page` from the cells of
tests/programs/support/conformance.py; do not edit. -->

One function runs on simulated ranks and on processes, and its numbers have to be the same there.
The communication libraries do not see to that by themselves. On gloo (torch 2.13) a maximum over
ranks loses a NaN, by the position in the tensor; sums of bfloat16 are rounded at each hop, so that
equal columns get unequal sums; sums of bool are bytes of 2 and 4; int16, uint16, uint32, uint64
and float8 are refused. `shardmap_torch` makes up for that. The table says what it promises;
`tests/programs/test_conformance.py` tries every cell of it, with each argument of each collective,
and names the cell that differs.

- **bits**: the result has the bits that were sent, those of a NaN included.
- **equal**: the mathematics is exact. Integers wrap around. A maximum or minimum is NaN on every
  rank if one rank has a NaN. A zero may have either sign, and a NaN any bits.
- **one rounding**: the addends are added in float32, in the order of the ranks, and the sum is
  rounded once; the quotient of a mean once more. Equal columns get equal sums, and `all_reduce(x)`
  is `all_gather(reduce_scatter(x))`.
- **each addition rounds**: in the dtype itself, and in an order that is the library's; on gloo it
  depends on the position. So meshes agree to n - 1 roundings of the largest sum on the way; where
  that overflows they need not agree.
- **refused**: torch cannot add it, or it has no order; by one error on every mesh, which can be
  used afterwards.

"""

FOOT: Final = """
## What it costs

Sums of bfloat16 and float16, and maxima and minima of floating dtypes, are taken apart on
processes: the ranks exchange parts, combine them and gather the results, which sends 2(n-1)/n of
the operand, as a ring does. Two ranks, and operands of up to 32 KiB, gather all values and combine
them on each rank: n - 1 times the operand, in one message instead of two.
`comm_dtype=torch.float32` adds halves on the library's ring instead, with twice the bytes. Sums of
other dtypes are the library's own.

On NCCL maxima, minima and what is moved go the same ways; sums of halves are NCCL's own, in its
order. Nothing of this has run on a GPU yet.
"""


def page() -> str:
    """The whole text."""
    return "".join([HEAD, *_promises(), *_scope(), FOOT])


def _promises() -> Iterable[str]:
    names = [", ".join(map(_name, group)) for group in GROUPS]
    yield f"| | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}\n"
    rows: dict[str, list[str]] = {}
    for cell in cells(4):
        told = [_only({cell.promise(dtype) for dtype in group}) for group in GROUPS]
        title = _title(cell)
        assert rows.setdefault(title, told) == told, title
    merged: dict[tuple[str, ...], list[str]] = {}
    for title, told in rows.items():
        merged.setdefault(tuple(told), []).append(title)
    for promises, titles in merged.items():
        yield f"| {', '.join(titles)} | {' | '.join(promises)} |\n"


def _title(cell: Cell) -> str:
    name = cell.collective.name
    return f"`{name}(op={cell.op!r})`" if cell.op else f"`{name}`"


def _only(texts: set[str]) -> str:
    (text,) = texts
    return text


def _scope() -> Iterable[str]:
    vmap, ranks, gloo = (_count(kind) for kind in ("vmap", "ranks", "gloo"))
    floats = ", ".join(f"{number:g}" for number in hurting(torch.float32))
    integers = ", ".join(map(str, hurting(torch.int8)))
    yield f"""
## What is tried

Each collective with each of its arguments, on 2 and on 4 ranks:

- **derivatives**: {", ".join(MODES)}; `vmap` is the user's own;
- **memory** of operands and cotangents: scalars, {", ".join(MEMORY)};
- **values**, alone on the first or the last rank, in ties, and by lot: of float32 {floats};
  of int8 {integers}; and likewise of each dtype;
- **meshes**: one batched program ({vmap:,} cells), ranks as threads ({ranks:,}), gloo processes
  ({gloo:,}).

Not there: forward mode that begins in a body of threads, and `ragged_all_to_all` in a batched
program or under `vmap`, each refused with what to use instead. `make test` runs a part, `make fuzz`
all.
"""


def _count(kind: str) -> int:
    return sum(len(runs_of(n, kind, d, tuple(MEMORY), MODES)) for n in (2, 4) for d in DTYPES)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    PAGE.write_text(page())
