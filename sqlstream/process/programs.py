"""Runs other programs: what they print is read, and all that they started ends with this process, whatever that dies of."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

_PIECE_BYTES = 1 << 20
"""Bytes of one read; as many as a pipe of Linux holds at most without privileges."""
_NOTED_BYTES = 2000
"""Of what a program says on its standard error: the end of it."""
_LOOK_SECONDS = 0.5
"""Interval in which the reader is asked whether it still wants the output. Arbitrary."""
_GUARD = "read -r _; kill -s KILL 0"


class Program:
    """A program that runs, with what it starts, as one process group.

    The first process of the group is a guard, a shell that waits for the end of a pipe of which only this process has the other
    end, and then kills the group. So the group ends with this process, and its number is not given to another one meanwhile.
    Rejected: PR_SET_PDEATHSIG, which reaches a shell and none of the programs that it started.

    Args:
        words: The program and its arguments.

    Raises:
        OSError: There is no such program, or there are no more processes or descriptors.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.said = b""
        """The end of its standard error."""
        waits, self._alive = os.pipe()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD],
                stdin=waits,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
        except BaseException:
            os.close(self._alive)
            raise
        finally:
            os.close(waits)
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                process_group=self._guard.pid,
            )
        except BaseException:
            self.end()
            raise

    def output(self, silent_seconds: float, total_seconds: float) -> Iterator[bytes]:
        """Yield what it prints, as it comes; empty bytes from time to time where nothing does. At the end it has ended.

        Args:
            silent_seconds: Longest time without output, and from its end to that of the program.
            total_seconds: Longest time that this waits for it altogether.

        Raises:
            TimeoutError: It took longer.
        """
        process = self._process
        assert process is not None
        assert process.stdout is not None
        assert process.stderr is not None
        output, errors = process.stdout.fileno(), process.stderr.fileno()
        with contextlib.suppress(OSError):  # the user has no more room for pipes
            fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, _PIECE_BYTES)
        poll = select.poll()
        for descriptor in (output, errors):
            poll.register(descriptor, select.POLLIN)
        are_open, silence, waited = {output, errors}, 0.0, 0.0
        while output in are_open or process.poll() is None:
            began = time.monotonic()
            ready = {descriptor for descriptor, _ in poll.poll(1000 * _LOOK_SECONDS)} if are_open else set()
            if not are_open:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_SECONDS)
            seconds = time.monotonic() - began
            silence, waited = silence + seconds, waited + seconds
            for descriptor in ready:
                data = os.read(descriptor, _PIECE_BYTES)
                if not data:
                    poll.unregister(descriptor)
                    are_open.remove(descriptor)
                elif descriptor == errors:
                    self.said = (self.said + data)[-_NOTED_BYTES:]
                else:
                    silence = 0.0
                    yield data
            if silence >= silent_seconds:
                raise TimeoutError(f"printed nothing for {silence:.1f} s")
            if waited >= total_seconds:
                raise TimeoutError(f"took longer than {waited:.1f} s")
            yield b""
        self._read_rest(errors, is_open=errors in are_open)

    def _read_rest(self, errors: int, *, is_open: bool) -> None:
        """Note what the program has said last; what it started may still have its standard error open."""
        os.set_blocking(errors, False)
        while is_open:
            try:
                data = os.read(errors, _PIECE_BYTES)
            except BlockingIOError:
                break
            self.said, is_open = (self.said + data)[-_NOTED_BYTES:], bool(data)

    @property
    def failure(self) -> str:
        """What was wrong with a program that has ended, empty if nothing was."""
        assert self._process is not None
        status = self._process.returncode
        assert status is not None
        if status < 0:
            return f"was killed by {_signal_name(-status)}"
        return f"ended with status {status}" if status else ""

    def end(self) -> None:
        """Kill what is left of the group, and reap it; safe to call twice."""
        if self._alive < 0:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the guard is not reaped yet: the group is ours
            os.killpg(self._guard.pid, signal.SIGKILL)
        if self._process is not None:
            for pipe in (self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
            self._process.wait()
        self._guard.wait()
        os.close(self._alive)
        self._alive = -1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"
