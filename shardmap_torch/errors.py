"""Exceptions of shardmap_torch, and helpers that format their messages.

None derives from TypeError: raised inside `a + b`, Python replaces a TypeError by
"unsupported operand type(s)", and the message is lost.
"""

from collections.abc import Sequence, Set
from typing import Final

from shardmap_torch.report.page import Page, Shown, page_of_error


class ShardMapError(Shown, Exception):
    """Base of all errors of this package; catch it to catch them all.

    It has a page: notebooks show the refused line and its causes beside their source, and
    `html(path)` writes that.
    """

    def page(self) -> Page:
        """Returns the page."""
        return page_of_error(self)


class MeshError(ShardMapError):
    """A mesh cannot be made, found or used: sizes, names, process groups."""


class SpecError(ShardMapError):
    """Specs and values do not match: tree, rank, divisibility, axis names, device."""


class ShardTypeError(ShardMapError):
    """A value's type along a mesh axis is not valid where it is used.

    Attributes:
        findings: every single problem, where the message groups them.
        rejection: what the checker knows beside the text; see `checker/ir/repairs.py`.
    """

    findings: tuple[str, ...] = ()
    rejection: object = None


class OneDeviceWarning(UserWarning):
    """A function that is checked by default computes something else than the same on one device."""


class CollectiveError(ShardMapError):
    """A collective was called with arguments that cannot work.

    Attributes:
        node: the autograd node whose backward has called it, without knowing the mesh.
    """

    node: object = None


class CollectiveMismatchError(CollectiveError):
    """The ranks of one axis did not call the same collective."""


class CommunicationError(ShardMapError):
    """A collective failed while it ran, as when a peer process is gone."""


class TransformError(ShardMapError):
    """A function transform was asked of something that cannot provide it."""


class KernelError(ShardMapError):
    """An overlapped kernel cannot run as it was asked to."""


class CheckpointError(ShardMapError):
    """A checkpoint cannot be saved or loaded: incomplete, damaged, or of another tree."""


class LayerError(ShardMapError):
    """A layer of `shardmap_torch.nn` was called with arguments that cannot work."""


class OptimizerError(ShardMapError):
    """An optimizer cannot be made, or cannot update its arguments."""


class UnsupportedTorchError(ShardMapError, ImportError):
    """This release of torch lacks private names that are needed; lists them all."""


class PostmortemError(ShardMapError):
    """The flight records of the ranks cannot be compared."""


_MAX_SHOWN: Final = 500

MAX_LINES: Final = 40
"""Maximal number of lines of a message."""

TRIED: Final = "Tried, and accepted also by check='global': "
"""The start of the line that names a repair which was tried."""


def show(value: object) -> str:
    """Formats a value for an error: the first line, shortened; its type if `repr` fails.

    Example:
        >>> show("tp"), len(show(list(range(1000))))
        ("'tp'", 500)
    """
    try:
        text = repr(value)
    except Exception:  # whatever a `__repr__` of the user's own raises
        return f"a {type(value).__name__}"
    first, more, _ = text.partition("\n")  # a module lists all that is below it
    text = f"{first}..." if more else text
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def show_shape(dtype: object, shape: Sequence[int]) -> str:
    """Formats a tensor's dtype and shape.

    Example:
        >>> import torch
        >>> show_shape(torch.float32, (2, 3))
        'float32[2, 3]'
    """
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def counted(number: int, one: str, more: str) -> str:
    """Formats a number of things.

    Example:
        >>> counted(1, "spec", "specs"), counted(2, "spec", "specs")
        ('1 spec', '2 specs')
    """
    return f"{number} {one if number == 1 else more}"


def read_names(value: object) -> tuple[str, ...] | None:
    """Reads one name, or a sequence or set of names; None where it is neither.

    Example:
        >>> read_names("tp"), read_names(["dp", "tp"]), read_names(3)
        (('tp',), ('dp', 'tp'), None)
    """
    if isinstance(value, str):
        return (value,)
    if type(value) is tuple and {*map(type, value)} == {str}:  # as most are
        return value
    if not isinstance(value, Sequence | Set) or not all(isinstance(name, str) for name in value):
        return None
    return tuple(value)


def listing(head: str, problems: Sequence[str]) -> str:
    """Joins a headline and its offenders, one line each; more than three alike ones in one.

    Example:
        >>> print(listing("Specs do not match:", [*(f"{x}: too long" for x in "abcde"), "y: bad"]))
        Specs do not match:
          a, b, c and 2 more: too long
          y: bad
    """
    lines = _folded(problems)
    if len(lines) >= MAX_LINES:
        left = len(lines) - MAX_LINES + 2
        lines = [*lines[: MAX_LINES - 2], f"... and {left} more"]
    return "\n".join([head, *(f"  {line}" for line in lines)])


def _folded(problems: Sequence[str]) -> list[str]:
    """Joins more than three problems that are alike but for the leaf, named before a colon."""
    groups: dict[str, list[str]] = {}
    for problem in problems:
        groups.setdefault(problem.partition(": ")[2] or problem, []).append(problem)
    folded: dict[str, str] = {}
    for what, alike in groups.items():
        leaves = ", ".join(problem.partition(": ")[0] for problem in alike[:3])
        line = f"{leaves} and {len(alike) - 3} more: {what}"
        folded |= dict.fromkeys(alike, line) if alike[3:] else {}
    return [*dict.fromkeys(folded.get(problem, problem) for problem in problems)]
