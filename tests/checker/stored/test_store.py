"""A restarted process finds the verdicts of the one before, and no verdict on another program."""

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    Partial,
    ShapeDtype,
    ShardTypeError,
    V,
    all_reduce,
    check_program,
    checkpoint,
    grad,
    make_mesh,
    reinterpret,
    shard_map,
    trace,
)
from shardmap_torch.checker.stored import circumstances
from shardmap_torch.checker.stored.folder import Folder
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.run import checked
from shardmap_torch.run.safety.purity import verify_purely
from tests.checker.support.restarts import as_started, imported
from tests.checker.support.states import STATES, State
from tests.support.pool import Gloo

ABSTRACT = make_mesh((2, 4), ("dp", "tp"), kind="abstract")
SIMULATED = make_mesh((2, 4), ("dp", "tp"), kind="simulated")


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The names of the functions that are checked, with a folder for verdicts."""
    monkeypatch.setenv("SHARDMAP_CACHE", str(tmp_path / "verdicts"))
    names: list[str] = []
    monkeypatch.setattr(checked, "verify_purely", partial(counted, names))
    with as_started():
        yield names


def counted(names: list[str], name: str, *rest: Any) -> Verdict:
    names.append(name)
    return verify_purely(name, *rest)


def arguments(grad: bool = True, size: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    return ShapeDtype((size, 3), dtype), ShapeDtype((3, 8), dtype, requires_grad=grad)


def ask(folder: Path, edits: Mapping[str, tuple[str, str]] = {}, **options: Any) -> str:
    """The program, with its lines, as a process finds it that has just started."""
    mesh = options.pop("mesh", ABSTRACT)
    values = options.pop("arguments", arguments())
    with imported(folder, edits) as model:
        program = trace(model.make(mesh, **options), *values)
        return f"{program}\n{program.fingerprint}"


@pytest.mark.parametrize("mesh", [ABSTRACT, SIMULATED], ids=lambda mesh: str(mesh.kind))
@pytest.mark.parametrize("strictness", ["local", "global", {"tp": "global"}], ids=str)
def test_a_restarted_process_does_not_check_again(
    checks: list[str], tmp_path: Path, strictness: Any, mesh: Mesh
) -> None:
    first = ask(tmp_path, check=strictness, mesh=mesh)
    assert checks == ["body"]
    assert ask(tmp_path, check=strictness, mesh=mesh) == first
    assert checks == ["body"]


EDITS: Mapping[str, tuple[str, str, str]] = {
    "the body": ("stored_model", "h = 2 * h", "h = 3 * h"),
    "a line number": ("stored_model", "import functools\n", "import functools\n\n"),
    "a function two modules away": ("stored_base", "x * SCALE * by", "x * SCALE / by"),
    "a default of it": ("stored_base", "by=1.0", "by=2.0"),
    "a global of that module": ("stored_base", "SCALE = 2.0", "SCALE = 2.5"),
    "the type of a global": ("stored_base", "SCALE = 2.0", "SCALE = 2"),
    "a method": ("stored_layers", "else y.relu()", "else y.sigmoid()"),
    "an attribute of a class": ("stored_layers", "steep = False", "steep = True"),
    "a word in a set": ("stored_layers", '"gamma"', '"delta"'),
    "an attribute of an object": ("stored_model", "Layer(3.0)", "Layer(4.0)"),
    "a number in a dict": ("stored_model", '"doubled": 1', '"doubled": 2'),
    "a number in a tuple": ("stored_model", "(1, 2.5)", "(1, 3.5)"),
    "a closed-over number": ("stored_model", "shift = 0.5", "shift = -0.5"),
    "a closed-over module": ("stored_model", "nn.Identity()", "nn.Tanh()"),
    "the mode of a module": ("stored_model", "nn.Identity()", "nn.Identity().eval()"),
    "the shape of a captured tensor": ("stored_model", "torch.ones(3)", "torch.ones(2)"),
    "its strides": ("stored_model", "torch.ones(3)", "torch.ones(6)[::2]"),
    "its dtype": ("stored_model", "torch.ones(3)", "torch.ones(3, dtype=torch.float64)"),
    "a specification of arguments": ("stored_model", 'P("dp", invariant={"tp"})', 'P("dp")'),
    "a global that hides a builtin": ("stored_model", "WEIGHT =", "range = range\nWEIGHT ="),
}


@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_an_edit_is_checked_and_taken_back_it_is_known(
    checks: list[str], tmp_path: Path, edit: str
) -> None:
    file, old, new = EDITS[edit]
    first = ask(tmp_path)
    ask(tmp_path, {file: (old, new)})
    assert checks == ["body"] * 2
    assert ask(tmp_path) == first
    assert checks == ["body"] * 2


@dataclass(frozen=True)
class Other:
    """Circumstances that differ in one thing."""

    options: Mapping[str, Any]
    around: Callable[[pytest.MonkeyPatch], AbstractContextManager[object]] = lambda _: nullcontext()


def _patched(target: Any, name: str, value: Any) -> Any:
    def patch(monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[object]:
        monkeypatch.setattr(target, name, value)
        return nullcontext()

    return patch


OTHERS = {
    "another size": Other({"arguments": arguments(size=8)}),
    "another dtype": Other({"arguments": arguments(dtype=torch.float64)}),
    "no gradient": Other({"arguments": arguments(grad=False)}),
    "a static argument": Other({"arguments": (*arguments(), 2)}),
    "ranks": Other({"mesh": make_mesh((4, 2), ("dp", "tp"), kind="abstract")}),
    "an axis more": Other({"mesh": make_mesh((2, 4, 1), ("dp", "tp", "pp"), kind="abstract")}),
    "another kind of mesh": Other({"mesh": SIMULATED}),
    "strictness": Other({"check": "global"}),
    "no grad mode": Other({}, lambda _: torch.no_grad()),
    "autocast": Other({}, lambda _: torch.autocast("cpu", torch.bfloat16)),
    "a version": Other({}, _patched(circumstances, "versions", lambda: ("torch 99",))),
    "own source": Other({}, _patched(circumstances, "_own_source", lambda: "edited")),
}


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_other_circumstances_are_another_verdict(
    checks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    ask(tmp_path)
    assert checks == ["body"]
    with OTHERS[other].around(monkeypatch):
        ask(tmp_path, **OTHERS[other].options)
    assert checks == ["body"] * 2


def halves(x: Tensor) -> Tensor:
    return all_reduce(x.sum(0), "tp", dst=I) / 2


def drawn(x: Tensor) -> Tensor:
    return all_reduce((x * torch.rand(3)).sum(0), "tp", dst=I)


def kept_in_memory(x: Tensor) -> Tensor:
    return all_reduce(checkpoint(torch.sin, x).sum(0), "tp", dst=I)


def branching(x: Tensor) -> Tensor:
    total = all_reduce(x.sum(), "tp", dst=I)
    doubled: Tensor = total * 2 if total > 1 else total
    return doubled


def learned(x: Tensor) -> Tensor:
    gradient: Tensor = grad(lambda w: (w * x).square().sum())(torch.ones(3, dtype=x.dtype))
    return all_reduce(gradient, "tp", dst=I)


def nested_results(x: Tensor) -> Any:
    return {"b": [halves(x), (None, 2)], "a": halves(x) + 1}


BODIES = (halves, drawn, kept_in_memory, branching, learned, nested_results)


def outcome(body: Callable[[Tensor], Any], mesh: Mesh) -> list[Any]:
    """The results and the gradient of a function that is mapped again, as after a restart."""
    mapped = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P())
    x = torch.arange(12.0, dtype=torch.float64).reshape(4, 3).requires_grad_()
    torch.manual_seed(0)
    leaves = optree.tree_leaves(mapped(x))
    smooth = [leaf.sum() for leaf in leaves if isinstance(leaf, Tensor)]
    torch.stack(smooth).sum().backward()
    return [*leaves, x.grad]


@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_run_with_a_loaded_verdict_gives_the_same_values_and_gradients(
    checks: list[str], body: Callable[[Tensor], Any], simulate: Any
) -> None:
    if simulate == "vmap" and body in (drawn, kept_in_memory, branching):
        simulate = "auto"
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate=simulate)
    first = outcome(body, mesh)
    second = outcome(body, mesh)
    assert checks == [body.__name__]
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two) if isinstance(one, Tensor) else one == two


def test_a_step_whose_results_have_no_gradient_says_so_after_a_restart(checks: list[str]) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    texts = []
    for _ in range(2):
        step = shard_map(moved, mesh=mesh, in_specs=(P(), P("tp")), out_specs=P())
        w = torch.ones(3, requires_grad=True)
        with pytest.raises(ShardTypeError) as error:
            step(w, torch.ones(4, 3)).sum().backward()
        texts.append(str(error.value))
    assert texts[0] == texts[1]
    assert checks == ["moved"]


def moved(w: Tensor, x: Tensor) -> Tensor:
    gradient: Tensor = grad(lambda w: (x @ w).square().sum())(w)
    return w - 0.1 * all_reduce(gradient, "tp", dst=I)


PATTERN = re.compile("a+b")
STEPS = iter([1] * 9)
UNSTABLE: Mapping[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "the environment": (lambda x: x * len(os.environ["HOME"]), "environ, by which"),
    "a file": (lambda x: x * len(Path(__file__).read_text()), "read_text, by which"),
    "the address of an object": (lambda x: x * (id(x) > 0), "id, by which"),
    "a module with state": (lambda x: x * (sys.maxsize > 0), "sys"),
    "an iterator": (lambda x: x * (STEPS is not None), "list_iterator"),
    "an operator of one's own": (lambda x: torch.ops.aten.mul.Tensor(x, 2), "ops, by which"),
    "all names of an object": (lambda x: x * len(vars(os)), "vars, by which"),
    "a pattern": (lambda x: x * bool(PATTERN.match("ab")), "a Pattern"),
}


@pytest.mark.parametrize("what", UNSTABLE)
def test_what_has_no_content_is_checked_in_each_process_and_says_why(
    checks: list[str], what: str
) -> None:
    body, why = UNSTABLE[what]
    for _ in range(2):
        mapped = shard_map(body, mesh=ABSTRACT, in_specs=P("tp"), out_specs=P("tp"))
        with pytest.warns(UserWarning, match=f"SHARDMAP_CACHE: .* is not kept, .*{why}"):
            trace(mapped, ShapeDtype((4, 3)))
    assert len(checks) == 2


def _cut(text: str) -> str:
    return text[: len(text) // 2]


DAMAGES: Mapping[str, Callable[[str], str]] = {
    "half of it": _cut,
    "nothing": lambda text: "",
    "one byte": lambda text: text.replace("float64", "float32", 1),
    "another type": lambda text: text.replace('{"type":"I"}', '{"type":"R"}', 1),
    "something else": lambda text: "not a verdict\n{}\n{}",
    "no text": lambda text: "\x00\u00ff",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_with_a_warning_and_written_anew(
    checks: list[str], tmp_path: Path, damage: str
) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    first = outcome(halves, mesh)
    [file] = (tmp_path / "verdicts").iterdir()
    right = file.read_text()
    file.write_text(DAMAGES[damage](right))
    with pytest.warns(UserWarning, match=f"SHARDMAP_CACHE: .*{file.name} is ignored: "):
        second = outcome(halves, mesh)
    assert checks == ["halves"] * 2
    assert file.read_text() == right
    assert all(map(torch.equal, first, second))


def test_a_file_of_another_form_is_ignored_even_with_the_right_hash(
    checks: list[str], tmp_path: Path
) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    outcome(halves, mesh)
    [file] = (tmp_path / "verdicts").iterdir()
    folder = Folder(file.parent)
    head, program = folder.read(file.stem) or []
    content = json.loads(head)
    content["start"][0][0] = {"pickle": "gASVAAAA"}
    folder.write(file.stem, [json.dumps(content), program])
    with pytest.warns(UserWarning, match="is ignored: EncodingError: 'pickle'"):
        outcome(halves, mesh)
    assert checks == ["halves"] * 2


def test_a_folder_that_cannot_be_written_is_a_warning(
    checks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDMAP_CACHE", str(tmp_path / "file" / "verdicts"))
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    with pytest.warns(UserWarning, match="SHARDMAP_CACHE: .*verdicts.*"):
        outcome(halves, mesh)
    assert checks == ["halves"]


def test_a_run_that_departs_from_a_loaded_verdict_is_checked_and_the_file_dropped(
    checks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    x = torch.ones(4)

    def run() -> Tensor:
        mapped = shard_map(hidden_way, mesh=mesh, in_specs=P("tp"), out_specs=P())
        found: Tensor = mapped(x)
        return found

    monkeypatch.setattr(torch.nn.functional.softmax, "way", ["sum"], raising=False)
    assert run() == 4
    monkeypatch.setattr(torch.nn.functional.softmax, "way", ["max"], raising=False)
    assert run() == 2
    assert checks == ["hidden_way"] * 2
    assert not list((tmp_path / "verdicts").iterdir())


def hidden_way(x: Tensor) -> Tensor:
    way: Any = torch.nn.functional.softmax.way[0]  # type: ignore[attr-defined]
    return all_reduce(x.sum(), "tp", dst=I, op=way)


@pytest.mark.filterwarnings("ignore:SHARDMAP_CACHE")
def test_a_stored_verdict_does_not_outlive_a_change_of_state(checks: list[str]) -> None:
    """A process stores verdicts on scripts; another finds each as it was, a third changed."""
    found = dict.fromkeys(STATES, 0)
    for is_changed in (False, False, True):
        for kind, state in STATES.items():
            undo: list[Callable[[], object]] = []
            try:
                found[kind] += _is_accepted(state, is_changed, undo)
            finally:
                for each in undo:
                    each()
    assert [kind for kind, times in found.items() if times != 2] == []
    again = len(checks) - 2 * len(STATES)  # by the second process, of what is not stored
    assert again == _NOT_STORED


_NOT_STORED: int = 48
"""Number of states that have no content that is the same in every process."""


def _is_accepted(state: State, is_changed: bool, undo: list[Callable[[], object]]) -> bool:
    read, change = state.script(undo)

    def body(x: Tensor) -> Tensor:
        addend = reinterpret(x, "tp", src=V, dst=Partial)
        return all_reduce(addend if read() else addend.relu(), "tp", dst=I)

    if is_changed:
        change()
    mapped = shard_map(body, mesh=ABSTRACT, in_specs=P("tp"), out_specs=P())
    try:
        check_program(mapped, ShapeDtype((4, 3)))
    except ShardTypeError:
        return False
    return True


def test_one_of_several_checks_and_the_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    is_waiting = threading.Event()
    lock = fcntl.flock

    def watched(file: int, how: int) -> None:
        if how == fcntl.LOCK_SH:
            is_waiting.set()
        lock(file, how)

    def wait() -> None:
        with Folder(tmp_path).first("key") as is_first:
            order.append(f"second, first={is_first}")

    monkeypatch.setattr(fcntl, "flock", watched)
    other = threading.Thread(target=wait)
    with Folder(tmp_path).first("key") as is_first:
        other.start()
        assert is_waiting.wait(60)
        order.append(f"first, first={is_first}")
    other.join()
    assert order == ["first, first=True", "second, first=False"]


PROCESS = """
import sys
from pathlib import Path
from shardmap_torch import ShapeDtype, make_mesh, trace
from shardmap_torch.run import checked
from tests.checker.support.restarts import imported

