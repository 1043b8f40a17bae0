"""Names in bytecode: the globals, attributes, imports and strings that code may use."""

import dis
from collections.abc import Iterable
from functools import lru_cache
from types import CodeType
from typing import Final, NamedTuple


class CodeNames(NamedTuple):
    """Names in code and in the functions that it has.

    Attributes:
        globals: variables that it may read outside of functions.
        names: those, attributes, and modules that it imports.
        imports: modules that it imports.
        strings: its literal strings.
    """

    globals: tuple[str, ...]
    names: tuple[str, ...]
    imports: tuple[str, ...]
    strings: tuple[str, ...]


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> CodeNames:
    """Finds the names in code and in the functions that it has."""
    globals_: dict[str, None] = {}
    names: dict[str, None] = {}
    imports: dict[str, None] = {}
    strings: dict[str, None] = {}
    for each in _codes(code):
        names |= dict.fromkeys(each.co_names)
        strings |= dict.fromkeys(text for text in each.co_consts if isinstance(text, str))
        steps = list(dis.get_instructions(each))
        globals_ |= dict.fromkeys(str(i.argval) for i in steps if i.opname in _LOADS)
        imports |= dict.fromkeys(str(i.argval) for i in steps if i.opname == "IMPORT_NAME")
    return CodeNames(*map(tuple, (globals_, names, imports, strings)))


_LOADS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


def _codes(code: CodeType) -> Iterable[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
