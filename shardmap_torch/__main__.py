"""The command line: `python -m shardmap_torch check|explain|trace|estimate FILE:FUNCTION`."""

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import reduce
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from shardmap_torch import __version__, postmortem
from shardmap_torch.checker.api import Program, ShapeDtype, explain, program_of, verdict_on
from shardmap_torch.checker.explanation import Explanation
from shardmap_torch.core.source_location import error_site
from shardmap_torch.errors import MeshError, ShardMapError, TransformError, show
from shardmap_torch.mesh import Mesh, make_mesh, use_mesh
from shardmap_torch.planning import (
    A100,
    B200,
    H100,
    H200,
    Hardware,
    best_mesh,
    estimate,
    read_hardware,
    this_machine,
)
from shardmap_torch.report.page import Shown

ACCEPTED, REFUSED, UNUSABLE = 0, 1, 2
"""Exit codes; argparse has the last one too."""

_COMMANDS: Final = {
    "check": "check a function, and print the specs of its arguments with every axis typed",
    "explain": "print its collectives with line, bytes and backward, and the global verdict",
    "trace": "print every operation, forward and backward, with the types of what it makes",
    "estimate": "print memory, time and messages of a call on given hardware, without running it",
}
_SHAPE: Final = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<sizes>[\d,\s]*)\]")
_NAME: Final = re.compile(r"(?P<name>\w+)(?P<keys>(\.\w+|\[[^\]]+\])*)=(?P<value>.+)", re.DOTALL)
_KEY: Final = re.compile(r"\.(\w+)|\[([^\]]+)\]")


class UsageError(Exception):
    """The command cannot be run as it was called; says what is wrong."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0 if the program is accepted, 1 if it is not, 2 for bad input."""
    asked = list(sys.argv[1:] if arguments is None else arguments)
    if asked[:1] == ["postmortem"]:
        postmortem.main(asked[1:])
        return ACCEPTED
    parser = _parser()
    options = parser.parse_args(asked)
    try:
        return _run(options)
    except UsageError as error:
        parser.exit(UNUSABLE, f"python -m shardmap_torch {options.command}: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardmap_torch",
        description="Checks a shard_mapped function for a mesh of up to a million ranks, no data.",
        epilog="The exit code is 0 if it is accepted, 1 if not, 2 if the command cannot be run.",
    )
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    shown = f"shardmap_torch {__version__} (torch {torch.__version__}, Python {python})"
    parser.add_argument("--version", action="version", version=shown)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what in _COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what)
        add = command.add_argument
        add("function", metavar="FILE:FUNCTION", help="as in train.py:step, or module:step")
        add("--mesh", metavar="dp=1024,tp=8", help="axes and sizes; by default the function's own")
        add("--shapes", nargs="+", default=[], metavar="ARGUMENT=float32[64,1024]", help=_SHAPES)
        add("--grad", nargs="+", default=[], metavar="ARGUMENT", help="those that get gradients")
        add("--arguments", metavar="FUNCTION", help="one of FILE that returns a tuple of them")
        add("--strictness", choices=["local", "global"], help="by default the function's own")
        add("--json", action="store_true", help="print JSON")
        add("--html", metavar="PATH", type=Path, help="write a page, also of a refusal")
        if name == "estimate":
            add("--hardware", required=True, metavar="H100|FILE.toml", help=_HARDWARE)
    _add_best_mesh(commands)
    commands.add_parser("postmortem", help="compare the flight recorders of all ranks")
    return parser


def _add_best_mesh(commands: Any) -> None:
    what = "rank the meshes of a number of ranks by the time of a step that fits"
    add = commands.add_parser("best-mesh", help=what, description=what).add_argument
    add("function", metavar="FILE:BUILD", help="takes a mesh, returns a step and its arguments")
    add("--ranks", required=True, type=int, help="the number of ranks")
    add("--axes", required=True, metavar="dp,tp", help="names of the axes of the mesh")
    add("--hardware", required=True, metavar="H100|FILE.toml", help=_HARDWARE)
    add("--processes", type=int, default=1, help="how many estimate at a time")
    add("--layers", type=int, help="the number of equal layers, which BUILD takes as layers=")
    add("--choice", action="append", default=[], metavar="NAME=A,B", help=_CHOICE)
    add("--json", action="store_true", help="print JSON")


