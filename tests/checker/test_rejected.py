"""The whole texts of rejections."""

from tests.checker.rejected import GOLDEN, messages


def test_every_rejection_reads_as_it_did() -> None:
    assert messages() == GOLDEN.read_text(), "read `python -m tests.checker.rejected`, then commit"
