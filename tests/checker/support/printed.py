"""Repairs as they are printed, applied to the source of a wrong program by reading alone.

Right programs are made wrong in one place: a collective is dropped, doubled, of another op, axis,
dim or type, or a spec is another. What an error prints as tried is written into the source
(`edits.py`), and the repaired program has to compute what the right one does, forward and backward.

Run, which prints the fate of each class of mistakes:
.venv/bin/python -m tests.checker.support.printed
"""

import ast
import copy
import linecache
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import getsource
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

import shardmap_torch
from shardmap_torch import OneDeviceWarning, make_mesh, shard_map
from tests.checker.support import (
    daily_attention,
    daily_layers,
    daily_losses,
    daily_models,
    daily_steps,
)
from tests.checker.support.edits import TRIED, UnclearError, edited, name_of
from tests.checker.support.outcomes import fresh, with_gradients

AXES: Final = ("dp", "tp")
RANKS: Final = make_mesh((2, 2), AXES, kind="simulated", simulate="ranks")

RIGHT, WRONG, REFUSED, UNCLEAR, NONE = "right", "wrong", "refused", "unclear", "none"
"""Fates of what an error prints: REFUSED if the repaired program is, NONE if nothing is tried."""


@dataclass(frozen=True)
class Source:
    """The text of a body, `in_specs = (...)` and `out_specs = ...`, and how it is called."""

    name: str
    text: str
    module: ModuleType
    args: Any
    is_step: bool
    mistake: str = ""

    def outcome(self, check: Any = "global") -> list[Tensor]:
        """Returns its values on ranks, and the gradients of all arguments that can have one."""
        file = f"{self.name}.py"
        linecache.cache[file] = len(self.text), None, self.text.splitlines(True), file
        names = {**vars(shardmap_torch), **vars(self.module)}
        exec(compile(self.text, file, "exec"), names)  # the text is ours
        options = {"in_specs": names["in_specs"], "out_specs": names["out_specs"]}
        mapped: Any = shard_map(names[self.name], mesh=RANKS, check=check, **options)
        args = fresh(self.args, learns=not self.is_step)
        for number in _CONSTANT.get(self.name, ()):
            args[number].requires_grad_(False)
        return with_gradients(mapped(*args), args)


_CONSTANT: Final = {"class_weights": [2], "crf": [3]}
"""Inputs that torch does not differentiate by, by their number."""

_HELPERS: Final = {
    "mean": "all_reduce(X, 'dp', op='mean', dst=I)",
    "total": "all_reduce(X, 'dp', dst=I)",
    "add_tp": "all_reduce(X, 'tp', dst=I)",
    "to_r": "convert(X, 'tp', src=I, dst=R)",
}


class _Inlined(ast.NodeTransformer):
    """Writes what abbreviations stand for, and drops annotations."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Inlines a call of an abbreviation."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _HELPERS:
            call = _parsed(_HELPERS[node.func.id])
            assert isinstance(call, ast.Call)
            call.args[0] = node.args[0]
            return call
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Leaves out what a function is decorated with, and its annotations."""
        self.generic_visit(node)
        node.decorator_list, node.returns = [], None
        for each in node.args.args:
            each.annotation = None
        return node


def _daily(modules: Sequence[ModuleType]) -> Iterator[Source]:
    for module in modules:
        for node in ast.parse(getsource(module)).body:
            if isinstance(node, ast.FunctionDef) and node.name in module.PROGRAMS:
                program = module.PROGRAMS[node.name]
                (made,) = node.decorator_list
                assert isinstance(made, ast.Call)
                specs = [ast.unparse(each) for each in made.args[1:]]
                if not isinstance(made.args[1], ast.Tuple):
                    specs[0] = f"({', '.join([specs[0]] * len(program.args))},)"
                body = ast.unparse(_Inlined().visit(node))
                text = f"{body}\nin_specs = {specs[0]}\nout_specs = {specs[1]}\n"
                yield Source(node.name, text, module, program.args, program.is_step)


