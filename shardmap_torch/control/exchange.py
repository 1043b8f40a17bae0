"""Exchange: all ranks learn whether their numbers are equal, from a few messages each.

Over sockets of its own, on the caller's thread: Unix sockets within a host, which take half the
processor time of TCP. An all-reduce on gloo takes fifteen times as much for 32 bytes: it announces
each message, and hands it from thread to thread.

Source: the n-way dissemination of Hoefler, Mehlan, Mietke and Rehm 2006 ("Fast barrier
synchronization for InfiniBand"), after Hensgen, Finkel and Manber 1988. In round k rank r sends
what it knows to the ranks r + j * 4**k, and hears from the ranks r - j * 4**k, for j = 1, 2, 3;
after the last round it knows the smallest and the largest number of all ranks.
"""

import errno
import json
import os
import secrets
import selectors
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
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

_RANK: Final = 4
"""Bytes of the number of a rank, which follows."""

_HELLO: Final = 5.0
"""Seconds in which a connection must show it; the ranks send it with the connection."""

_SIOCGIFADDR: Final = 0x8915
"""Linux' request for the IPv4 address of an interface (netdevice(7))."""


WAYS: Final = 4
"""Of the dissemination. Up to four ranks need one round, which they need not wait for at once."""


def _rounds(size: int) -> list[list[int]]:
    """Returns the distances of the ranks that hear of one another in each round."""
    rounds, step = [], 1
    while step < size:
        rounds.append([way * step for way in range(1, WAYS) if way * step < size])
        step *= WAYS
    return rounds


class Exchange:
    """The connections of one rank: one to each rank that it sends to, one from each it hears.

    Attributes:
        targets: the connections that are sent to in each round.
        sources: those that are heard.
        rank_of: the rank at the other end of a connection.
        patience: the seconds after which a wait for a message ends.
    """

    def __init__(self, store: Any, key: str, rank: int, size: int, timeout: timedelta) -> None:
        """Connects the ranks, so each of them must make one, with the same `key`, new for each.

        Raises:
            RuntimeError: a rank did not come in time.
        """
        self.targets: list[list[socket.socket]] = []
        self.sources: list[list[socket.socket]] = []
        self.rank_of: dict[socket.socket, int] = {}
        self.patience = 0.0
        try:
            self._connect(store, key, rank, size, timeout)
        except OSError as error:
            self.close()
            raise RuntimeError(f"connecting the ranks: {error}") from error
        except BaseException:
            self.close()
            raise

    def _connect(self, store: Any, key: str, rank: int, size: int, timeout: timedelta) -> None:
        end, rounds = monotonic() + timeout.total_seconds(), _rounds(size)
        hops = [hop for each in rounds for hop in each]
        token, host = secrets.token_bytes(_TOKEN), _host()
        with ExitStack() as open_here:
            listeners = [open_here.enter_context(each) for each in _listeners(host, len(hops))]
            to_hosts, *names = [each.getsockname() for each in listeners]
            own = [host, to_hosts[:2], *[name.decode("ascii") for name in names]]
            store.set(f"{key}/{rank}", json.dumps([token.hex(), *own]))
            store.wait([f"{key}/{(rank + hop) % size}" for hop in hops], timeout)
            for each in rounds:
                links: list[socket.socket] = []
                self.targets.append(links)
                for hop in each:
                    target = (rank + hop) % size
                    secret, other, *at = json.loads(store.get(f"{key}/{target}"))
                    link = _connection(at if other == host else at[:1], _until(end))
                    links.append(link)
                    self.rank_of[link] = target
                    link.sendall(bytes.fromhex(secret) + rank.to_bytes(_RANK, "little"))
            found = _accepted(listeners, token, {(rank - hop) % size for hop in hops}, end)
        self.sources = [[found[(rank - hop) % size] for hop in each] for each in rounds]
        self.rank_of.update({link: source for source, link in found.items()})
        for link in self.rank_of:
            link.settimeout(None)
            if link.family in (socket.AF_INET, socket.AF_INET6):
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for links in self.targets:
            for link in links:
                link.setblocking(False)  # a rank is at most one comparison ahead: there is space
        with suppress(RuntimeError, NotImplementedError):  # every rank that needs it has read it
            store.delete_key(f"{key}/{rank}")

    def set_patience(self, seconds: float) -> None:
        """Lets the system end waits: a timeout of Python's sockets asks it twice for a message."""
        self.patience = seconds
        whole, rest = divmod(int(seconds * 1e6), 1_000_000)
        wait = struct.pack("@ll", whole, max(1, rest) if not whole else rest)
        for links in self.sources:
            for link in links:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)

    def close(self) -> None:
        """Closes the connections; the other ranks notice."""
        for link in self.rank_of:
            link.close()
        self.targets, self.sources = [], []
        self.rank_of.clear()


