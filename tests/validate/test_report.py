"""Reports on many runs."""

import pytest

from shardmap_torch import ShardTypeError
from shardmap_torch.validate.numbers import Fault, Findings


def test_the_worst_of_all_runs_is_reported_and_every_wrong_claim_once() -> None:
    findings = Findings("f")
    for worst in (1.0, 3.0, 2.0):
        findings.note("x is P", Fault("wrong", worst, 4.0))
    findings.note("x is P", None)
    findings.note("y is R", Fault("the ranks differ", 1.0, 1.0))
    with pytest.raises(ShardTypeError) as caught:
        findings.report()
    assert str(caught.value) == (
        "validate_rule: f: 2 claims do not hold:\n"
        "  x is P: wrong; the worst difference is 3, where values reach 4\n"
        "  y is R: the ranks differ; the worst difference is 1, where values reach 1"
    )


def test_claims_that_held_are_reported_in_order() -> None:
    findings = Findings("f", tried=2, refused={"(x: Partial)": None})
    for claim in ("b", "a", "b"):
        findings.note(claim, None)
    assert findings.report().shown == ("b", "a")
    assert str(findings.report()) == (
        "f: 2 claims hold in 2 runs\n  b\n  a\n  refused: (x: Partial)"
    )
