"""The whole texts of rejections, and what they leave behind."""

import gc

import pytest

from shardmap_torch import P, ShardMapError, check_program, shard_map
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from tests.checker.support.rejected import CASES, MESH, W, X
from tests.support.golden import hold


def _interpretations() -> int:
    gc.collect()
    return sum(type(each) is Interpreter for each in gc.get_objects())


@pytest.mark.usefixtures("repairs")
def test_every_rejection_reads_as_it_did_and_frees_its_interpretation() -> None:
    before = _interpretations()
    for body, w_spec, out_specs in CASES:
        mapped = shard_map(body, mesh=MESH, in_specs=(P("dp"), w_spec), out_specs=out_specs)
        with pytest.raises(ShardMapError) as caught:
            check_program(mapped, X, W.detach().clone().requires_grad_())
        text = f"[{type(caught.value).__name__}] {caught.value}"
        hold("rejections.txt", body.__name__, text)
        del caught
    assert _interpretations() <= before  # of tests before, some may have gone