class Comparison:
    """A comparison that is under way; its first messages travel while the caller goes on.

    Attributes:
        differs: after `wait`, whether a rank has other values, or has some that others lack.
    """

    def __init__(
        self,
        exchange: Exchange,
        number: int,
        low: Sequence[int],
        high: Sequence[int],
        timeout: timedelta,
    ) -> None:
        """Begins comparison `number` of values, twice the same, with as many of the other ranks.

        A rank that has no part in the comparison of a value gives `NONE` for it. `wait` raises the
        error of a connection that is closed.
        """
        self._exchange, self._timeout = exchange, timeout
        self._form = form = _message(len(low))
        self._message = form.pack(number, *low, *high)
        self._turn, self._end, self._got = 0, 0.0, b""
        self._is_completed = self.differs = False
        self._error: RuntimeError | None = None
        try:
            self._send()
        except RuntimeError as error:
            self._error, self._is_completed = error, True

    def _send(self) -> None:
        """Sends what this rank knows in this round."""
        exchange, message = self._exchange, self._message
        self._silent = exchange.sources[self._turn].copy()
        for link in exchange.targets[self._turn]:
            try:
                link.send(message)
            except OSError as error:
                if _is_of_handler(error):
                    raise
                raise _lost("sending to", exchange.rank_of[link], error) from error

    def wait(self, patience: timedelta) -> None:
        """Waits for the other ranks; where it has only lost its patience it may be called again.

        Raises:
            RuntimeError: they did not come for so long, or, if `is_completed`, one is gone or did
                not come within the timeout.
        """
        if self._error is not None:
            raise self._error
        exchange, seconds = self._exchange, patience.total_seconds()
        if self._end:
            seconds = min(seconds, _until(self._end))
        if seconds != exchange.patience:
            exchange.set_patience(seconds)
        try:
            while self._silent:
                got = self._silent[-1].recv(self._form.size - len(self._got))
                if got == self._message or self._is_added(got):
                    self._silent.pop()
                if not self._silent and self._turn + 1 < len(exchange.sources):
                    self._turn += 1
                    self._send()
        except OSError as error:
            if _is_of_handler(error):
                raise
            self._stop(error, seconds)
        except RuntimeError as error:
            self._fail(error)
        self._is_completed = True

    def _is_added(self, part: bytes) -> bool:
        """Adds what another rank knows; returns whether that is all of its message."""
        got, source = self._got + part, self._exchange.rank_of[self._silent[-1]]
        if not part:
            raise _lost("receiving from", source, ConnectionResetError())
        is_whole = len(got) == self._form.size
        self._got = b"" if is_whole else got
        if not is_whole or got == self._message:
            return is_whole
        self.differs = True
        number, *mine = self._form.unpack(self._message)
        other, *theirs = self._form.unpack(got)
        if other != number:
            raise RuntimeError(f"rank {source} is at comparison {other}, and this rank at {number}")
        half = len(mine) // 2
        low, high = map(min, mine[:half], theirs[:half]), map(max, mine[half:], theirs[half:])
        self._message = self._form.pack(number, *low, *high)
        return True

    def _stop(self, error: OSError, seconds: float) -> NoReturn:
        """Raises the error of a connection on which nothing came for so long, or that is broken."""
        if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK):
            source = self._exchange.rank_of[self._silent[-1]]
            self._fail(_lost("receiving from", source, error))
        now, late = monotonic(), RuntimeError(f"not all ranks have come within {self._timeout}")
        self._end = self._end or now - seconds + self._timeout.total_seconds()
        if now >= self._end:
            self._fail(late)
        raise late

    def _fail(self, error: RuntimeError) -> NoReturn:
        self._error, self._is_completed = error, True
        raise error

    def is_completed(self) -> bool:
        """Returns whether it has ended, or failed."""
        return self._is_completed

    def are_equal(self) -> list[bool]:
        """Returns, after `wait`, whether each value is the same on all ranks that have it."""
        _, *found = self._form.unpack(self._message)
        half = len(found) // 2
        # Where no rank has it, the smallest is still the highest number.
        return [low >= high for low, high in zip(found[:half], found[half:], strict=True)]


