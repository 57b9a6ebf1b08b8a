"""Ends a server by the first signal, whatever follows: requests under way are answered, workers closed."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Generator
from types import FrameType

import uvicorn


class Server(uvicorn.Server):
    """A server that the first SIGINT or SIGTERM ends; a second one neither breaks off the end, which has its
    own limit of time, nor kills the program behind it."""

    ended_by: int | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture signals as uvicorn does, but leave that of SIGINT where a signal was heard: another may
        come at any time."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
        for each, handler in before.items():
            if handler is not signal.SIG_IGN:  # as in the background of a shell
                signal.signal(each, self.handle_exit)
        try:
            yield
        finally:
            for each, handler in before.items():
                if self.ended_by is None or each == signal.SIGTERM:
                    signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal alone counts."""
        self.ended_by = self.ended_by or sig
        self.should_exit = True


def run(config: uvicorn.Config, listener: socket.socket) -> None:
    """Serve until a signal, which then ends the program as Ctrl-C does, and others are ignored: Python takes
    its own handlers away before its last steps."""
    server = Server(config)
    server.run(sockets=[listener])
    if server.ended_by is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if server.ended_by == signal.SIGTERM:
            signal.raise_signal(signal.SIGTERM)
        raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
