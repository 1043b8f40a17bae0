"""The whole texts of rejections."""

import pytest

from tests.checker.support.rejected import GOLDEN, messages


@pytest.mark.usefixtures("insertions")
def test_every_rejection_reads_as_it_did() -> None:
    assert messages() == GOLDEN.read_text(), (
        "read `python -m tests.checker.support.rejected`, then commit"
    )
