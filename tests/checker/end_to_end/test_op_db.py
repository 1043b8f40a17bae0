"""op_db through `shard_map`, checker and ranks: a fixed fortieth, and what has changed since.

`make fuzz` takes all of it, and records the rows that it has seen in `rows.json`.
"""

import random
from typing import Any, Final

import pytest
from torch.testing._internal.common_methods_invocations import op_db

from shardmap_torch.checker.rules.rule import Row
from tests.checker.support.calls import every_row
from tests.checker.support.fuzz import cases
from tests.checker.support.fuzz_all import dtypes_of, name_of, runs_here
from tests.checker.support.recorded_rows import (
    changed_operators,
    changed_rows,
    digest,
    recorded_rows,
)
from tests.checker.support.whole import FLOORS, is_excused, trials_of, tried
from tests.support.fuzzing import FUZZ, sized

pytestmark = pytest.mark.usefixtures("quiet")
RUNNABLE: Final = [info for info in op_db if runs_here(info)]
# By identity: `==` of two of these compares some sixty fields.
SAMPLE: Final = {id(info) for info in random.Random(2).sample(RUNNABLE, len(RUNNABLE) // 40)}
CHANGED: Final = changed_operators()
CHOSEN: Final = [
    info for info in RUNNABLE if FUZZ or id(info) in SAMPLE or name_of(info) in CHANGED
]


@pytest.mark.slow
@pytest.mark.parametrize("info", CHOSEN, ids=name_of)
def test_an_operator_that_is_accepted_computes_on_ranks_what_its_types_promise(info: Any) -> None:
    for case in cases(info, dtypes_of(info, False)[0], sized(1, 3)):
        for name, trial in trials_of(case).items():
            finding = tried(trial)
            assert finding.wrong == [], name
            if name in FLOORS and finding.refused is not None:
                assert is_excused(name, case, finding.refused), (name, finding.refused)


def test_a_row_that_changes_has_its_operators_tried_again() -> None:
    relu = "aten.threshold_backward.default"
    assert relu in recorded_rows()["rows"]
    assert digest(Row(zero=True)) != digest(Row(linear=(("self",),)))
    assert "relu" not in {name.removeprefix("nn.functional.") for name in changed_operators()}
    rows = {str(op): digest(row) for op, row in every_row().items()}
    assert changed_rows({**rows, relu: "another"}) - changed_rows(rows) == {relu}
    assert "nn.functional.relu" in changed_operators({**rows, relu: "another"})
