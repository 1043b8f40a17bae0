"""The whole texts of rejections, and what they leave behind."""

import gc

import pytest

from shardmap_torch.checker.interpreter.interpreter import Interpreter
from tests.checker.support.rejected import GOLDEN, messages


def _interpretations() -> int:
    gc.collect()
    return sum(type(each) is Interpreter for each in gc.get_objects())


@pytest.mark.usefixtures("repairs")
def test_every_rejection_reads_as_it_did_and_frees_its_interpretation() -> None:
    before = _interpretations()
    assert messages() == GOLDEN.read_text(), (
        "read `python -m tests.checker.support.rejected`, then commit"
    )
    assert _interpretations() <= before  # of tests before, some may have gone
