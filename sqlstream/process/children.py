"""Starts Python processes of our own, which speak with their owner over a socket pair."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from sqlstream.process import locks


def start_child(module: str, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `python -m module DESCRIPTOR PARENT_PID`; return the process and our end of the socket pair.

    Forked children close our end, which is a recorded descriptor. A process group of its own keeps Ctrl-C and other signals to
    the terminal's group away from the child.

    Args:
        module: Its `main` takes the descriptor and the parent's process id from the command line.
        environment: All of its environment variables (`config.child_environment`).

    Raises:
        OSError: No more processes or descriptors.
    """
    with locks.uninterrupted(), locks.fork_guard():
        ours, theirs = socket.socketpair()
        locks.adopt_descriptor(ours.fileno())
        locks.adopt_descriptor(theirs.fileno())
        try:
            process = subprocess.Popen(
                # -P: neither the script's nor the working directory may shadow a module
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # standard error stays: a crash of the interpreter is written there
                env=environment,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        except OSError:
            locks.close_descriptor(ours.detach())
            raise
        finally:
            locks.close_descriptor(theirs.detach())
    return process, ours


def forget_child(process: subprocess.Popen[bytes]) -> None:
    """Drop, in a forked child, a process of the parent: else Popen warns, and waits for a process that is no child of ours."""
    process.returncode = 0
