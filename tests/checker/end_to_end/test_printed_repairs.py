"""Repairs that errors print as tried are read, written into the source, and right there."""

import warnings
from collections import Counter
from typing import Final

import pytest

from shardmap_torch import OneDeviceWarning
from tests.checker.support import printed
from tests.checker.support.edits import UnclearError, edited
from tests.checker.support.printed import RIGHT
from tests.support.fuzzing import sized

pytestmark = pytest.mark.usefixtures("repairs", "quiet")

MUTANTS: Final = printed.every_mutant()
COUNT: Final = sized(4, len(MUTANTS))


def test_no_repair_that_is_printed_as_tried_is_wrong_and_most_errors_have_one() -> None:
    found = [*printed.fates(MUTANTS[:COUNT])]
    assert [each for each in found if each.fate in (printed.WRONG, printed.REFUSED)] == []
    right = sum(each.fate == RIGHT for each in found)
    assert right >= 0.6 * len(found) > 0
    assert len(found) >= sized(3, 300)


def test_a_wrong_repair_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, right = next(
        pair for pair in MUTANTS if (pair[0].name, pair[0].mistake) == ("clip", "wrong op")
    )
    other = right.text.replace("/ 2", "/ 3")
    for text, fate in ((right.text, RIGHT), (other, printed.WRONG), (wrong.text, printed.REFUSED)):
        monkeypatch.setattr(printed, "edited", lambda source, change, text=text: text)
        found = printed.fate_of(wrong, right)
        assert found is not None
        assert found.fate == fate


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("convert(b, 'tp', src=R, dst=Partial) in place of b in add at f.py:2", "x @ w + convert"),
        ("leave out all_reduce at f.py:2", "return x @ w + b"),
        ("dst=R in all_reduce at f.py:2", "dst=R)"),
        ("'dp' in place of 'tp' in all_reduce at f.py:2", "x @ w + b, 'dp', dst=I"),
        ("P('dp') for b in in_specs", "in_specs = (P(), P(), P('dp'))"),
        ("P('dp') for out in out_specs", "out_specs = P('dp')"),
        ("return all_gather(out, 'tp', dim=0, dst=I)", "all_gather(all_reduce("),
        ("op='mean' in all_reduce at f.py:2", "op='mean'"),
        ("all_reduce out over 'dp' with dst=I before the return", "'tp', dst=I), 'dp', dst=I)"),
    ],
)
def test_a_printed_text_is_written_where_it_says(text: str, after: str) -> None:
    source = "def f(x, w, b):\n    return all_reduce(x @ w + b, 'tp', dst=I)\n"
    specs = "in_specs = (P(), P(), P())\nout_specs = P()\n"
    assert after in edited(source + specs, text)


def test_a_text_that_names_no_place_is_unclear() -> None:
    source = "def f(x):\n    return g(h(x), h(x))\n"
    for text in ("do something", "leave out h at f.py:2", "y in place of z in add at f.py:2"):
        with pytest.raises(UnclearError):
            edited(source, text)


def test_the_default_tells_of_wrong_programs_that_it_accepts_and_of_no_right_one() -> None:
    fates = [(pair[0].name, printed.by_default(*pair)) for pair in MUTANTS[:COUNT]]
    # Its result is a token, which other numbers may choose too.
    assert {name for name, fate in fates if fate == "told of and right"} <= {"decode_top_p"}
    found = Counter(fate for _, fate in fates)
    assert found["silent and wrong"] == 0


def test_the_default_tells_of_no_right_program() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", OneDeviceWarning)
        for right in printed.sources()[:: sized(5, 1)]:
            right.outcome(None)