_HARDWARE: Final = (
    "A100, B200, H100, H200, this_machine, or a TOML file with the fields of Hardware"
)

_CHOICE: Final = "values that BUILD takes as NAME=, each tried on every mesh; may be repeated"

_SHAPES: Final = (
    "dtype and global shape of each argument, params.w=float32[8,8] or xs[0]=int64[4] inside of "
    "one, n=3 for other values"
)


def _run(options: argparse.Namespace) -> int:
    module, function = _load(options.function)
    if options.command == "best-mesh":
        return _rank(options, function)
    mesh = None if options.mesh is None else _read_mesh(options.mesh)
    kwargs = _read_shapes(options.shapes, options.grad)
    args = () if options.arguments is None else _attribute(module, options.arguments)()
    with nullcontext() if mesh is None else use_mesh(mesh):
        try:
            if options.command == "estimate":
                return _estimate(options, function, args, kwargs)
            program = program_of(verdict_on(function, args, kwargs, options.strictness))
            asked = options.command == "explain"
            found: Program | Explanation = explain(function, *args, **kwargs) if asked else program
        except (MeshError, TransformError) as error:
            is_asked = mesh is None and isinstance(error, MeshError)
            hint = " Here: --mesh dp=2,tp=4, with the axes that its specs name." * is_asked
            raise UsageError(f"{error}{hint}") from None
        except ShardMapError as error:
            _write(options, {"accepted": False, "error": str(error)}, str(error), error)
            return REFUSED
    if mesh is not None and found.mesh.shape != mesh.shape:
        raise UsageError(f"{found.name} has a mesh of its own, {found.mesh}: leave out --mesh.")
    data = found.to_json() if isinstance(found, Explanation) else found.explained().to_json()
    text = _specs(found) if isinstance(found, Program) and options.command == "check" else found
    _write(options, {"accepted": True} | data, str(text), found)
    return ACCEPTED


def _estimate(
    options: argparse.Namespace,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> int:
    found = estimate(function, *args, hardware=_read_hardware(options.hardware), **kwargs)
    _write(options, {"accepted": True} | found.to_json(), str(found), found)
    return ACCEPTED


def _rank(options: argparse.Namespace, build: Callable[..., Any]) -> int:
    hardware, axes = _read_hardware(options.hardware), options.axes.split(",")
    try:
        found = best_mesh(
            build,
            options.ranks,
            axes=axes,
            hardware=hardware,
            processes=options.processes,
            choices=dict(map(_choice, options.choice)),
            layers=options.layers,
        )
    except ShardMapError as error:
        raise UsageError(str(error)) from None
    print(json.dumps(found.to_json(), indent=2) if options.json else found)
    return ACCEPTED if found.candidates[0].seconds < float("inf") else REFUSED


def _choice(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    return name, [_number_or_word(value) for value in values.split(",")]


def _number_or_word(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _read_hardware(name: str) -> Hardware:
    known = {"A100": A100, "B200": B200, "H100": H100, "H200": H200}
    if name in known:
        return known[name]
    if name == "this_machine":
        return this_machine()
    if not Path(name).is_file():
        raise UsageError(f"--hardware takes {_HARDWARE}, not {name!r}.")
    try:
        return read_hardware(name)
    except ShardMapError as error:
        raise UsageError(str(error)) from None


def _write(options: argparse.Namespace, data: Mapping[str, Any], text: str, shown: Shown) -> None:
    print(json.dumps(data, indent=2) if options.json else text)
    if options.html is not None:
        shown.html(options.html)


def _specs(program: Program) -> str:
    lines = [f"  {path}: {spec!r}" for path, spec in program.in_specs]
    return "\n".join([f"{program.name} on the {program.mesh} is accepted", *lines])


def _load(where: str) -> tuple[ModuleType, Callable[..., Any]]:
    """Loads the module of FILE:FUNCTION, and returns it with the function."""
    file, _, name = where.rpartition(":")
    if not file or not name:
        raise UsageError(f"{where!r} names no function; write FILE:FUNCTION, as train.py:step.")
    try:
        module = _module(file)
    except UsageError:
        raise
    except BaseException as error:  # the user's code may raise anything, and may exit
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"{file} cannot be loaded: {what}, at {error_site(error)}") from error
    return module, _attribute(module, name)


def _module(file: str) -> ModuleType:
    path = Path(file)
    if path.suffix != ".py":
        sys.path.insert(0, str(Path.cwd()))
        return import_module(file)
    if not path.is_file():
        raise UsageError(f"there is no file {file}.")
    sys.path.insert(0, str(path.parent.resolve()))  # as `python FILE` does
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} is no module of Python.")
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, name: str) -> Callable[..., Any]:
    try:
        found: Any = reduce(getattr, name.split("."), module)
    except AttributeError:
        raise UsageError(f"{module.__name__} has no name {name!r}.") from None
    if not callable(found):
        raise UsageError(f"{name} is no function, but {show(found)}.")
    function: Callable[..., Any] = found
    return function