def refuse(*arguments):
    raise AssertionError("it is checked again")

if sys.argv[2] == "load":
    checked.verify_purely = refuse
mesh = make_mesh((2, 4), ("dp", "tp"), kind="abstract")
with imported(Path(sys.argv[1])) as model:
    print(trace(model.make(mesh), ShapeDtype((4, 3)), ShapeDtype((3, 8), requires_grad=True)))
"""


@pytest.mark.fuzz  # starts processes
def test_processes_with_other_hash_seeds_find_the_same_verdict(tmp_path: Path) -> None:
    found = []
    for seed, how in (("1", "check"), ("2", "load")):
        variables = {"SHARDMAP_CACHE": str(tmp_path / "verdicts"), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-W", "error", "-c", PROCESS, str(tmp_path), how]
        run = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        found.append(run.stdout)
    assert found[0] == found[1]
    assert "all_reduce" in found[0]


def on_a_rank(folder: str, has_cache: tuple[bool, bool]) -> tuple[Tensor, list[str]]:
    """The result of a call, and what this rank has checked for it."""
    names: list[str] = []
    rank = torch.distributed.get_rank()
    with (
        mock.patch.dict(os.environ, {"SHARDMAP_CACHE": folder if has_cache[rank] else ""}),
        mock.patch.object(checked, "verify_purely", partial(counted, names)),
        as_started(),
    ):
        mesh = make_mesh((2,), ("tp",))
        mapped = shard_map(halves, mesh=mesh, in_specs=P("tp"), out_specs=P())
        return mapped(torch.ones(4, 3)), names


def test_one_rank_checks_for_all_and_one_that_loads_agrees_with_one_that_checks(
    gloo: Gloo, tmp_path: Path
) -> None:
    both = gloo(2).run(on_a_rank, str(tmp_path), (True, True))
    assert sorted(names for _, names in both) == [[], ["halves"]]
    mixed = gloo(2).run(on_a_rank, str(tmp_path), (False, True))
    assert [names for _, names in mixed] == [["halves"], []]
    for value, _ in (*both, *mixed):
        assert torch.equal(value, torch.full((3,), 2.0))
