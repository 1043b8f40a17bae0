"""Runs a README: what a reader copies must do what the page shows.

Within a section (a heading and what follows it), in order, in one folder and one namespace:

- A `python` block is executed. If its first line is `# name.py`, it is saved under that name too,
  and messages name its lines by it. Lines of other blocks move with the page: none may be shown.
- A `text` block is the whole output of the `python` block before it; without one, that prints none.
- A `console` block is `$ torchrun ...` or `$ python ...` and the whole output of that command.
  `python` runs in a process that has imported torch, but pytest, which rewrites what it imports;
  `torchrun` on the ranks of a pool, where there is one.
- A `{code-cell}` of a notebook is executed; all cells of a page are one section. Other directives
  of the site, as `{toctree}`, are no blocks.
- `<!-- not run: reason -->` on the line before a block leaves it out. No other block is left out.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.pool import Gloo, run_alone

FENCE = re.compile(r"^```(\w*|\{[\w-]+\}[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CELL = "{code-cell}"
HEADING = re.compile(r"^#+ (.+)$")
PROGRAMS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is that of its first line of text, counted from 1."""

    line: int
    language: str
    text: str


def sections(page: str) -> dict[str, list[Block]]:
    """The blocks to run under each heading that has some."""
    found: dict[str, list[Block]] = {}
    heading, position = "", 0
    for fence in FENCE.finditer(page):
        prose = page[position : fence.start()].splitlines()
        position = fence.end()
        heading = next(
            (title[1] for line in prose[::-1] if (title := HEADING.match(line))), heading
        )
        is_cell = fence[1].startswith(CELL)
        is_other_directive = fence[1].startswith("{") and not is_cell
        if not is_other_directive and not (prose and prose[-1].startswith("<!-- not run: ")):
            line = page.count("\n", 0, fence.start(2)) + 1
            block = Block(line, CELL if is_cell else fence[1], fence[2])
            found.setdefault("the notebook" if is_cell else heading, []).append(block)
    return found


def run(blocks: list[Block], folder: Path, filename: str, gloo: Gloo | None = None) -> None:
    """Runs the blocks of one section in `folder`; `filename` names the page in tracebacks."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = [block.text if block.language == "text" else "" for block in blocks[1:]] + [""]
    previous = ""
    for block, output in zip(blocks, shown, strict=True):
        where = f"line {block.line}"
        match block.language:
            case "python":
                assert _execute(block, namespace, folder, filename) == output, where
            case "console":
                command, _, output = block.text.partition("\n")
                assert _command(command, folder, gloo) == output, where
            case "{code-cell}":
                _execute(block, namespace, folder, filename)
            case "text":
                assert previous == "python", f"{where}: not the output of a python block"
            case language:
                raise AssertionError(f"{where}: no way to run {language!r}")
        previous = block.language


def _execute(block: Block, namespace: dict[str, Any], folder: Path, filename: str) -> str:
    if saved := re.match(r"# (\w+\.py)\n", block.text):
        path, first = folder / saved[1], 1
        path.write_text(block.text)
    else:
        path, first = Path(filename), block.line  # so that errors have the page's lines
    code = compile("\n" * (first - 1) + block.text, str(path), "exec")
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, namespace)
    assert block.language == CELL or not re.search(r"\.md:\d", printed.getvalue()), (
        f"line {block.line}: it shows a line of the page; begin the block with `# name.py`"
    )
    return printed.getvalue()


def _command(command: str, folder: Path, gloo: Gloo | None) -> str:
    program, *arguments = shlex.split(command.removeprefix("$ "))
    if program == "python" and "pytest" not in arguments:
        return run_alone(partial(_python, folder, arguments))
    if gloo is not None:
        flag, num_ranks, script = arguments
        assert flag == "--nproc-per-node"
        return "".join(gloo(int(num_ranks)).run(_printed_by, folder / script))
    done = subprocess.run(
        [*PROGRAMS[program], *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _python(folder: Path, arguments: list[str]) -> str:
    """Does what `python *arguments` does, and returns what it prints."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    run_it = runpy.run_module if is_module else runpy.run_path
    code: object = 0
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            run_it(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    assert not code, printed.getvalue()
    return printed.getvalue()


def _printed_by(script: Path) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()
