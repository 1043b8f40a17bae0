"""Two gloo ranks with a link between them: two network namespaces, or loopback.

Nothing outside the two namespaces is touched, and they are removed at the end.
"""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).parent.parent
ADDRESSES = ("10.231.77.1", "10.231.77.2")
CONNECT_TIMEOUT = 60.0


class CannotRunError(Exception):
    """This machine cannot make the two namespaces."""


@dataclass(frozen=True)
class Link:
    """Connection of the two ranks: a prefix for each command, and how they find each other."""

    prefixes: tuple[tuple[str, ...], tuple[str, ...]]
    host: str
    interface: str


LOOPBACK = Link(((), ()), "127.0.0.1", "lo")


def sh(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotRunError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


@contextmanager
def two_namespaces(rate: str, burst: str) -> Iterator[Link]:
    """Two network namespaces joined by a veth pair limited by tbf; removed at the end."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise CannotRunError(f"`{tool}` is not installed (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise CannotRunError("not root (try `unshare -Urn` around it)")
    token = uuid.uuid4().hex[:6]
    names = (f"overlap-{token}-0", f"overlap-{token}-1")
    with ExitStack() as cleanup:
        for name in names:
            sh("ip", "netns", "add", name)
            cleanup.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        # Created inside the first namespace, so that the host never sees either end.
        peer = ("peer", "name", "veth", "netns", names[1])
        sh("ip", "-n", names[0], "link", "add", "veth", "type", "veth", *peer)
        for name, address in zip(names, ADDRESSES, strict=True):
            sh("ip", "-n", name, "addr", "add", f"{address}/30", "dev", "veth")
            for link in ("lo", "veth"):
                sh("ip", "-n", name, "link", "set", link, "up")
            limit = ("rate", rate, "burst", burst, "latency", "100ms")
            sh("tc", "-n", name, "qdisc", "add", "dev", "veth", "root", "tbf", *limit)
        enter = tuple(("ip", "netns", "exec", name) for name in names)
        yield Link((enter[0], enter[1]), ADDRESSES[0], "veth")


def run_ranks(
    link: Link, module: str, options: Mapping[str, Any], seconds: float, port: int = 29511
) -> Any:
    """Runs a module as two ranks, which `quiet.joined` joins; returns the JSON that 0 printed."""
    program = (sys.executable, "-W", "ignore", "-m", module)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": link.interface, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*prefix, *program, str(rank), f"{link.host}:{port}", json.dumps(options)],
            cwd=REPO,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, prefix in enumerate(link.prefixes)
    ]
    try:
        told, _ = (rank.communicate(timeout=seconds + CONNECT_TIMEOUT)[0] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    if not told:  # What rank 0 has told is good, however the processes end.
        raise SystemExit("a rank failed; its error is above")
    return json.loads(told)
