"""Messages about the first difference between the programs of ranks."""

import pytest

from shardmap_torch.control.board import Report, Step
from shardmap_torch.control.messages import difference, fix_of_torchs
from shardmap_torch.control.parting import fix_of

ROWS = " A batch has as many rows on every process: drop the last one of a loader "
ROWS += "(drop_last=True), or pad it."


def told(*texts: str) -> str:
    reports = {at: Report(1, "train.py:9", text) for at, text in enumerate(texts)}
    return difference("step", reports)


def test_batches_of_other_sizes_are_told_of_a_loader_and_drop_last() -> None:
    assert told("x: float32[8, 8], P('dp')", "x: float32[6, 8], P('dp')") == (
        "step: processes run different programs. The first difference:\n"
        "  rank 0: x: float32[8, 8], P('dp')\n"
        "  rank 1: x: float32[6, 8], P('dp')\n"
        "where: ranks 0, 1 at train.py:9\n"
        "Fix: run the same code with the same Python values and modes (train() and eval() too) on "
        "every process, and pass the same DTensors: a clone, or a new one of equal values, is "
        "another. What depends on the rank "
        f"inside of a body is the tensor axis_index(axis).{ROWS}"
    )


@pytest.mark.parametrize(
    "other",
    [
        "x: float32[8, 8], P(None, 'dp')",
        "y: float32[6, 8], P('dp')",
        "%1: float32[6, 8] {dp: V} = mul(x (P('dp')); other=2.0)",
        "x: float32[6, 8], P()",
    ],
)
def test_other_differences_are_not_said_to_be_of_batches(other: str) -> None:
    first = other.replace("[6, 8]", "[8, 8]") if other.startswith("%") else ""
    assert ROWS not in told(first or "x: float32[8, 8], P('dp')", other)


def test_values_and_dtypes_that_differ_have_a_fix_of_their_own() -> None:
    own = told("tree: int64[4], hash 1f, P('dp')", "tree: int64[4], hash 2e, P('dp')")
    assert own.endswith(
        "Fix: pass the same global values on every process, drawn from one seed or read alike; "
        "rows that each process has of its own become global by from_local(rows, mesh, spec)."
    )
    wide = told("x: float32[4, 8], P('dp')", "x: float64[4, 8], P('dp')")
    assert wide.endswith("\nFix: pass tensors of one dtype on every process.")
    assert "of one dtype" not in told("x: float32[4, 8], P('dp')", "x: float64[4, 6], P('dp')")


def test_a_collective_of_torch_on_a_gradient_is_told_that_it_is_summed() -> None:
    error = NotImplementedError(
        "Operator c10d.allreduce_.default does not have a sharding strategy registered."
    )
    assert fix_of_torchs(error) == (
        "Fix: a DTensor is moved by full(x), x.full_tensor() and x.redistribute(). After "
        "backward() the gradients of a parallelized module are those of the whole batch: leave "
        "out what adds them up, or divides them, once more."
    )
    assert fix_of_torchs(RuntimeError("timeout")).startswith("Fix: all ranks must come to a coll")


def test_the_lines_of_ranks_come_before_how_their_programs_differ() -> None:
    first = Step(1, "step", "train.py:1: step(x)")
    evaluates = Step(2, "step", "train.py:3: print(step(x))")
    trails = [(first, evaluates), (first, first._replace(check=2))]
    texts = "step\n  x: P('dp')", "step\nbackward:"
    reports = {
        at: Report(2, trail[-1].site, text, (), trail)
        for at, (text, trail) in enumerate(zip(texts, trails, strict=True))
    }
    assert difference("step", reports).splitlines()[:-1] == [
        "step: processes run different programs. They have come to it at different lines:",
        "  rank 0: step at train.py:3: print(step(x))",
        "  rank 1: step at train.py:1: step(x)",
        "The first difference:",
        "  rank 0: x: P('dp')",
        "  rank 1: backward:",
    ]


def test_lines_of_ranks_that_differ_come_in_place_of_values_that_differ() -> None:
    train, evaluate = "train.py:8: model(*place(batch))", "train.py:9: model(*place(held_out))"
    steps = [Step(1, "device_put", "train.py:2: place", (train,))]
    steps += [Step(2, "device_put", "train.py:2: place", (line,)) for line in (evaluate, train)]
    reports = {
        at: Report(2, trail[-1].site, f"device_put\n  x: f[2], hash {at}a, P('dp')", (), trail)
        for at, trail in enumerate([steps[:2], steps[::2]])
    }
    text = difference("device_put", reports)
    assert "hash" not in text
    assert f"rank 0: device_put at train.py:2: place, called at {evaluate}" in text
    assert "with nothing of it under `if mesh.rank == 0:`" in text.splitlines()[-1]


def test_a_rank_that_waits_in_a_function_of_all_is_told_who_calls_it() -> None:
    calls = [("train.py:4: run(x)",), ("train.py:5: run(held_out)",)]
    steps = [Step(at, "loss", "train.py:2: loss(x)", each) for at, each in enumerate(calls)]
    assert fix_of(steps).startswith("  called at train.py:5: run(held_out)\nFix: all ranks must")
    assert fix_of(steps[1:]).startswith("Fix: all ranks must come to it")
    assert "as many turns of a loop" in fix_of([*steps, steps[0]])
