"""Applies the repair that an error prints to the source that it speaks of, as a reader would.

Nothing but the text is read: a repair that names no place, or an operand that is not written there,
cannot be applied.
"""

import ast
import re
from collections.abc import Callable, Iterator
from typing import Final

TRIED: Final = re.compile(r"^Tried, and accepted also by check='global': (.+)$", re.MULTILINE)

_AT: Final = r" at \S+\.py:(\d+(?:, column \d+)?)$"


class UnclearError(Exception):
    """The text does not say where or what to write."""


def edited(source: str, text: str) -> str:
    """Returns the source with the changes that a text asks for, the last line of it first."""
    for change in re.split(r", and (?=op=)", text):
        source = _edited(source, change)
    return source


def _edited(source: str, change: str) -> str:
    for form, edit in _FORMS:
        found = re.search(form, change)
        if found is not None:
            tree = ast.parse(source)
            edit(tree, *found.groups())
            return ast.unparse(ast.fix_missing_locations(tree))
    raise UnclearError(change)


class _Exchange(ast.NodeTransformer):
    """Writes one expression in place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        """Returns what stands there afterwards."""
        return self._new if node is self._old else self.generic_visit(node)


def _exchange(tree: ast.AST, old: ast.AST, new: str | ast.AST) -> None:
    _Exchange(old, _expression(new) if isinstance(new, str) else new).visit(tree)


def _expression(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        raise UnclearError(text) from None


def _at(tree: ast.AST, place: str) -> Iterator[ast.expr]:
    """Yields what stands in a line, such as `12`, or `12, column 5`."""
    line, _, column = place.partition(", column ")
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and node.lineno == int(line):
            if not column or node.col_offset + 1 == int(column):
                yield node


def name_of(node: ast.AST) -> str:
    """Returns the name of what an expression calls, as torch has it."""
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name
        case ast.BinOp(op=op) | ast.UnaryOp(op=op):
            return _OPERATORS.get(type(op).__name__, "")
        case ast.Subscript():
            return "getitem"
    return ""


_OPERATORS: Final = {
    **{"Add": "add", "Sub": "sub", "Mult": "mul", "Div": "div", "MatMult": "matmul"},
    **{"Pow": "pow", "USub": "neg", "FloorDiv": "floor_divide", "Mod": "remainder"},
}


def _operands(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Call(func=func, args=args, keywords=keywords):
            owner = [func.value] if isinstance(func, ast.Attribute) else []
            given = [*owner, *args, *(each.value for each in keywords)]
        case ast.BinOp(left=left, right=right):
            given = [left, right]
        case ast.UnaryOp(operand=operand):
            given = [operand]
        case ast.Compare(left=left, comparators=others):
            given = [left, *others]
        case ast.Subscript(value=value, slice=index):
            given = [value, index]
        case _:
            return []
    lists = [each.elts if isinstance(each, ast.List | ast.Tuple) else [each] for each in given]
    return [item for items in lists for item in items]


def _call(tree: ast.AST, name: str, line: str) -> ast.Call:
    found = [each for each in _at(tree, line) if isinstance(each, ast.Call)]
    found = [each for each in found if name_of(each) == name]
    if len(found) != 1:
        raise UnclearError(f"{len(found)} calls of {name} in line {line}")
    return found[0]


def _operand(tree: ast.AST, new: str, old: str, name: str, line: str) -> None:
    """Edits `NEW in place of OLD in NAME at FILE:LINE`."""
    wanted = ast.unparse(_expression(old))
    calls = [(call, each) for call in _at(tree, line) for each in _operands(call)]
    found = [(call, each) for call, each in calls if ast.unparse(each) == wanted]
    fitting = [(call, each) for call, each in found if _is_called(name, name_of(call))]
    places = {id(each): each for _, each in fitting or found}
    if not places or len({name_of(call) for call, _ in fitting or found}) > 1:
        raise UnclearError(f"{len(places)} operands {old} in line {line}")
    for each in places.values():
        _exchange(tree, each, new)


def _own_part(tree: ast.AST, new: str, old: str, name: str, line: str, rest: str) -> None:
    """Edits `NEW in place of OLD in NAME at FILE:LINE, and convert(y, REST) for each y ...`."""
    _operand(tree, new, old, name, line)
    found = [each for each in _at(tree, line) if _is_called(name, name_of(each))]
    if len(found) != 1:
        raise UnclearError(f"{len(found)} calls of {name} in line {line}")
    call = ast.unparse(found[0])
    several = name in ("chunk", "split", "unbind", "sort", "topk", "tensor_split")
    each = f"[convert(y, {rest}) for y in {call}]"
    _exchange(tree, found[0], each if several else f"convert({call}, {rest})")


def _is_called(said: str, written: str) -> bool:
    plain = said.removeprefix("r").removeprefix("i").removesuffix("_")
    return written in (said, plain, *_OTHERS.get(said, ()))


_OTHERS: Final = {"truediv": ("div",), "rtruediv": ("div",), "rsub": ("sub",), "mm": ("matmul",)}


def _instead(tree: ast.AST, new: str, name: str, line: str) -> None:
    _exchange(tree, _call(tree, name, line), new)


def _left_out(tree: ast.AST, name: str, line: str) -> None:
    call = _call(tree, name, line)
    _exchange(tree, call, _operands(ast.Call(ast.Name(name), call.args, call.keywords))[0])


def _option(tree: ast.AST, option: str, value: str, name: str, line: str) -> None:
    _set(_call(tree, name, line), option, value)


def _offset(tree: ast.AST, value: str, name: str, line: str) -> None:
    """Edits `offset VALUE in shift`, or `each pair turned round in ppermute`, at FILE:LINE."""
    args = _call(tree, name, line).args
    pairs = f"[(t, s) for s, t in {ast.unparse(args[2])}]"
    args[2] = _expression(value if name == "shift" else pairs)


def _set(call: ast.Call, option: str, value: str) -> None:
    call.keywords = [each for each in call.keywords if each.arg != option]
    call.keywords.append(ast.keyword(option, _expression(value)))


def _gradients(tree: ast.AST, axis: str, more: str, line: str) -> None:
    """Edits `all_reduce over AXIS with dst=I of the gradients taken at FILE:LINE`."""
    reduced = "all_reduce({}, " + axis + ", dst=I" + (", op='mean')" if more else ")")
    for each in _taken(tree, line):
        text = ast.unparse(each)
        called = name_of(each.func) if isinstance(each.func, ast.Call) else name_of(each)
        one, both = reduced.format(text), f"(lambda v, g: (v, {reduced.format('g')}))(*{text})"
        _exchange(tree, each, both if called == "value_and_grad" else one)


def _taken(tree: ast.AST, line: str) -> list[ast.Call]:
    """Returns the calls by which a line takes gradients."""
    calls = [each for each in _at(tree, line) if isinstance(each, ast.Call)]
    found = [each for each in calls if name_of(each.func) in ("grad", "value_and_grad")]
    found = found or [each for each in calls if ast.unparse(each.func).endswith("autograd.grad")]
    if len(found) != 1:
        raise UnclearError(f"{len(found)} gradients in line {line}")
    return found


def _loss(tree: ast.AST, new: str, line: str) -> None:
    """Edits `NEW for the loss that is differentiated at FILE:LINE`."""
    (taken,) = _taken(tree, line)
    of = taken.func if isinstance(taken.func, ast.Call) else taken
    loss = of.args[0]
    text = re.sub(r"\bloss\b", "({})", new, count=1)
    if of is taken:  # of a tensor
        _exchange(tree, loss, text.format(ast.unparse(loss)))
    else:
        _exchange(tree, loss, "lambda *a: " + text.format(f"({ast.unparse(loss)})(*a)"))


def _specs(tree: ast.AST, name: str) -> ast.expr:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return value
            case ast.keyword(arg=arg, value=value) if arg == name:
                return value
    raise UnclearError(f"no {name}")


def _body(tree: ast.AST) -> ast.FunctionDef:
    return next(each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef))


def _item(node: ast.expr, path: str) -> ast.expr:
    """Returns the part of an expression that a path, such as `[1]['w']`, leads to."""
    for key in re.findall(r"\[([^]]+)\]", path):
        match node:
            case ast.Tuple(elts=items) if key.isdigit() and int(key) < len(items):
                node = items[int(key)]
            case ast.Dict(keys=keys, values=values) if key in map(ast.unparse, filter(None, keys)):
                node = dict(zip(map(ast.unparse, filter(None, keys)), values, strict=True))[key]
            case _:
                return node  # a prefix of the tree
    return node


def _in_spec(tree: ast.AST, label: str) -> ast.expr:
    name, _, path = label.removeprefix("input ").partition("[")
    names = [each.arg for each in _body(tree).args.args]
    spec = _specs(tree, "in_specs")
    if isinstance(spec, ast.Tuple):
        spec = spec.elts[names.index(name)]
    return _item(spec, "[" + path)


def _replicate(tree: ast.AST, axis: str, label: str) -> None:
    """Edits `replicate={AXIS} in the spec of INPUT`."""
    spec = _in_spec(tree, label)
    text = ast.unparse(spec)
    _exchange(tree, spec, f"P(*({text}).entries, replicate={{*({text}).replicate, {axis}}})")


def _in_specs(tree: ast.AST, new: str, labels: str) -> None:
    for label in labels.split(" and "):
        _exchange(tree, _in_spec(tree, label), new)


def _out_specs(tree: ast.AST, new: str, path: str) -> None:
    _exchange(tree, _item(_specs(tree, "out_specs"), path), new)


def _before_return(tree: ast.AST, texts: str, how: str) -> None:
    """Edits `all_reduce OUT over AXIS and OUT over AXIS with HOW before the return`."""
    options = how.replace(" and ", ", ")
    for text in texts.split(" and "):
        path, _, axes = text.partition(" over ")
        for axis in axes.split(", "):
            _returned(tree, path, "all_reduce(", f", {axis}, {options})")


def _return(tree: ast.AST, texts: str) -> None:
    """Edits `return all_gather(OUT, ...)`."""
    for text in texts.split(" and "):
        found = re.search(r"\bout\b(\[[^]]+\])*", text)
        if found is None:
            raise UnclearError(text)
        _returned(tree, found[0], text[: found.start()], text[found.end() :])


def _returned(tree: ast.AST, path: str, before: str, after: str) -> None:
    """Writes text around what the body returns there."""
    body = _body(tree)
    inner = {
        id(each)
        for of in ast.walk(body)
        if isinstance(of, ast.FunctionDef) and of is not body
        for each in ast.walk(of)
    }
    for node in list(ast.walk(body)):
        if isinstance(node, ast.Return) and node.value is not None and id(node) not in inner:
            item = _item(node.value, path)
            if item is node.value and path != "out":
                raise UnclearError(path)
            _exchange(tree, item, before + ast.unparse(item) + after)


Edit = Callable[..., None]

_FORMS: Final[tuple[tuple[str, Edit], ...]] = (
    (r"^all_reduce over (.+) with dst=I( and op='mean')? of the gradients taken" + _AT, _gradients),
    (r"^(all_reduce\(loss, .+\)) for the loss that is differentiated" + _AT, _loss),
    (r"^replicate=\{(.+)\} in the spec of (.+)$", _replicate),
    (r"^(.+) for (out\S*) in out_specs$", _out_specs),
    (r"^(.+?) for (.+) in in_specs$", _in_specs),
    (r"^all_reduce (.+) with (dst=I(?: and op='mean')?) before the return$", _before_return),
    (r"^return (.+)$", _return),
    (r"^leave out (\w+)" + _AT, _left_out),
    (r"^(op|dst|dim)=(\S+) in (\w+)" + _AT, _option),
    (r"^offset (\S+) in (shift)" + _AT, _offset),
    (r"^each pair (turned round) in (ppermute)" + _AT, _offset),
    (
        r"^(.+) in place of (.+) in (\w+)" + _AT[:-1] + r", and convert\(y, (.+)\) for each y that",
        _own_part,
    ),
    (r"^(.+) in place of (.+) in (\w+)" + _AT, _operand),
    (r"^(.+) in place of (\w+)" + _AT, _instead),
)
"""Forms of texts, with functions that do as they say; of a place only the line is given."""
