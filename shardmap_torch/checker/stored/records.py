"""Verdicts as JSON, and back: a head that runs need, and the program, read when asked for."""

import json
from typing import Final

from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.stored.encoding import EncodingError, Json
from shardmap_torch.checker.stored.kinds import ENCODING
from shardmap_torch.checker.verify.verdict import Verdict

_HEAD: Final = "specs exits outputs result traits sharing start refusal tried".split()
"""The attributes that runs need, beside those of the call."""


def write_verdict(verdict: Verdict) -> tuple[str, str]:
    """Writes a verdict as two texts of JSON in ASCII: its head, and its program.

    Raises:
        EncodingError: it has something that only this process has.
    """
    if verdict.altered:
        raise EncodingError("objects that its body changes")
    head = {name: ENCODING.write(getattr(verdict, name)) for name in _HEAD}
    return _text(head), _text(ENCODING.write(verdict.program_paths))


def read_verdict(call: Call, head_text: str, program_text: str) -> Verdict:
    """Reads the verdict on a call.

    Raises:
        Exception: the texts are not those of a verdict; of many types, since anything may be wrong.
    """
    content = json.loads(head_text)
    head = {name: ENCODING.read(content[name]) for name in _HEAD}
    if len(head["specs"]) != len(call.match.specs):
        raise EncodingError("a verdict on other arguments")
    return Verdict(
        name=call.name,
        mesh=call.mesh.layout or call.mesh,
        paths=call.match.paths,
        crossing=call.crossing,
        make_paths=lambda: ENCODING.read(json.loads(program_text)),
        **head,
    )


def _text(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