def _is_of_handler(error: OSError) -> bool:
    """Returns whether a signal handler of the user's has raised it, and not a socket's method."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is not None


def _lost(doing: str, rank: int, error: OSError) -> RuntimeError:
    """Returns the error of a connection; which call meets its end first is chance, and not told."""
    is_closed = isinstance(error, BrokenPipeError | ConnectionResetError)
    gone = f"rank {rank} has closed its connection"
    return RuntimeError(gone if is_closed else f"{doing} rank {rank}: {error}")


def _until(end: float) -> float:
    return max(0.001, end - monotonic())


def _accepted(
    listeners: Sequence[socket.socket], token: bytes, ranks: set[int], end: float
) -> dict[int, socket.socket]:
    """Accepts a connection from each of some ranks, which shows the token."""
    links: dict[int, socket.socket] = {}
    try:
        while len(links) < len(ranks):
            link = _next(listeners, end)
            hello = _hello(link, min(_HELLO, _until(end)))
            rank = int.from_bytes(hello[_TOKEN:], "little")
            if secrets.compare_digest(hello[:_TOKEN], token) and rank in ranks:
                links[rank] = link
            else:
                link.close()
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return links


def _next(listeners: Sequence[socket.socket], end: float) -> socket.socket:
    with selectors.DefaultSelector() as selector:
        for each in listeners:
            selector.register(each, selectors.EVENT_READ)
        for key, _ in selector.select(_until(end)):
            listener: Any = key.fileobj
            link: socket.socket = listener.accept()[0]
            return link
    raise TimeoutError("timed out")


def _hello(link: socket.socket, seconds: float) -> bytes:
    """Reads what a connection starts with; shorter if it does not come."""
    link.settimeout(seconds)
    hello = b""
    with suppress(OSError):
        while got := link.recv(_TOKEN + _RANK - len(hello)):
            hello += got
    return hello


def _host() -> str:
    """Names what processes have in common that reach one another by Unix sockets; "" if unknown."""
    with suppress(OSError):  # Linux alone has such sockets without a file
        network = os.stat("/proc/self/ns/net")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {network.st_ino}"
    return ""


def _listeners(host: str, number: int) -> Iterator[socket.socket]:
    """Listens to other hosts, and within this one at a name that the system chooses."""
    backlog = max(8, number)
    yield _to_hosts(backlog)
    if host:
        with suppress(OSError):
            within = socket.socket(socket.AF_UNIX)
            within.bind("")
            within.listen(backlog)
            yield within


def _connection(addresses: Sequence[Any], seconds: float) -> socket.socket:
    """Connects to a listener by its name within the host, if it has one, or else by a network."""
    to_hosts, *names = addresses
    for name in names:
        with suppress(OSError):  # as a rule of the host's may forbid it
            return _within(name, seconds)
    host, port = to_hosts
    return socket.create_connection((host, port), seconds)


def _within(name: str, seconds: float) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    try:
        link.settimeout(seconds)
        link.connect(name.encode("ascii"))
    except OSError:
        link.close()
        raise
    return link


def _to_hosts(backlog: int) -> socket.socket:
    """Listens on the address at which gloo listens, as far as that can be known."""
    for address in _addresses():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError):
            return socket.create_server((address, 0), family=family, backlog=backlog)
    return socket.create_server(("127.0.0.1", 0), backlog=backlog)


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
