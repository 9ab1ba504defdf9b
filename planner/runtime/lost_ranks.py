"""Ends all ranks as soon as one of them is gone.

A collective that waits for a killed process may wait until its limit. So each rank keeps a
connection to rank 0, which the system closes whatever ends the process; nothing is sent over it
while training goes on.
"""

import atexit
import contextlib
import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist

from .processes import RankError, RunError

CONNECT_LIMIT_S = 20.0
"""For each connection; without one a lost rank is seen by the limit of collectives alone."""

LOST_CODE = 1
"""Exit code of ranks that were left alone."""

_WELCOME, _GOODBYE = b"+", b"."
_SECRET_BYTES, _RANK_BYTES = 16, 4


@dataclass(slots=True)
class Watch:
    """Connections of this process, looked after by a thread of its own."""

    connections: list[socket.socket] = field(default_factory=list)
    leaving: threading.Event = field(default_factory=threading.Event)

    def leave(self) -> None:
        """Tell the other side that this process leaves in good order."""
        self.leaving.set()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.sendall(_GOODBYE)

    def leave_at_exit(self, process: int) -> None:
        """Leave where this process ends by itself, not a copy of it or by an exception."""
        if os.getpid() == process and getattr(sys, "last_value", None) is None:
            self.leave()

    def hear(self, connection: socket.socket, message: str = "") -> None:
        """End this process, with a message, where the other side was closed without a word."""
        try:
            word = connection.recv(1)
        except OSError:
            word = b""
        if word != _GOODBYE and not self.leaving.is_set():
            sys.stderr.write(message)
            sys.stderr.flush()
            os._exit(LOST_CODE)

    def connect(self, host: str, port: int, secret: bytes) -> None:
        """Connect to rank 0, and hear of it from when it has accepted."""
        try:
            connection = socket.create_connection((host, port), CONNECT_LIMIT_S)
            connection.sendall(secret + dist.get_rank().to_bytes(_RANK_BYTES))
            if connection.recv(1) != _WELCOME:  # else it might leave and not know of this rank
                return
        except OSError:
            return
        connection.settimeout(None)
        self.connections.append(connection)
        threading.Thread(target=self.hear, args=(connection,), daemon=True).start()

    def serve(self, server: socket.socket, secret: bytes) -> None:
        """Accept the ranks that know the secret, and hear of all of them; does not return."""
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj is not server:
                        selector.unregister(key.fileobj)
                        message = f"rank {key.data} is gone, which ends the training\n"
                        self.hear(key.fileobj, message)
                        continue
                    try:
                        connection, _ = server.accept()
                    except OSError:  # too many open files: ranks to come stay unwatched
                        selector.unregister(server)
                        continue
                    rank = _rank_of(connection, secret)
                    if rank is not None:
                        self.connections.append(connection)
                        selector.register(connection, selectors.EVENT_READ, rank)
                        with contextlib.suppress(OSError):
                            connection.sendall(_WELCOME)


@contextlib.contextmanager
def lost_ranks_end_all() -> Iterator[Watch]:
    """Keep the connections of a process group while it lasts.

    A block that ends by an exception leaves them to the end of the process, which all then see,
    unless all ranks have it. One that is still open where the process ends without an
    exception has ended in good order.
    """
    watch = Watch()
    if dist.get_world_size() > 1:
        server = socket.create_server(("", 0)) if dist.get_rank() == 0 else None
        port = server.getsockname()[1] if server else 0
        place = [(os.environ["MASTER_ADDR"], port, secrets.token_bytes(_SECRET_BYTES))]
        dist.broadcast_object_list(place)
        if server is None:
            watch.connect(*place[0])
        else:
            arguments = (server, place[0][-1])
            threading.Thread(target=watch.serve, args=arguments, daemon=True).start()
    atexit.register(watch.leave_at_exit, os.getpid())
    try:
        yield watch
    except RunError as error:
        if not isinstance(error, RankError):  # all ranks have it
            watch.leave()
        raise
    watch.leave()
    atexit.unregister(watch.leave_at_exit)


def _rank_of(connection: socket.socket, secret: bytes) -> int | None:
    """Read who connects: None where it is no rank of this training."""
    connection.settimeout(CONNECT_LIMIT_S)
    try:
        said = connection.recv(len(secret) + _RANK_BYTES, socket.MSG_WAITALL)
    except OSError:
        said = b""
    connection.settimeout(None)
    if said[: len(secret)] == secret:
        return int.from_bytes(said[len(secret) :])
    connection.close()
    return None
