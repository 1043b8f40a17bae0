"""Hosts as network namespaces on one machine: each has interfaces and addresses of its own.

Processes in two namespaces reach each other only over a bridge, so a host's cable can be pulled and
its link slowed. Needs root and iproute2; `reason` says what is missing.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

_MADE = count()
Process = subprocess.Popen[bytes]


def reason() -> str:
    """Says why hosts cannot be made here; empty where they can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs iproute2"
    if os.geteuid() != 0:
        return "needs root"
    made = _tried("ip netns add shardmap-probe")
    _tried("ip netns del shardmap-probe")
    return "" if made else "no network namespaces here"


class Hosts:
    """`number` hosts at 10.77.0.1, 10.77.0.2, ... and the processes on them."""

    def __init__(self, number: int) -> None:
        self.number = number
        # The kernel takes its time to remove interfaces: names are never used again.
        self._mark = f"{os.getpid() % 10000}-{next(_MADE)}"
        self._bridge = f"sb{self._mark}"
        self._processes: list[list[Process]] = [[] for _ in range(number)]
        _do(f"ip link add {self._bridge} type bridge")
        _do(f"ip link set {self._bridge} up")
        for host in range(number):
            self._add(host)

    def _add(self, host: int) -> None:
        name, cable = self._name(host), self._cable(host)
        _do(f"ip netns add {name}")
        _do(f"ip link add {cable} type veth peer name eth0 netns {name}")
        _do(f"ip link set {cable} master {self._bridge} up")
        _do(f"ip -n {name} addr add {self.address(host)}/24 dev eth0")
        _do(f"ip -n {name} link set eth0 up")
        _do(f"ip -n {name} link set lo up")

    def _name(self, host: int) -> str:
        return f"shardmap-{self._mark}-{host}"

    def _cable(self, host: int) -> str:
        return f"sv{self._mark}-{host}"

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"10.77.0.{host + 1}"

    def start(
        self, host: int, command: Sequence[str], output: Path, env: Mapping[str, str]
    ) -> Process:
        """Starts a process on a host, with what it writes appended to `output`."""
        settings = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **env}
        with output.open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._name(host), *command],
                cwd=output.parent,
                env=settings,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._processes[host].append(process)
        return process

    def unplug(self, host: int) -> None:
        """Pulls the cable: nothing arrives any more, and nothing says so."""
        _do(f"ip link set {self._cable(host)} down")

    def slow(self, host: int, rate: str) -> None:
        """Limits what a host sends and receives, as `10mbit`."""
        limit = f"root tbf rate {rate} burst 32kbit latency 400ms"
        _do(f"tc qdisc replace dev {self._cable(host)} {limit}")
        _do(f"ip netns exec {self._name(host)} tc qdisc replace dev eth0 {limit}")

    def pids(self, host: int) -> list[int]:
        """All processes on a host, those that nobody waits for included."""
        found = subprocess.run(
            ["ip", "netns", "pids", self._name(host)], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in found.stdout.split()]

    def kill(self, host: int) -> None:
        """Ends every process on a host, as when it loses its power."""
        for pid in self.pids(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends all, and removes the hosts."""
        for host in range(self.number):
            self.kill(host)
            for process in self._processes[host]:
                process.wait()
            _tried(f"ip netns del {self._name(host)}")
        _tried(f"ip link del {self._bridge}")


def _do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def _tried(command: str) -> bool:
    return subprocess.run(command.split(), capture_output=True, check=False).returncode == 0
