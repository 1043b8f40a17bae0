"""Exchange: all ranks learn whether their numbers are equal, from log2(size) messages each.

Over sockets of its own, on the caller's thread. An all-reduce on gloo takes fifteen times as much
processor time for 32 bytes: it announces each message, and hands it from thread to thread.

Source: the dissemination barrier of Hensgen, Finkel and Manber 1988. In round k rank r sends what
it knows to rank r + 2**k, and hears from rank r - 2**k; after the last round it knows the smallest
and the largest number of all ranks.
"""

import errno
import json
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import takewhile
from time import monotonic
from typing import Any, Final, NoReturn

NONE: Final = ((1 << 63) - 1, -(1 << 63))
"""The smallest and largest value of a rank that has none."""


@cache
def _message(size: int) -> struct.Struct:
    """A number of the comparison, the smallest of each value, and the largest of each."""
    return struct.Struct(f"<{1 + 2 * size}q")


_TOKEN: Final = 16
"""Bytes of a secret that a connection starts with, which the store tells the other ranks."""

_HELLO: Final = 5.0
"""Seconds in which a connection must show it; the ranks send it with the connection."""

_SIOCGIFADDR: Final = 0x8915
"""Linux' request for the IPv4 address of an interface (netdevice(7))."""


class Exchange:
    """The connections of one rank: one to each rank that it sends to, one from each it hears.

    Attributes:
        sources: the rank that is heard in each round.
    """

    def __init__(self, store: Any, key: str, rank: int, size: int, timeout: timedelta) -> None:
        """Connects the ranks, so each of them must make one, with the same `key`, new for each.

        Raises:
            RuntimeError: a rank did not come in time.
        """
        steps = [1 << k for k in takewhile(lambda k: 1 << k < size, range(size))]
        self._targets = [(rank + step) % size for step in steps]
        self.sources = [(rank - step) % size for step in steps]
        self._out: list[socket.socket] = []
        self._in: list[socket.socket] = []
        self._patience = [0.0] * len(steps)
        try:
            self._connect(store, key, rank, timeout)
        except OSError as error:
            self.close()
            raise RuntimeError(f"connecting the ranks: {error}") from error
        except BaseException:
            self.close()
            raise

    def _connect(self, store: Any, key: str, rank: int, timeout: timedelta) -> None:
        end = monotonic() + timeout.total_seconds()
        with _listener(len(self.sources)) as listener:
            token = secrets.token_bytes(_TOKEN)
            host, port = listener.getsockname()[:2]
            store.set(f"{key}/{rank}", json.dumps([host, port, token.hex()]))
            store.wait([f"{key}/{target}" for target in self._targets], timeout)
            for number, target in enumerate(self._targets):
                host, port, secret = json.loads(store.get(f"{key}/{target}"))
                link = socket.create_connection((host, port), _until(end))
                self._out.append(link)
                link.sendall(bytes.fromhex(secret) + bytes([number]))
            self._in = _accepted(listener, token, len(self.sources), end)
        for link in (*self._out, *self._in):
            link.settimeout(None)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for link in self._out:
            link.setblocking(False)  # a rank is at most one comparison ahead: buffers have space
        with suppress(RuntimeError, NotImplementedError):  # every rank that needs it has read it
            store.delete_key(f"{key}/{rank}")

    def begin(
        self, number: int, low: Sequence[int], high: Sequence[int], timeout: timedelta
    ) -> "Comparison":
        """Begins comparison `number` of values, twice the same, with as many of the other ranks.

        A rank that has no part in the comparison of a value gives `NONE` for it.

        Raises:
            RuntimeError: a connection is closed.
        """
        form = _message(len(low))
        return Comparison(self, form, form.pack(number, *low, *high), timeout)

    def send(self, turn: int, message: bytes) -> None:
        """Sends a message of a round."""
        try:
            self._out[turn].send(message)
        except OSError as error:
            raise RuntimeError(f"sending to rank {self._targets[turn]}: {error}") from error

    def receive(self, turn: int, so_far: bytes, size: int, seconds: float) -> bytes | None:
        """Receives a message of a round, of so many bytes, of which `so_far` has come.

        Returns:
            The message, or a part of it; None where nothing came in time.

        Raises:
            RuntimeError: the connection is closed.
        """
        try:
            self._set_patience(turn, seconds)
            got = self._in[turn].recv(size - len(so_far))
        except OSError as error:
            if error.errno is None:  # that of a signal handler
                raise
            if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
                return None
            raise RuntimeError(f"receiving from rank {self.sources[turn]}: {error}") from error
        if not got:
            raise RuntimeError(f"rank {self.sources[turn]} has closed its connection")
        return so_far + got

    def _set_patience(self, turn: int, seconds: float) -> None:
        """Lets the system end a wait: the timeout of Python's sockets asks it twice for a message.

        Its error also looks like one of a signal handler.
        """
        if self._patience[turn] != seconds:
            self._patience[turn] = seconds
            whole, rest = divmod(int(seconds * 1e6), 1_000_000)
            wait = struct.pack("@ll", whole, max(1, rest) if not whole else rest)
            self._in[turn].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)

    def close(self) -> None:
        """Closes the connections; the other ranks notice."""
        for link in (*self._out, *self._in):
            link.close()
        self._out, self._in = [], []


