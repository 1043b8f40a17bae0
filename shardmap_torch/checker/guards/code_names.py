"""Names in bytecode: the globals, attributes, imports and strings that code may use."""

import dis
from collections.abc import Iterable
from functools import lru_cache
from types import CodeType
from typing import Final


@lru_cache(maxsize=4096)
def names_of(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Finds the globals, all names, imports and strings of code and the functions in it."""
    globals_: dict[str, None] = {}
    names: dict[str, None] = {}
    imports: dict[str, None] = {}
    texts: dict[str, None] = {}
    for each in _codes(code):
        names |= dict.fromkeys(each.co_names)
        texts |= dict.fromkeys(text for text in each.co_consts if isinstance(text, str))
        steps = list(dis.get_instructions(each))
        globals_ |= dict.fromkeys(str(i.argval) for i in steps if i.opname in _LOADS)
        imports |= dict.fromkeys(str(i.argval) for i in steps if i.opname == "IMPORT_NAME")
    return tuple(globals_), tuple(names), tuple(imports), tuple(texts)


_LOADS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


def _codes(code: CodeType) -> Iterable[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