MODULES: Final = (daily_layers, daily_steps, daily_losses, daily_attention, daily_models)


def sources() -> list[Source]:
    """Returns all right programs."""
    return list(_daily(MODULES))


# ----------------------------------------------------------------------------------- mistakes

_COLLECTIVES: Final = ("all_reduce", "all_gather", "reduce_scatter", "convert", "sync_gradients")


def _with(call: ast.Call, **options: str) -> ast.Call:
    changed = copy.deepcopy(call)
    changed.keywords = [each for each in changed.keywords if each.arg not in options]
    for name, text in options.items():
        changed.keywords.append(ast.keyword(name, _parsed(text)))
    return changed


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _said(call: ast.Call, option: str) -> str:
    return next((ast.unparse(each.value) for each in call.keywords if each.arg == option), "")


def _wrong_calls(call: ast.Call) -> Iterator[tuple[str, ast.expr | str]]:
    """Yields what somebody writes in place of a collective by mistake."""
    name, written, op, dst = name_of(call), ast.unparse(call), _said(call, "op"), _said(call, "dst")
    axis, dim = ast.unparse(call.args[-1]), _said(call, "dim")
    yield f"dropped {name}", ast.unparse(call.args[0])
    if name == "all_reduce" and op in ("", "'mean'"):
        yield "wrong op", _with(call, op="'sum'" if op else "'mean'")
    if name == "all_reduce" and op == "'mean'":
        yield "double mean", f"{written} / axis_size({axis})"
        divided = copy.deepcopy(call)
        divided.args[0] = _parsed(f"({ast.unparse(call.args[0])}) / axis_size({axis})")
        yield "loss divided twice", divided
    if name in ("all_reduce", "all_gather"):
        yield "wrong dst", _with(call, dst="R" if dst == "I" else "I")
        yield f"doubled {name}", f"{name}({written}, {axis}, dst={dst})"
    if dim:
        yield "wrong dim", _with(call, dim="1" if dim == "0" else "0")
    if axis in ("'dp'", "'tp'"):
        other = copy.deepcopy(call)
        other.args[-1] = ast.Constant("tp" if axis == "'dp'" else "dp")
        yield "wrong axis", other


def _exchanged(text: str, at: int, new: ast.expr | str) -> str:
    """Returns a text with something else in place of the node of a number."""
    tree = ast.parse(text)
    old = list(ast.walk(tree))[at]
    by = _parsed(new) if isinstance(new, str) else new

    class Exchange(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return by if node is old else self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Exchange().visit(tree)))


_SPECS: Final = ("P()", "P('dp')", "P('tp')", "P(None, 'tp')")


def mutants(source: Source) -> Iterator[Source]:
    """Yields a program with one mistake in it, each in turn."""
    for at, node in enumerate(ast.walk(ast.parse(source.text))):
        changes: list[tuple[str, ast.expr | str]] = []
        match node:
            case ast.Call() if name_of(node) in _COLLECTIVES and len(node.args) > 1:
                changes = [*_wrong_calls(node)]
            case ast.Assign(targets=[ast.Name(id=("in_specs" | "out_specs") as name)]):
                yield from _with_specs(source, name, node.value)
        for mistake, new in changes:
            yield replace(source, text=_exchanged(source.text, at, new), mistake=mistake)


def _with_specs(source: Source, name: str, value: ast.expr) -> Iterator[Source]:
    tree = ast.parse(source.text)
    items = value.elts if isinstance(value, ast.Tuple) else [value]
    written = [ast.unparse(each) for each in items]
    own = [eval(each, {**vars(shardmap_torch), **vars(source.module)}) for each in written]
    for number, spec in enumerate(own):
        for text in _SPECS:
            other = eval(text, vars(shardmap_torch))
            if isinstance(spec, shardmap_torch.P) and other != spec:
                several = [*written[:number], text, *written[number + 1 :]]
                said = f"({', '.join(several)},)" if isinstance(value, ast.Tuple) else several[0]
                lines = [
                    f"{name} = {said}" if line.startswith(f"{name} =") else line
                    for line in ast.unparse(tree).splitlines()
                ]
                yield replace(source, text="\n".join(lines) + "\n", mistake=f"wrong {name}")


