"""The socket between a reading process and its helper."""

from __future__ import annotations

from pathlib import Path

from tests.processes import start_script

CROWDED = """
import resource, socket, threading
from sqlstream.storage.protocol.channel import Channel
from tests.other_user import as_other_user
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
ours, theirs = map(Channel, socket.socketpair())
taken = []

def receive():
    for _ in range(3):
        taken.extend(theirs.receive()[0])

receiver = threading.Thread(target=receive, daemon=True)
with as_other_user():  # root may have any number on their way
    for number in range(3):
        if number == 2:
            threading.Timer(0.2, receiver.start).start()
        ours.send([number], [0] * 70)
receiver.join()
print(taken)
"""


def test_a_frame_waits_while_too_many_descriptors_of_a_user_are_on_their_way(tmp_path: Path) -> None:
    script = tmp_path / "crowded.py"
    script.write_text(CROWDED)
    done = start_script(script).finish()
    assert (done.stdout, done.returncode) == ("[0, 1, 2]\n", 0), done.stderr
