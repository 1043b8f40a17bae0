"""Records the verdict of every check that a run of the tests makes, and compares two such records.

A change of the checker that should change no verdict is tried so:

    CORPUS=before.jsonl pytest -p tests.support.corpus ...    # before the change, and after it
    python -m tests.support.corpus before.jsonl after.jsonl

A row is known by its test and its number among the checks of that test; where a test makes other
checks than before, as random ones do, by what it says.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.api import program_of
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.errors import ShardMapError
from shardmap_torch.run import checked

Row = dict[str, Any]
Key = tuple[str, int]

OUTPUT: Final = os.environ.get("CORPUS", "")
COMPARED: Final = ("verdict", "message", "line", "specs", "collectives", "fingerprint")
_SITE: Final = re.compile(r"[\w./<>-]+\.py:(\d+)")


def main(before: str, after: str) -> int:
    """Prints the differences of two records, and their number by kind; 1 if there are some."""
    old, new = read(before), read(after)
    counts: Counter[str] = Counter()
    for key in sorted((old.keys() & new.keys()) - moved(old, new)):
        for name in differing(old[key], new[key]):
            kind = f"{old[key][name]} -> {new[key][name]}" if name == "verdict" else name
            counts[kind] += 1
            print(f"{key[0]} [{key[1]}] {name}:\n  - {old[key][name]}\n  + {new[key][name]}")
    print(f"{len(old)} rows before, {len(new)} after, {len(old.keys() & new.keys())} of both.")
    print(*(f"{count} {kind}" for kind, count in counts.most_common()), sep="\n")
    return int(bool(counts))


def moved(old: Mapping[Key, Row], new: Mapping[Key, Row]) -> set[Key]:
    """Returns the rows of tests that make other checks, which have equal ones on the other side."""
    found: set[Key] = set()
    numbers = [Counter(test for test, _ in rows) for rows in (old, new)]
    for test in {test for test, count in numbers[0].items() if numbers[1][test] != count}:
        left = Counter(_said(row) for key, row in old.items() if key[0] == test)
        for key, row in new.items():
            if key[0] == test and left[_said(row)]:
                left[_said(row)] -= 1
                found.add(key)
    return found


def _said(row: Row) -> str:
    return json.dumps({name: value for name, value in row.items() if name != "number"})


def differing(old: Row, new: Row) -> list[str]:
    """Names the fields in which two rows differ; of another verdict only the verdict."""
    if old["verdict"] != new["verdict"]:
        return ["verdict"]
    return [name for name in COMPARED if old.get(name) != new.get(name)]


def read(path: str) -> Mapping[Key, Row]:
    """Reads the rows of a record."""
    rows: dict[Key, Row] = {}
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        rows[row["test"], row["number"]] = row
    return rows


def accepted(verdict: Verdict) -> Row:
    """Describes a verdict."""
    program = program_of(verdict)
    return {
        "verdict": "tried" if verdict.tried else "accepted",
        "specs": [f"{path}: {spec!r}" for path, spec in program.in_specs],
        "collectives": [f"{each.name} {each.sent}" for each in program.collectives],
        "fingerprint": program.fingerprint,
    }


def refused(error: Exception) -> Row:
    """Describes the error of a program that is refused."""
    lines = str(error).splitlines() or [""]
    site = next((found for found in map(_SITE.search, lines) if found), None)
    first = re.sub(r"/[\w./-]+/", "", lines[0])
    return {
        "verdict": type(error).__name__,
        "message": re.sub(r"0x[0-9a-f]+", "0x", first),
        "line": int(site.group(1)) if site else None,
    }


def _append(row: Row, numbers: Counter[str]) -> None:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    number = numbers[test]
    numbers[test] += 1
    with open(OUTPUT, "a") as file:
        file.write(json.dumps({"test": test, "number": number, **row}) + "\n")


def _record() -> None:
    """Wraps the check of one signature."""
    verify, numbers = checked.verify, Counter[str]()

    def recorded(call: Call, strictness: Any, repairs: bool = True) -> Verdict:
        try:
            verdict = verify(call, strictness, repairs)
        except ShardMapError as error:
            _append({"name": call.name, "strictness": str(strictness), **refused(error)}, numbers)
            raise
        described = {"name": call.name, "strictness": str(strictness), **accepted(verdict)}
        _append(described, numbers)
        return verdict

    checked.verify = recorded


def _arguments(words: Iterable[str]) -> tuple[str, str]:
    before, after = words
    return before, after


if OUTPUT:
    _record()
if __name__ == "__main__":
    sys.exit(main(*_arguments(sys.argv[1:])))
