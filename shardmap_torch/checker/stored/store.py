"""Looks verdicts up on disk, by the content of all that they depend on, and keeps new ones there.

A verdict is kept only if it is certain what it depends on: see `content`. A run compares itself
with a verdict from disk as with any other, so that a program which the key does not see is checked
again, and its file is dropped.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.boundary.matching import input_signature
from shardmap_torch.checker.api import program_of
from shardmap_torch.checker.stored.circumstances import circumstances
from shardmap_torch.checker.stored.content import UnstableError, digest, structure_text, text
from shardmap_torch.checker.stored.encoding import EncodingError
from shardmap_torch.checker.stored.folder import Folder
from shardmap_torch.checker.stored.records import read_verdict, write_verdict
from shardmap_torch.checker.verify.path import Strictness
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.core.tree import flatten

VARIABLE: Final = "SHARDMAP_CACHE"
"""The environment variable that names the folder."""


class Stored:
    """The verdicts on one function that are kept on disk, if there is a folder for them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_trusted, self._has_warned = True, False

    def get(self, call: Call, strictness: Strictness, check: Callable[[], Verdict]) -> Verdict:
        """Returns the verdict on a call that is kept, or else makes one and keeps it.

        Raises:
            ShardTypeError: as `check`.
        """
        folder = _folder()
        key = self._key(call, strictness) if folder is not None and self._is_trusted else None
        if folder is None or key is None:
            return check()
        found = _read(folder, key, call)
        if found is not None:
            return found
        with folder.first(key) as is_first:
            found = _read(folder, key, call)
            if found is not None:
                return found
            verdict = check()
            if is_first or folder.read(key) is None:
                self._keep(folder, key, call, verdict)
            return verdict

    def distrust(self, call: Call, strictness: Strictness) -> None:
        """Drops the verdict on a call whose run was another program, and keeps no more of them."""
        folder = _folder()
        if folder is not None and self._is_trusted:
            key = self._key(call, strictness)
            self._is_trusted = False
            if key is not None:
                folder.remove(key)

    def _key(self, call: Call, strictness: Strictness) -> str | None:
        try:
            return key_of(call, strictness)
        except UnstableError as unstable:
            self._warn(f"it depends on {unstable}")
        except Exception as error:  # objects of users' own may raise anything where they are read
            self._warn(f"its state cannot be read: {type(error).__name__}: {error}")
        return None

    def _keep(self, folder: Folder, key: str, call: Call, verdict: Verdict) -> None:
        try:
            head, program = write_verdict(verdict)
            _require_same(read_verdict(call, head, program), verdict)
        except EncodingError as error:
            self._warn(f"it depends on {error}")
            return
        folder.write(key, [head, program])

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{VARIABLE}: the verdict on {self._name} is not kept, and each process checks it: "
                f"{why}, which has no content that is the same in each of them.",
                stacklevel=2,
            )


def key_of(call: Call, strictness: Strictness) -> str:
    """Hashes all that the verdict on a call depends on.

    Raises:
        UnstableError: some of it has no content that is the same in every process.
    """
    statics = [x for x in call.leaves if not isinstance(x, Tensor)]
    return digest([call.function, *statics], [*circumstances(), *_describe(call, strictness)])


def _describe(call: Call, strictness: Strictness) -> Iterator[str]:
    match = call.match
    yield text((call.name, strictness if isinstance(strictness, str) else frozenset(strictness)))
    yield f"{call.mesh.layout or call.mesh!r} of {len(call.mesh.axis_names)}"
    yield text((call.mapped, call.bound))
    yield text((match.paths, match.specs, match.crossing, match.static))
    yield structure_text(call.structure)
    specs, outline = flatten(call.out_specs)
    yield text(tuple(specs))
    yield structure_text(outline)
    for leaf in call.leaves:
        yield _leaf_text(leaf)


def _leaf_text(leaf: Any) -> str:
    signature = input_signature(leaf)
    if not isinstance(leaf, Tensor):
        return text(signature)
    shape, dtype, layout, device, grad = signature
    if not all(type(size) is int for size in shape):
        raise UnstableError("a size that is a symbol")
    return text((shape, dtype, str(layout), device, grad))


def _folder() -> Folder | None:
    named = os.environ.get(VARIABLE)
    if not named or torch.compiler.is_compiling():
        return None
    return Folder(Path(named))


def _read(folder: Folder, key: str, call: Call) -> Verdict | None:
    lines = folder.read(key)
    if lines is None:
        return None
    try:
        head, program = lines
        return read_verdict(call, head, program)
    except Exception as error:  # whatever is in the file, the call can be checked
        folder.ignore(key, f"{type(error).__name__}: {error}")
        return None


def _require_same(found: Verdict, verdict: Verdict) -> None:
    """Requires that what is read is what was written, to the letter.

    Raises:
        EncodingError: it is not.
    """
    one, two = program_of(found), program_of(verdict)
    if f"{one}" != f"{two}" or one.fingerprint != two.fingerprint or one.mesh != two.mesh:
        raise EncodingError("its program")
    if any(getattr(found, name) != getattr(verdict, name) for name in _COMPARED):
        raise EncodingError("its types")


_COMPARED: Final = "name paths specs crossing exits outputs sharing traits".split()
