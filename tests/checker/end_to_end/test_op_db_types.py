"""A fixed twentieth of op_db, what has changed since `make fuzz`, and that fuzzing sees wrong rows.

`make fuzz` takes all of it, and records the rows that it has seen in `rows.json`.
"""

import random
import re
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from shardmap_torch.checker.rules import infer as typing_of_calls
from shardmap_torch.checker.rules.infer import name_arguments, type_call
from shardmap_torch.checker.rules.lattice import Refusal
from shardmap_torch.checker.rules.registry import row_of
from shardmap_torch.checker.rules.rule import Row, never, product, sums
from shardmap_torch.types import AxisType, Partial
from tests.checker.support.calls import calls_of, every_row, recorded
from tests.checker.support.calls import overload as overload_called
from tests.checker.support.fuzz import Typings, cases, floors, try_types
from tests.checker.support.fuzz_all import (
    FLOORS,
    fuzz_operator,
    name_of,
    reason_of,
    runs_forward,
    runs_here,
)
from tests.checker.support.page import DOCUMENT
from tests.checker.support.recorded_rows import (
    changed_operators,
    changed_rows,
    digest,
    recorded_rows,
)
from tests.support.fuzzing import sized
from tests.support.release import IS_PINNED

pytestmark = pytest.mark.usefixtures("quiet")
RUNNABLE: Final = [info for info in op_db if runs_here(info)]
CHANGED: Final = changed_operators()
# By identity: `==` of two of these compares some sixty fields.
DRAWN: Final = {id(info) for info in random.Random(1).sample(RUNNABLE, len(RUNNABLE) // 20)}
SAMPLE: Final = [info for info in RUNNABLE if id(info) in DRAWN or name_of(info) in CHANGED]
BY_NAME: Final = {name_of(info): info for info in RUNNABLE}

# Floors that are missed for a reason; anything else is a gap in the tables.
EXCUSED: Final = frozenset(
    {"data-dependent", "random", "not strided", "its formula for ties is not linear"}
)


@pytest.mark.sample(8)
@pytest.mark.parametrize("info", SAMPLE, ids=name_of)
def test_what_the_tables_accept_is_what_the_ranks_compute(info: Any) -> None:
    summary = fuzz_operator(info, samples=2, draws=3)
    assert summary.wrong == []
    missed = {kind: text for kind, text in summary.refused.items() if kind in FLOORS}
    unexcused = {k: text for k, text in missed.items() if reason_of(text) not in EXCUSED}
    assert unexcused == {}


def test_a_row_that_changes_has_its_operators_tried_again() -> None:
    relu = "aten.threshold_backward.default"
    assert relu in recorded_rows()["rows"]
    assert digest(Row(zero=True)) != digest(Row(linear=(("self",),)))
    assert "relu" not in {name.removeprefix("nn.functional.") for name in changed_operators()}
    rows = {str(op): digest(row) for op, row in every_row().items()}
    assert changed_rows({**rows, relu: "another"}) - changed_rows(rows) == {relu}
    assert "nn.functional.relu" in changed_operators({**rows, relu: "another"})


@pytest.mark.parametrize("name", ["gcd", "bitwise_xor", "unravel_index", "nn.functional.one_hot"])
def test_operators_of_integers_are_tried_forward(name: str) -> None:
    (info,) = (each for each in op_db if name_of(each) == name)
    assert runs_forward(info)
    summary = fuzz_operator(info, samples=2, draws=3)
    assert summary.trials > 0
    assert summary.wrong == []


def test_the_fuzzing_sees_a_wrong_rule_of_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says that the greatest common divisor is linear in its operands."""
    (info,) = (each for each in op_db if each.name == "gcd")
    monkeypatch.setattr(
        typing_of_calls, "row_of", relaxed("aten.gcd.default", sums("self", "other"))
    )
    assert fuzz_operator(info, samples=3, draws=6).wrong


def relaxed(name: str, row: Row) -> Any:
    """`row_of` with one row replaced."""
    op = overload_called(name)
    return lambda each: row if each is op else row_of(each)


# Planted in the tables one at a time: operator, ATen overload and a row that is wrong.
PLANTED: Final = [
    ("nn.functional.relu", "aten.relu.default", sums("self")),
    ("mul", "aten.mul.Tensor", sums("self", "other")),
    ("add", "aten.add.Tensor", product("self", "other")),
    ("softmax", "aten._softmax_backward_data.default", Row(unread=("grad_output", "output"))),
    ("sigmoid", "aten.sigmoid_backward.default", Row(unread=("grad_output", "output"))),
    ("nn.functional.layer_norm", "aten.native_layer_norm_backward.default", Row(zero=True)),
    ("where", "aten.where.self", product("self", "other")),
    ("exp", "aten.exp.default", Row(unread=("self",))),
    ("nn.functional.dropout", "aten.bernoulli_.float", Row(unread=("self",), draws=never)),
    ("bernoulli", "aten.bernoulli.default", Row(draws=never)),
]


@pytest.mark.parametrize(("operator", "name", "row"), sized(PLANTED[:3], PLANTED))
def test_fuzzing_sees_a_wrong_row(operator: str, name: str, row: Row) -> None:
    with patch.object(typing_of_calls, "row_of", relaxed(name, row)):
        assert fuzz_operator(BY_NAME[operator], samples=3, draws=12).wrong != []


FORMULAS: Final = (
    Path(torch.__file__).parents[1] / "torchgen" / "packaged" / "autograd" / "derivatives.yaml"
)


def linear_overloads() -> dict[str, list[str]]:
    """Overloads whose forward derivative is `auto_linear`, with their differentiable arguments."""
    found: dict[str, list[str]] = {}
    for entry in re.split(r"\n- name: ", FORMULAS.read_text())[1:]:
        head, *lines = entry.split("\n")
        if not re.search(r"^  \w+: auto_linear$", entry, flags=re.MULTILINE):
            continue
        name = head.split("(")[0]
        formulas = [line.strip().split(": ", 1) for line in lines if re.match(r"  [\w, ]+: ", line)]
        smooth = [
            keys
            for keys, formula in formulas
            if not formula.strip('"').startswith(("non_differentiable", "zeros", "not_implemented"))
        ]
        names = [key.strip() for group in smooth for key in group.split(",")]
        packet, _, which = name.partition(".")
        found[f"aten.{packet}.{which or 'default'}"] = names
    return found


# Linear by their formulas, and yet not by their values.
NOT_LINEAR: Final = {
    "aten.linalg_lstsq.default": "its residuals are not, and its shapes depend on the data",
    "aten.masked_select.default": "its shape depends on the data",
}


def test_every_operator_with_a_linear_formula_accepts_partial_operands() -> None:
    refusals = {}
    for name, arguments in linear_overloads().items():
        if name not in recorded() or name in NOT_LINEAR:
            continue
        op = overload_called(name)
        if any(each.alias_info is not None for each in op._schema.returns):
            continue  # views and writes follow their own rules
        for args, kwargs in calls_of(op):
            outcome = typed_partial(op, name_arguments(op, args, kwargs), arguments)
            if isinstance(outcome, Refusal):
                refusals[name] = outcome.reason
    assert refusals == {}


def typed_partial(op: Any, arguments: dict[str, Any], linear: list[str]) -> Any:
    """The type of a call whose linear arguments are P and whose others are R."""
    ids = {
        id(tensor) for name in linear for tensor in typing_of_calls.tensors_of(arguments.get(name))
    }

    def read(tensor: torch.Tensor) -> tuple[AxisType]:
        return (Partial if id(tensor) in ids else AxisType("R"),)

    return type_call(op, arguments, read, 1)[0]


def test_refused_operand_types_are_reported_as_refused() -> None:
    case = next(cases(BY_NAME["exp"], torch.float64, 1))
    report = try_types(case, Typings({0: Partial}))
    assert report.refused is not None
    assert report.refused.startswith("aten.exp.default: the operation is not linear")
    assert "P in 0" in floors(case)


def test_the_coverage_page_is_of_all_operators_and_holds_the_floors() -> None:
    page = DOCUMENT.read_text().split("\n## ")[0]
    others = re.findall(r"^\| `(.+)` \| \w+(?: run)? \|", page, flags=re.MULTILINE)
    groups = re.findall(r"^\| [\w, ]+ \| (`.+`) \|$", page, flags=re.MULTILINE)
    names = [name for group in groups for name in re.findall(r"`([^`]+)`", group)]
    if IS_PINNED:  # the page is written by `make fuzz`, with that one
        assert sorted(names + others) == sorted(name_of(info) for info in op_db)
    share = re.search(r"differentiable operators \d+ \(([\d.]+) %\) are accepted", page)
    assert share is not None
    assert float(share.group(1)) >= 95
    assert "were compared with what the ranks compute; 0 were wrong." in page
