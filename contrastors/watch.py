"""Tells where a rank is once nothing happens: a hang would be silent until a collective gives up, in an hour."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

SILENCE_S = 600.0
_OWN = os.path.dirname(os.path.abspath(__file__))
_PLACES = (_OWN, os.path.dirname(_OWN))


class Watch:
    """A thread that prints a sentence on stderr when the main thread has not come on for long, and again after as long.

    It judges nothing: slow storage is told of too. Of a hang every rank tells, and the one that is in no collective is
    the one to look at.

    Args:
        rank: Of this process.
        silence_s: Seconds without a sign of life; None = SILENCE_S.
    """

    def __init__(self, rank: int, silence_s: float | None = None):
        self._rank, self._silence_s = rank, SILENCE_S if silence_s is None else silence_s
        self._ended = threading.Event()
        self.sign("start")
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def sign(self, doing: str) -> None:
        """Notes that the main thread is alive, and what it does now."""
        self._now = doing, time.monotonic()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        seen, num_told = self._now, 0
        while not self._ended.wait(self._silence_s / 20):
            if self._now is not seen:
                seen, num_told = self._now, 0
            doing, since = seen
            silent_s = time.monotonic() - since
            if silent_s >= self._silence_s * (num_told + 1):
                num_told += 1
                # In one call: lines of several ranks share a terminal.
                sys.stderr.write(
                    f"rank {self._rank} ({socket.gethostname()}, process {os.getpid()}): {doing} has taken "
                    f"{silent_s / 60:.1f} minutes so far; it is in {find_place(threading.main_thread().ident)}\n"
                )
                sys.stderr.flush()


def find_place(thread: int) -> str:
    """Returns the innermost line of this project that a thread is in, or its innermost line where there is none."""
    innermost = frame = sys._current_frames()[thread]
    # By names alone: a look at the file system could hang like what is to be told of.
    while frame is not None and os.path.dirname(os.path.abspath(frame.f_code.co_filename)) not in _PLACES:
        frame = frame.f_back
    frame = frame or innermost
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
