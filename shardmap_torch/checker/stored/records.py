"""Verdicts as JSON, and back: a head that runs need, and the program, read when asked for."""

import json
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any, Final

from shardmap_torch.boundary.call import Call, Result
from shardmap_torch.boundary.matching import Match
from shardmap_torch.checker.ir.outcomes import Traits
from shardmap_torch.checker.stored.encoding import EncodingError, Json, decode, encode
from shardmap_torch.checker.stored.programs import read_program, write_program
from shardmap_torch.checker.stored.steps import read_steps, write_steps
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.core.tree import Structure, Tree, flatten, unflatten
from shardmap_torch.errors import ShardTypeError


def write_verdict(verdict: Verdict) -> tuple[str, str]:
    """Writes a verdict as two texts of JSON in ASCII: its head, and its program.

    Raises:
        EncodingError: it has something that only this process has.
    """
    refusal = verdict.refusal
    if verdict.altered:
        raise EncodingError("objects that its body changes")
    if refusal is not None and type(refusal) is not ShardTypeError:
        raise EncodingError(f"a {type(refusal).__name__}")
    head = {
        "specs": encode(verdict.specs),
        "exits": _write_map(verdict.exits),
        "outputs": _write_map(verdict.outputs),
        "result": _write_result(verdict.result),
        "sharing": _write_map(verdict.sharing),
        "start": write_steps(verdict.start),
        "refusal": None if refusal is None else [str(refusal), encode(refusal.findings)],
        "traits": encode(astuple(verdict.traits)),
        "tried": verdict.tried,
    }
    return _dump(head), _dump(write_program(verdict.program_paths))


def read_verdict(call: Call, head_text: str, program_text: str) -> Verdict:
    """Reads the verdict on a call.

    Raises:
        Exception: the texts are not those of a verdict; of many types, since anything may be wrong.
    """
    head = json.loads(head_text)
    specs = decode(head["specs"])
    if len(specs) != len(call.match.specs):
        raise EncodingError("a verdict on other arguments")
    return Verdict(
        call.name,
        call.mesh.layout or call.mesh,
        call.match.paths,
        specs,
        call.crossing,
        _read_map(head["exits"]),
        _read_map(head["outputs"]),
        lambda: read_program(json.loads(program_text)),
        _read_result(head["result"]),
        traits=Traits(*decode(head["traits"])),
        sharing=_read_map(head["sharing"]),
        start=read_steps(head["start"]),
        refusal=_read_refusal(head["refusal"]),
        tried=str(head["tried"]),
    )


def _dump(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _write_map(values: Mapping[int, Any]) -> Json:
    return [[position, encode(value)] for position, value in values.items()]


def _read_map(content: Json) -> dict[int, Any]:
    return {int(position): decode(value) for position, value in content}


def _read_refusal(content: Json) -> ShardTypeError | None:
    if content is None:
        return None
    message, findings = content
    error = ShardTypeError(message)
    error.findings = decode(findings)
    return error


def _write_result(result: Result) -> Json:
    match = result.match
    return {
        "leaves": [encode(leaf) for leaf in result.leaves],
        "match": encode((match.paths, match.specs, match.crossing, match.static)),
        "tree": _write_structure(result.structure, len(result.leaves)),
    }


def _read_result(content: Json) -> Result:
    leaves = [decode(leaf) for leaf in content["leaves"]]
    structure = flatten(_read_tree(content["tree"]))[1]
    return Result(leaves, Match(*decode(content["match"])), structure)


def _write_structure(structure: Structure, count: int) -> Json:
    """Writes a structure of tuples, lists and dicts, with a place for each leaf."""
    tree = unflatten(structure, list(range(count)))
    content = _write_tree(tree)
    if flatten(_read_tree(content))[1] != structure:
        raise EncodingError("a result of a type of its own")
    return content


def _write_tree(tree: Tree) -> Json:
    if type(tree) is dict:
        return {"dict": [[encode(key), _write_tree(value)] for key, value in tree.items()]}
    if type(tree) in (tuple, list):
        return {type(tree).__name__: [_write_tree(value) for value in tree]}
    if tree is None or type(tree) is int:
        return tree
    raise EncodingError(f"a result of type {type(tree).__name__}")


def _read_tree(content: Json) -> Tree:
    if content is None or type(content) is int:
        return content
    [(name, values)] = content.items()
    return _NODES[name](values)


_NODES: Final[Mapping[str, Callable[[Json], Tree]]] = {
    "dict": lambda pairs: {decode(key): _read_tree(value) for key, value in pairs},
    "tuple": lambda values: tuple([_read_tree(value) for value in values]),
    "list": lambda values: [_read_tree(value) for value in values],
}
