"""The whole texts of rejections."""

from tests.checker.support.rejected import GOLDEN, messages


def test_every_rejection_reads_as_it_did() -> None:
    assert messages() == GOLDEN.read_text(), (
        "read `python -m tests.checker.support.rejected`, then commit"
    )
