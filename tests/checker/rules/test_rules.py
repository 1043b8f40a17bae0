"""Every row of the rule tables holds numerically, and every loosened row is caught.

Tried are a fixed twentieth, and the rows that have changed since `make fuzz` tried all.
"""

import ast
import random
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest
import torch
from torch._ops import OpOverload

from shardmap_torch.checker.rules import operators, registry
from shardmap_torch.checker.rules.infer import name_arguments, tensors_of
from shardmap_torch.checker.rules.networks import HIDDEN_WRITES
from shardmap_torch.checker.rules.rule import Row, each, merged, overloads
from tests.checker.support.calls import Call, calls_of, every_row, overload, recorded
from tests.checker.support.loosened import (
    HOLDS,
    ROWS,
    UNSHOWN,
    calls_to_try,
    fate_of,
    fates,
    holding,
)
from tests.checker.support.recorded_rows import changed_rows
from tests.checker.support.true_mutants import TRUE
from tests.checker.support.validate import missing, same, validate
from tests.support.fuzzing import FUZZ
from tests.support.release import IS_PINNED

# Some overloads warn of their deprecation.
pytestmark = pytest.mark.usefixtures("quiet")
SAMPLE: Final = frozenset(random.Random(0).sample(sorted(ROWS), len(ROWS) // 20))
CHANGED: Final = frozenset(name.removeprefix("aten.") for name in changed_rows())
FILES: Final = [
    path
    for path in sorted(Path(registry.__file__).parent.glob("*.py"))
    if "\nROWS: Final" in path.read_text()
]


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", [name for name in ROWS if FUZZ or name in SAMPLE | CHANGED])
def test_row_holds_on_every_recorded_call(name: str) -> None:
    op, row = ROWS[name]
    findings = validate(op, row, calls_to_try(op))
    assert findings.wrong == []
    assert missing(op, row, findings) == set()


def names_of(row: Row) -> set[str]:
    rows = row.results or (row,)
    return {name for each in rows for term in (*each.linear, each.unread) for name in term}


def test_an_overload_in_two_tables_is_refused() -> None:
    add, mul = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
    with pytest.raises(ValueError, match=r"^rows that stand twice: aten.add.Tensor$"):
        merged({add: Row()}, {mul: Row()}, {add: Row()})


def test_every_overload_named_in_the_tables_exists() -> None:
    """`each` leaves out what an older torch lacks; the pinned one lacks nothing."""
    for path in FILES:
        for name in names_in(path):
            assert each(Row(), name), f"{name} in {path.name}"
    for name in operators._NAMES.split():
        assert overloads(f"_foreach_{name}"), name


def names_in(path: Path) -> list[str]:
    """The overloads that a table file names."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    known = vars(import_module(f"shardmap_torch.checker.rules.{path.stem}"))
    texts = [
        eval(compile(ast.Expression(call.args[1]), path.name, "eval"), known)
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "each"
    ]
    return [name for text in texts for name in text.split()]


def test_rows_speak_of_arguments_that_exist() -> None:
    for op, row in every_row().items():
        assert names_of(row) <= {argument.name for argument in op._schema.arguments}, op
        assert len(row.results) in (0, len(op._schema.returns)), op


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", sorted(SAMPLE))
def test_loosened_row_is_caught_unless_it_is_true_as_well(name: str) -> None:
    assert holding(fates(name)) == TRUE.get(name, {}).keys()


@pytest.mark.parametrize("name", TRUE)
def test_rows_that_may_be_loosened_are_those_that_are_listed(name: str) -> None:
    assert holding(fates(name)) == TRUE[name].keys()


def test_a_row_that_claims_what_no_call_shows_does_not_pass() -> None:
    op, row = ROWS["_grouped_mm.default"]
    assert fate_of(op, replace(row, unread=("bias",))) == UNSHOWN
    assert fate_of(op, row) == HOLDS


def test_what_a_schema_hides_is_written_is_listed() -> None:
    hidden = set()
    for name in recorded():
        op = overload(name) if name.startswith("aten.") and is_of_release(name) else None
        if op is not None and not op._schema.is_mutable:
            hidden |= {(op, each) for call in calls_of(op) for each in written(op, call)}
    on_cpu = {(op, each) for op, names in HIDDEN_WRITES.items() for each in names}
    assert hidden == {(op, each) for op, each in on_cpu if str(op) in recorded()}


def is_of_release(name: str) -> bool:
    """Returns whether this torch has the operator; the pinned one has all that are recorded."""
    there = hasattr(torch.ops.aten, name.split(".")[1])
    assert there or not IS_PINNED, name
    return there


def written(op: OpOverload, call: Call) -> set[str]:
    """The names of the arguments that a call changed."""
    arguments = name_arguments(op, *call)
    tensors = [(name, x) for name, value in arguments.items() for x in tensors_of(value)]
    before = [x.clone() for _, x in tensors]
    try:
        op(*call[0], **call[1])
    except (RuntimeError, ValueError, IndexError):
        return set()
    return {name for (name, x), y in zip(tensors, before, strict=True) if not same(x, y)}


def test_every_overload_that_takes_a_generator_says_that_it_draws() -> None:
    """An untagged draw would be typed as a function of its operands."""
    # Functions of a key that they are given.
    stateless = ("_philox_normal", "_philox_uniform")
    untagged = {
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and not name.split(".")[0].removesuffix("_").endswith(stateless)
        for op in [overload_of(name)]
        if op is not None and any("Generator" in str(a.type) for a in op._schema.arguments)
        if torch.Tag.nondeterministic_seeded not in op.tags and not op._overloadname.endswith("out")
    }
    assert untagged == set()


def overload_of(name: str) -> OpOverload | None:
    """The overload that the dispatcher calls `aten::add.Tensor`."""
    packet, _, which = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), which or "default", None)
