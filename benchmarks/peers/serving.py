"""A process that times functions by name, and the end of it that asks.

Each line that goes to it is a request in JSON: the names of a case and of a contestant, and how
often to call it. Each line back is the answer: wall and processor seconds of a call; for no calls,
one number that the results add up to.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

Call = Callable[[], Any]


@dataclass(frozen=True)
class Contestant:
    """One way to do a case.

    Attributes:
        call: what is timed.
        total: adds up what `call` returns, so that contestants can be compared.
    """

    call: Call
    total: Callable[[Any], float]


def serve(
    version: str,
    cases: Mapping[tuple[str, str], Contestant],
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Answers until the input ends; all calls are made in `context`."""
    say, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    print(json.dumps([version, list(cases)]), file=say, flush=True)
    for line in sys.stdin:
        case, name, number = json.loads(line)
        contestant = cases[case, name]
        with context():
            answer = _time(contestant.call, number) if number else _total(contestant)
        print(json.dumps(answer), file=say, flush=True)


def _total(contestant: Contestant) -> float:
    return contestant.total(contestant.call())


def _time(call: Call, number: int) -> tuple[float, float]:
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(number):
        call()
    return (time.perf_counter() - wall) / number, (time.process_time() - processor) / number


class Peer:
    """A process that serves a module of this package.

    Attributes:
        version: of its library.
        cases: the pairs of a case and a contestant that it knows.
    """

    def __init__(self, python: str, module: str) -> None:
        """Starts the process."""
        command = [python, "-W", "ignore", "-m", f"benchmarks.peers.{module}"]
        pipe = subprocess.PIPE
        self._module = module
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.version, pairs = self._answer()
        self.cases: list[tuple[str, str]] = [tuple(pair) for pair in pairs]

    def time(self, case: str, name: str, number: int) -> tuple[float, float]:
        """Returns wall and processor seconds of one of `number` calls."""
        wall, processor = self._ask(case, name, number)
        return wall, processor

    def total(self, case: str, name: str) -> float:
        """Returns what the results of one call add up to."""
        return float(self._ask(case, name, 0))

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, *request: object) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._module} has ended; see above")
        return json.loads(line)