class Comparison:
    """A comparison that is under way; its first messages travel while the caller goes on."""

    def __init__(
        self, exchange: Exchange, form: struct.Struct, message: bytes, timeout: timedelta
    ) -> None:
        self._exchange, self._form, self._timeout = exchange, form, timeout
        self._message = message
        self._turn, self._got, self._end = 0, b"", 0.0
        self._is_completed = self._differs = False
        self._error: RuntimeError | None = None
        exchange.send(0, message)

    def wait(self, patience: timedelta) -> None:
        """Waits for the other ranks; where it has only lost its patience it may be called again.

        Raises:
            RuntimeError: they did not come for so long, or, if `is_completed`, one is gone or did
                not come within the timeout.
        """
        if self._error is not None:
            raise self._error
        while self._turn < len(self._exchange.sources):
            self._hear(patience.total_seconds())
        self._is_completed = True

    def _hear(self, seconds: float) -> None:
        """Waits for a message of this round for so long, or until the timeout.

        Raises:
            RuntimeError: nothing came, or as `wait`.
        """
        if self._end:
            seconds = min(seconds, _until(self._end))
        try:
            got = self._exchange.receive(self._turn, self._got, self._form.size, seconds)
            if got is not None:
                self._got = got
                if len(got) == self._form.size:
                    self._take(got)
                return
        except RuntimeError as error:
            self._fail(error)
        now, late = monotonic(), RuntimeError(f"not all ranks have come within {self._timeout}")
        self._end = self._end or now - seconds + self._timeout.total_seconds()
        if now >= self._end:
            self._fail(late)
        raise late

    def _take(self, got: bytes) -> None:
        """Adds what another rank knows, and goes on to the next round."""
        if got != self._message:
            self._differs = True
            number, *mine = self._form.unpack(self._message)
            other, *theirs = self._form.unpack(got)
            if other != number:
                raise RuntimeError(
                    f"rank {self._exchange.sources[self._turn]} is at comparison {other}, and this "
                    f"rank at {number}"
                )
            half = len(mine) // 2
            low, high = map(min, mine[:half], theirs[:half]), map(max, mine[half:], theirs[half:])
            self._message = self._form.pack(number, *low, *high)
        self._turn, self._got = self._turn + 1, b""
        if self._turn < len(self._exchange.sources):
            self._exchange.send(self._turn, self._message)

    def _fail(self, error: RuntimeError) -> NoReturn:
        self._error, self._is_completed = error, True
        raise error

    def is_completed(self) -> bool:
        """Returns whether it has ended, or failed."""
        return self._is_completed

    @property
    def differs(self) -> bool:
        """Returns, after `wait`, whether a rank has other values, or has some that others lack."""
        return self._differs

    def are_equal(self) -> list[bool]:
        """Returns, after `wait`, whether each value is the same on all ranks that have it."""
        _, *found = self._form.unpack(self._message)
        half = len(found) // 2
        # Where no rank has it, the smallest is still the highest number.
        return [low >= high for low, high in zip(found[:half], found[half:], strict=True)]


def _until(end: float) -> float:
    return max(0.001, end - monotonic())


def _accepted(
    listener: socket.socket, token: bytes, number: int, end: float
) -> list[socket.socket]:
    """Accepts so many connections that show the token, in the order of their rounds."""
    links: dict[int, socket.socket] = {}
    try:
        while len(links) < number:
            listener.settimeout(_until(end))
            link, _ = listener.accept()
            hello = _hello(link, min(_HELLO, _until(end)))
            if secrets.compare_digest(hello[:_TOKEN], token):
                links[hello[_TOKEN]] = link
            else:
                link.close()
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return [links[at] for at in range(number)]


def _hello(link: socket.socket, seconds: float) -> bytes:
    """Reads what a connection starts with; shorter if it does not come."""
    link.settimeout(seconds)
    hello = b""
    with suppress(OSError):
        while len(hello) <= _TOKEN and (got := link.recv(_TOKEN + 1 - len(hello))):
            hello += got
    return hello


def _listener(number: int) -> socket.socket:
    """Listens on the address at which gloo listens, as far as that can be known."""
    for address in _addresses():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError):
            return socket.create_server((address, 0), family=family, backlog=max(8, number))
    return socket.create_server(("127.0.0.1", 0), backlog=max(8, number))


def _addresses() -> Iterator[str]:
    """Yields the address of the interface that GLOO_SOCKET_IFNAME names, and those of the host."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if names:
        yield from _of_interface(names.split(",")[0])
    with suppress(OSError):
        known: Sequence[Any] = socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        )
        yield from [str(address[0]) for *_, address in known]


def _of_interface(name: str) -> Iterator[str]:
    with suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        from fcntl import ioctl  # not on Windows

        request = struct.pack("256s", name.encode()[:15])
        yield socket.inet_ntoa(ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
