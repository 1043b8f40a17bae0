"""`make test` runs the cases that a mark asks for, and others by a hash of their names."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fuzzing import left_out


class Case:
    """Answers what `left_out` asks of a test."""

    path = Path("t.py")

    def __init__(self, name: str, **marks: Any) -> None:
        self.name = f"test_a[{name}]"
        self._marks = {mark: SimpleNamespace(args=args) for mark, args in marks.items()}

    def get_closest_marker(self, name: str) -> Any:
        return self._marks.get(name)


def kept(*names: Any) -> set[str]:
    cases: dict[str, Any] = {name: Case(name, sample=names) for name in "abcdef"}
    return {name for name, case in cases.items() if case not in left_out(cases.values())}


@pytest.mark.parametrize("number", [1, 3, 6, 7])
def test_a_sample_has_its_number_of_cases_and_those_named_first(number: int) -> None:
    assert len(kept(number)) == min(number, 6)
    assert "e" in kept(number, "e")
    assert kept(number) <= kept(number + 1)


def test_a_name_of_no_case_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match=r"t.py: sample names no case of test_a: \['g'\]"):
        kept(2, "g", "e")


def test_cases_of_make_fuzz_and_tests_without_the_mark_are_not_counted() -> None:
    cases: list[Any] = [Case("a"), Case("b", sample=(1,), fuzz=()), Case("c", sample=(1,))]
    assert left_out(cases) == set()
