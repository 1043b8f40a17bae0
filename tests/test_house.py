"""The house stays small: lines by package, density, import circles, files that a call enters."""

import ast
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import grimp
import pytest
import torch

from shardmap_torch import I, P, R, all_reduce, convert, make_mesh, shard_map

REPO: Final = Path(__file__).parent.parent
PAGE: Final = (REPO / "docs" / "architecture.md").read_text()
ROW: Final = re.compile(r"^\| (.+?) \| ([\d,]+) \| .+ \|$", re.MULTILINE)
TOTALS: Final = re.compile(r"may have ([\d,]+) lines in all and the tests ([\d,]+)")
FOLDERS: Final = ("shardmap_torch", "ops", "kernels")
MAX_FILES, GOAL = 311, 55_000


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((REPO / folder).rglob("*.py"))]


def num_lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


PRODUCT: Final = sources(*FOLDERS)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def goals() -> dict[str, tuple[list[Path], int]]:
    """Reads the table of goals: the files of each row, and the lines that they should have."""
    section = PAGE.partition("## Budgets")[2].partition("\n## ")[0]
    found = {}
    for names, lines in ROW.findall(section):
        roots = [REPO / name for name in re.findall(r"`([\w/.]+)`", names)]
        files = [f for root in roots for f in ([root] if root.is_file() else root.rglob("*.py"))]
        assert files, f"no files: {names}"
        found[names] = files, number(lines)
    return found


def test_product_and_tests_stay_within_their_totals() -> None:
    """One bound for all packages, so that a line may move to where it belongs."""
    totals = TOTALS.search(PAGE)
    assert totals is not None
    product, tests = map(number, totals.groups())
    assert num_lines(PRODUCT) <= product
    assert num_lines(sources("tests")) <= tests


def test_every_file_has_one_goal_and_they_add_up() -> None:
    counted = [path for files, _ in goals().values() for path in files]
    assert sorted(counted) == sorted(PRODUCT)
    assert sum(lines for _, lines in goals().values()) <= GOAL


def test_files_do_not_grow() -> None:
    """The goal is 240 files."""
    assert len(PRODUCT) <= MAX_FILES


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def body_lines(function: ast.FunctionDef) -> int:
    """Lines of a function's body without its docstring."""
    body = function.body
    is_documented = ast.get_docstring(function) is not None
    rest = body[1:] if is_documented else body
    return (function.end_lineno or 0) - rest[0].lineno + 1 if rest else 0


def test_functions_are_short_and_lines_are_not_dense() -> None:
    """So that the budgets are met by fewer ideas, and not by denser code."""
    lengths = [body_lines(each) for path in PRODUCT for each in functions(path)]
    assert statistics.median(lengths) <= 7
    lines = [line.strip() for path in PRODUCT for line in path.read_text().splitlines()]
    assert statistics.mean(len(line) for line in lines if line and line[0] not in "#\"'") <= 50


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Returns the groups of modules that import one another (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in imports[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[-len(group) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in imports:
        if module not in index:
            visit(module)
    return found


def test_a_circle_is_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_no_module_imports_itself_through_others() -> None:
    graph = grimp.build_graph("shardmap_torch", exclude_type_checking_imports=True)
    modules = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert circles(modules) == []


def entered_by(call: Callable[[], Any]) -> set[str]:
    """Returns the files of the product that a call enters."""
    entered: set[str] = set()
    folders = tuple(f"{REPO / folder}/" for folder in FOLDERS)

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    real = {str(Path(name).resolve()) for name in entered if name.startswith(folders)}
    return {name.removeprefix(f"{REPO}/") for name in real}


def mlp(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    h = torch.relu(convert(x, "tp", src=I, dst=R) @ w1)
    return all_reduce(h @ w2, "tp", dst=I)


@pytest.mark.parametrize(("check", "first", "later"), [(True, 85, 35), ("global", 133, 35)])
def test_a_call_enters_few_files(check: Any, first: int, later: int) -> None:
    """The goals are 65 and 25."""
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    specs = P(), P(None, "tp"), P("tp")
    f = shard_map(mlp, mesh=mesh, in_specs=specs, out_specs=P(), check=check)
    arguments = torch.ones(2, 4), torch.ones(4, 8), torch.ones(8, 4)
    leaves = [x.requires_grad_() for x in arguments]
    assert len(entered_by(lambda: f(*leaves))) <= first
    assert len(entered_by(lambda: f(*leaves))) <= later