def _read_mesh(text: str) -> Mesh:
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    if not all(name.isidentifier() and size.isdecimal() for name, size in pairs):
        raise UsageError(f"--mesh takes axes and their sizes, as dp=1024,tp=8, not {text!r}.")
    names, sizes = zip(*pairs, strict=True)
    try:
        return make_mesh(tuple(map(int, sizes)), names, kind="abstract")
    except ShardMapError as error:
        raise UsageError(f"--mesh {text}: {error}") from None


def _read_shapes(texts: Sequence[str], grad: Sequence[str]) -> dict[str, Any]:
    """Reads the arguments; those below one name are its dict, or its list."""
    found: dict[Any, Any] = {}
    unused = set(grad)
    for text in texts:
        match = _NAME.fullmatch(text)
        if match is None:
            raise UsageError(f"--shapes takes ARGUMENT=float32[64,1024], not {text!r}.")
        whole = match["name"] + match["keys"]
        using = {
            name for name in grad if whole == name or whole.startswith((f"{name}.", f"{name}["))
        }
        unused -= using
        keys = [match["name"], *(_read_key(*key.groups()) for key in _KEY.finditer(match["keys"]))]
        _put(found, keys, _read_value(match["value"], bool(using)), text)
    if unused:
        raise UsageError(f"--grad names {', '.join(sorted(unused))}, which --shapes lacks.")
    return {str(name): _as_tree(value) for name, value in found.items()}


def _read_key(attribute: str | None, index: str) -> str | int:
    if attribute is not None:
        return attribute
    return int(index) if index.isdecimal() else index.strip("'\"")


def _put(found: dict[Any, Any], keys: Sequence[str | int], value: Any, text: str) -> None:
    *outer, last = keys
    for key in outer:
        found = found.setdefault(key, {})
        if not isinstance(found, dict):
            raise UsageError(f"--shapes has {key} as a tensor, and {text} in it.")
    if last in found:
        raise UsageError(f"--shapes has two values for {text.partition('=')[0]}.")
    found[last] = value


def _as_tree(value: Any) -> Any:
    """Makes lists of dicts whose keys are numbers."""
    if not isinstance(value, dict):
        return value
    tree = {key: _as_tree(item) for key, item in value.items()}
    return [tree[at] for at in range(len(tree))] if tree.keys() == {*range(len(tree))} else tree


def _read_value(text: str, grad: bool) -> Any:
    match = _SHAPE.fullmatch(text)
    if match is None:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise UsageError(
                f"{text!r} is neither float32[64,1024] nor a value of Python."
            ) from None
    dtype = getattr(torch, match["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{match['dtype']!r} is no dtype of torch.")
    sizes = tuple(int(size) for size in match["sizes"].split(",") if size.strip())
    return ShapeDtype(sizes, dtype, requires_grad=grad)


if __name__ == "__main__":
    sys.exit(main())
