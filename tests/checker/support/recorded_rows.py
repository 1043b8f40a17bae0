"""A hash for each row of the rule tables as they were when all of op_db was last fuzzed.

`rows.json` also says which operators of op_db meet a row, forward or backward, so that those whose
row has changed since are tried again by `make test`. `make fuzz` writes it.
"""

import hashlib
import inspect
import io
import json
import tokenize
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardmap_torch.checker.rules.registry import TABLE, functional
from shardmap_torch.checker.rules.rule import Row
from tests.checker.support.calls import every_row
from tests.checker.support.fuzz import cases, derive

PATH: Final = Path(__file__).with_name("rows.json")


def digest(row: Row) -> str:
    """Equal for equal rows, on every version of Python; conditions count by their code."""
    return hashlib.sha256(_shown(row).encode()).hexdigest()[:12]


def _shown(value: Any) -> str:
    if isinstance(value, Row):
        return "; ".join(_shown(getattr(value, each.name)) for each in fields(Row))
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_shown, value)) + ")"
    return _code(inspect.getsource(value)) if callable(value) else repr(value)


_STARTS: Final = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
_NO_CODE: Final = (tokenize.COMMENT, tokenize.NL, *_STARTS)


def _code(source: str) -> str:
    """The tokens of a condition without comments and docstrings."""
    found: list[str] = []
    starts = True
    with suppress(tokenize.TokenError):  # the source of a lambda is that of its lines, not whole
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in _NO_CODE:
                starts = starts or token.type in _STARTS
            elif not (starts and token.type == tokenize.STRING):
                found.append(token.string)
                starts = False
    return " ".join(found)


def digests() -> dict[str, str]:
    """The rows as they are now."""
    return dict(sorted((str(op), digest(row)) for op, row in every_row().items()))


@cache
def recorded_rows() -> dict[str, dict[str, Any]]:
    """`rows`: hashes by overload; `operators`: overloads with a row, by operator of op_db."""
    loaded = json.loads(PATH.read_text())
    return dict(loaded)


def changed_rows(rows: Mapping[str, str] | None = None) -> frozenset[str]:
    """Overloads whose row is not as it was when it was recorded, is new, or is gone."""
    then, now = recorded_rows()["rows"], digests() if rows is None else rows
    return frozenset(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


def changed_operators(rows: Mapping[str, str] | None = None) -> frozenset[str]:
    """Operators that meet a row which has changed."""
    changed = changed_rows(rows)
    return frozenset(
        name
        for name, overloads in recorded_rows()["operators"].items()
        if not changed.isdisjoint(overloads)
    )


class _Met(TorchDispatchMode):
    """Collects the overloads with a row that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        rows = [op for op in (func, *functional(func)) if op in TABLE]
        self.names |= {str(op) for op in rows[:1]}
        return func(*args, **(kwargs or {}))


def overloads_met(info: Any) -> list[str]:
    """The overloads with a row that an operator of op_db calls, forward and backward."""
    met = _Met()
    dtypes = info.supported_dtypes("cpu")
    dtype = torch.float64 if torch.float64 in dtypes else torch.complex128
    for case in cases(info, dtype, 3):
        values = {
            place: case.leaves[place].detach().clone().requires_grad_(place in case.smooth)
            for place in case.places
        }
        try:
            with met:
                outs = case.call(values)
                seeds = {i: torch.ones_like(y) for i, y in enumerate(outs) if y.requires_grad}
                derive(outs, values, seeds)
        except (RuntimeError, ValueError, NotImplementedError):
            continue  # a sample that this build cannot run
    return sorted(met.names)


def record(operators: Mapping[str, Sequence[str]]) -> None:
    """Writes down what has been fuzzed."""
    entries: dict[str, dict[str, Any]] = {
        "rows": digests(),
        "operators": {name: sorted(each) for name, each in sorted(operators.items())},
    }
    lines = [
        f"{json.dumps(key)}: {{\n"
        + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
        + "\n}"
        for key, value in entries.items()
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
