"""The peer tcp: a bound, no allreduce. Plain TCP streams in a ring that carry a ring's bytes and add nothing."""

from __future__ import annotations

import os
import secrets
import select
import socket

import numpy as np

import herring
from herring._context import process
from herring._errors import UnavailableError
from herring._rendezvous import published_address
from herring.bench._contender import Case, Plan, Turn, timed

_TIMEOUT_S = 300.0
_TOKEN_BYTES = 16
_ADDRESS_BYTES = 128
_BUFFER_BYTES = 4 << 20
_PIECE_BYTES = 1 << 20


def ring_bytes(nbytes: int, ranks: int) -> int:
    """What a ring sends for each rank's `nbytes`: 2(n-1)/n of them, rounded up."""
    return -(-2 * (ranks - 1) * nbytes // ranks)


class TcpContender:
    """One connection to the next rank and one from the rank before, and nothing but the system's calls between them.

    So long the bytes alone take. What arrives is checked to be what the rank before has sent.
    """

    name = "tcp"
    memory = "private"

    def __init__(self) -> None:
        self._rank, self._ranks = herring.rank(), herring.size()
        if self._ranks < 2:
            raise UnavailableError("--peers tcp needs two workers or more")
        self._outgoing, self._incoming = self._connect()
        self._bytes = 0

    def _connect(self) -> tuple[socket.socket, socket.socket]:
        session = process.current()
        is_local = herring.local_size() == self._ranks
        host = published_address(is_local, session.config.interface, os.environ.get("MASTER_ADDR"))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=16) as listener:
            token = secrets.token_bytes(_TOKEN_BYTES)
            text = np.zeros(_ADDRESS_BYTES, np.uint8)
            encoded = token + f"{host} {listener.getsockname()[1]}".encode()
            text[: len(encoded)] = np.frombuffer(encoded, np.uint8)
            everybody = herring.allgather(text).reshape(self._ranks, _ADDRESS_BYTES)
            following = everybody[(self._rank + 1) % self._ranks].tobytes()
            next_host, next_port = following[_TOKEN_BYTES:].rstrip(b"\0").decode().split()
            outgoing = socket.create_connection((next_host, int(next_port)), timeout=_TIMEOUT_S)
            outgoing.sendall(following[:_TOKEN_BYTES])
            incoming = self._accept(listener, token)
        for connection in (outgoing, incoming):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
        return outgoing, incoming

    @staticmethod
    def _accept(listener: socket.socket, token: bytes) -> socket.socket:
        """The connection that brings the token; others are closed."""
        listener.settimeout(_TIMEOUT_S)
        while True:
            connection, _ = listener.accept()
            connection.settimeout(5.0)
            try:
                if secrets.compare_digest(connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL), token):
                    return connection
            except OSError:
                pass
            connection.close()

    def refusal(self, case: Case) -> str:
        """See Contender."""
        return "" if case.in_place else "tcp moves bytes only: in place or not is the same"

    def prepare(self, case: Case) -> None:
        """See Contender."""
        self._bytes = ring_bytes(case.nbytes, self._ranks)

    def turn(self, plan: Plan) -> Turn:
        """See Contender. Wrong are the bytes of the last piece that are not the sender's."""
        length = min(self._bytes, _BUFFER_BYTES)
        source = np.full(length, self._rank % 251, np.uint8)
        target = np.zeros(length, np.uint8)
        turn = timed(plan, lambda i: None, herring.barrier, lambda: self._exchange(source.data, target.data))
        if plan.iterations > 0:
            turn.wrong = int(np.count_nonzero(target != (self._rank - 1) % self._ranks % 251))
        return turn

    def _exchange(self, source: memoryview, target: memoryview) -> None:
        """Sends and receives the ring's bytes at once, through a buffer that fits a cache."""
        sent = received = 0
        total, length = self._bytes, len(source)
        poll = select.poll()
        both = {self._outgoing.fileno(): select.POLLOUT, self._incoming.fileno(): select.POLLIN}
        for descriptor, events in both.items():
            poll.register(descriptor, events)
        while sent < total or received < total:
            moved = 0
            if sent < total:
                at = sent % length
                piece = min(_PIECE_BYTES, total - sent, length - at)
                try:
                    moved = self._outgoing.send(source[at : at + piece])
                    sent += moved
                except BlockingIOError:
                    pass
                if sent == total:
                    poll.unregister(self._outgoing)
            if received < total:
                at = received % length
                piece = min(_PIECE_BYTES, total - received, length - at)
                try:
                    count = self._incoming.recv_into(target[at : at + piece])
                except BlockingIOError:
                    count = -1
                if count == 0:
                    raise UnavailableError("--peers tcp: the rank before has closed its connection")
                received += max(count, 0)
                moved += max(count, 0)
            if moved == 0 and not poll.poll(_TIMEOUT_S * 1000):
                raise UnavailableError(f"--peers tcp: nothing moved for {_TIMEOUT_S:g} s")

    def release(self) -> None:
        """See Contender."""

    def close(self) -> None:
        """See Contender."""
        self._outgoing.close()
        self._incoming.close()
