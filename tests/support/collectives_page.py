"""Writes docs/collectives.md, and a page a collective, from the table that drives them.

python -m tests.support.collectives_page
"""

import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import shardmap_torch
from shardmap_torch import lax, ops
from shardmap_torch.collectives.table import ROWS, TABLE, CollectiveRow
from shardmap_torch.types import AxisType, I, Partial, R, V

PAGE = Path(__file__).parents[2] / "docs/collectives.md"
FOLDER = PAGE.parent / "reference/collectives"

MEANINGS: dict[AxisType, str] = {
    I: "equal on all ranks; one computation, repeated; cotangents are equal too",
    R: "equal on all ranks, used differently by each; cotangents are addends",
    V: "may differ; S(i) is a V whose ranks' values concatenate along dim i",
    Partial: "an addend; the true value is the sum over the ranks",
}

MOVES: dict[str, str] = {
    "sum": "adds the ranks' values",
    "gather": "joins the ranks' values along a dim",
    "sum_scatter": "adds the ranks' values, keeps its own shard of a dim",
    "exchange": "splits along one dim, joins what arrives along another",
    "ragged": "sends as many rows to each rank as data says",
    "permute": "sends to other ranks, by pairs",
    "broadcast": "copies one rank's value",
    "sum_mask": "adds the ranks' values on one rank, zero elsewhere",
    "mask": "keeps the value on one rank, zero elsewhere",
    "same": "nothing",
    "slice": "keeps its own shard of a dim",
    "pad": "puts the shard at its place among zeros",
}

HEAD = """\
# Collectives

<!-- Made by `python -m tests.support.collectives_page` from
shardmap_torch.collectives.table.ROWS; do not edit. -->

Every collective is one row of one table: what it does to the type along its axes, how the data
moves, and which row carries cotangents back. The functions, their gradients, the checker and this
page are made from it.

## Types

Along each mesh axis, separately, a value in the body of a `shard_map` has one type.

| type | on the ranks of the axis |
|---|---|
"""

ROWS_HEAD = """
## The table

`sends` is what each of n ranks sends, in units of its operand, as on a ring; the operand of the
backward is the cotangent of the result. `convert` and `reinterpret` never send anything.

| forward | type | what it does | sends | backward | type | sends |
|---|---|---|---|---|---|---|
"""

ROWS_FOOT = """
`all_reduce` with op "max" or "min" takes V to I or R and sends as the sum does. It is not linear,
so it has no row: the ranks that hold the extremum share the cotangent evenly. "mean" is the sum
divided by n. `shift` is a `ppermute`; `redistribute` and `reshard` are sequences of these rows.
`reduce` and `mask` occur as backwards only.
"""

PLAN = """
## What a program sends

`plan` says which rows `reshard` would run between two specs, and what they send in units of the
operand, forward and backward.

```python
from shardmap_torch import P, make_mesh
from shardmap_torch.ops.reshard import plan

mesh = make_mesh((2, 4), ("dp", "tp"), kind="simulated")
for step in plan(P(("dp", "tp")), P("dp", "tp"), mesh):
    print(step)
for step in plan(P("tp", partial={"dp"}), P(replicate={"tp"}), mesh):
    print(step)
```

```text
all_to_all('tp', V -> V) dim 0 to 1, sends 3/4 x, back 3/4
all_reduce('dp', Partial -> I), sends 1 x, back 0
all_gather('tp', V -> R) dim 0, sends 3 x, back 3
```
"""

FUNCTIONS_HEAD = """
## Functions

Imported from `shardmap_torch`; each has a page of its own, with its arguments and errors. `axis`
is a name or several, the first of them major; `x` a tensor or a pytree. What sends takes
`comm_dtype=` as well, what sends in backward `grad_comm_dtype=`.
[One wrong use of each](reference/refused.md).

"""

ROWS_OF_ONE = """\
| type | what it does | sends | backward | type | sends |
|---|---|---|---|---|---|
"""

ONE_HEAD = """\
# {name}

<!-- Made by `python -m tests.support.collectives_page`; do not edit. -->

"""

ONE_FOOT = """\
```{{eval-rst}}
.. autofunction:: shardmap_torch.{name}
```
"""

SENDS = """
`sends` is what each of n ranks sends, in units of its operand;
[all collectives](../../collectives.md).

"""

TREE = """
```{{toctree}}
:hidden:

{names}
reference/refused
```
"""

LAX_HEAD = """
## JAX's names

In `shardmap_torch.lax`, with JAX's defaults; `src`, the type of the operand, is for `check=False`.

"""


def page() -> str:
    """The whole text."""
    return "".join(
        [
            HEAD,
            *(f"| {axis_type} | {meaning} |\n" for axis_type, meaning in MEANINGS.items()),
            ROWS_HEAD,
            *(_row(row) for row in ROWS),
            ROWS_FOOT,
            PLAN,
            FUNCTIONS_HEAD,
            *_functions((getattr(shardmap_torch, name) for name in ops.__all__), _linked),
            LAX_HEAD,
            *_functions(getattr(lax, name) for name in lax.__all__ if not name.startswith("axis_")),
            TREE.format(names="\n".join(f"reference/collectives/{name}" for name in ops.__all__)),
        ]
    )


def pages() -> dict[Path, str]:
    """Returns the text of every page."""
    return {PAGE: page()} | {FOLDER / f"{name}.md": _page_of(name) for name in ops.__all__}


def _page_of(name: str) -> str:
    rows = [f"| {_cells(row)} |\n" for row in ROWS if row.name == name]
    parts = [ONE_HEAD, *([ROWS_OF_ONE, *rows, SENDS] if rows else []), ONE_FOOT]
    return "".join(parts).format(name=name)


def _row(row: CollectiveRow) -> str:
    return f"| `{row.name}` | {_cells(row)} |\n"


def _cells(row: CollectiveRow) -> str:
    back = TABLE[row.transpose]
    cells = [_type(row), MOVES[row.move], row.sent, f"`{back.name}`", _type(back), back.sent]
    return " | ".join(cells)


def _type(row: CollectiveRow) -> str:
    return f"{row.src} → {row.dst}"


def _plain(name: str, call: str) -> str:
    return call


def _linked(name: str, call: str) -> str:
    return f"[{call}](reference/collectives/{name}.md)"


def _functions(
    functions: Iterable[Callable[..., Any]], shown: Callable[[str, str], str] = _plain
) -> list[str]:
    return ["| call | what it does |\n|---|---|\n", *(_function(f, shown) for f in functions)]


def _function(function: Callable[..., Any], shown: Callable[[str, str], str]) -> str:
    signature = inspect.signature(function)
    bare = [
        p.replace(annotation=inspect.Parameter.empty, default=_default(p.default))
        for p in signature.parameters.values()
        if not p.name.endswith("comm_dtype")
    ]
    call = str(inspect.Signature(bare)).replace(" = ", "=")
    first = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    call = shown(function.__name__, f"`{function.__name__}{call}`")
    return f"| {call} | {re.sub(r'[|]', chr(92) + '|', first)} |\n"


class _Bare:
    """A default that prints as a user writes it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        names = {I: "I", R: "R", V: "V", Partial: "Partial"}
        if isinstance(self._value, AxisType):
            return names[self._value]
        return repr(self._value)


def _default(value: Any) -> Any:
    return value if value is inspect.Parameter.empty else _Bare(value)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