# -------------------------------------------------------------------------------------- fates


@dataclass(frozen=True)
class Fate:
    """Outcome of one wrong program: of what is printed, and of the text that was applied."""

    source: Source
    fate: str
    message: str
    repaired: str = ""


def fate_of(wrong: Source, right: Source, check: Any = "global") -> Fate | None:
    """Reads the repair of a refused program, applies it and compares; None if it is accepted."""
    try:
        wrong.outcome(check)
    except Exception as error:  # of torch too, about shapes that do not fit
        message = "\n".join([f"{error}", *getattr(error, "__notes__", ())])
    else:
        return None
    if re.search(r"specs on the \w+ mesh", message):
        return None  # a spec of more dims than there are, or of sizes that do not divide
    found = TRIED.search(message)
    if found is None:
        return Fate(wrong, NONE, message)
    try:
        text = edited(wrong.text, found[1])
    except UnclearError as unclear:
        return Fate(wrong, UNCLEAR, message, f"{unclear}")
    try:
        same = _same(replace(wrong, text=text).outcome(), right.outcome())
    except Exception as error:
        return Fate(wrong, REFUSED, message, f"{text}\n{error}")
    return Fate(wrong, RIGHT if same else WRONG, message, text)


def _same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    close = partial(torch.allclose, rtol=1e-8, atol=1e-8, equal_nan=True)
    return len(found) == len(expected) and all(
        x.shape == y.shape and close(x.to(y), y) for x, y in zip(found, expected, strict=True)
    )


def by_default(wrong: Source, right: Source) -> str:
    """Returns what the default check makes of a program, and whether that is the right one."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = wrong.outcome(None)
        except Exception:  # of torch too, about shapes that do not fit
            return REFUSED
    said = any(each.category is OneDeviceWarning for each in told)
    same = _same(found, right.outcome())
    return f"{'told of' if said else 'silent'} and {RIGHT if same else WRONG}"


def every_mutant(seed: int = 0) -> list[tuple[Source, Source]]:
    """Returns wrong programs and the right ones that they are made of, in an order of its own."""
    pairs = [(wrong, right) for right in sources() for wrong in mutants(right)]
    random.Random(seed).shuffle(pairs)
    return pairs


def fates(pairs: Sequence[tuple[Source, Source]], check: Any = "global") -> Iterator[Fate]:
    """Yields the fates of those programs that are refused."""
    for wrong, right in pairs:
        found = fate_of(wrong, right, check)
        if found is not None:
            yield found


def main() -> int:
    """Prints fates by mistake, and all that are not right; 1 if one is wrong."""
    warnings.simplefilter("ignore", OneDeviceWarning)
    first, last = map(int, sys.argv[1:3] or (0, 10**6))
    by: dict[str, Counter[str]] = {}
    for found in fates(every_mutant()[first:last]):
        by.setdefault(found.source.mistake, Counter())[found.fate] += 1
        if found.fate != RIGHT:
            text = f"{found.source.text}\n{found.message}\n{found.repaired}"
            print(f"=== {found.fate}: {found.source.name}, {found.source.mistake}\n{text}")
    for mistake, counts in sorted(by.items()):
        print(f"{mistake:24} {dict(counts)}")
    every = sum(by.values(), Counter())
    print(f"{every.total()} refused, {every[RIGHT] / every.total():.0%} right: {dict(every)}")
    return int(every[WRONG] > 0)


if __name__ == "__main__":
    sys.exit(main())
