from __future__ import annotations

import threading

import pytest

from sqlstream.storage.protocol.messages import Alive, FetchDone, ToReader
from sqlstream.storage.worker.outbox import Outbox
from sqlstream.storage.worker.workers import Lane, Workers, WorkPermit
from tests.storage.meter import WAIT_SECONDS, Meter


def test_no_more_jobs_than_the_limit_run_and_all_are_run() -> None:
    meter, workers, lane = Meter(), Workers(), Lane(3)
    workers.submit(lane, [meter.job] * 20)
    meter.wait(lambda: meter.num_running == 3)
    meter.gate.set()
    meter.wait(lambda: meter.num_done == 20)
    assert meter.most == 3
    workers.submit(lane, [meter.job] * 20)  # threads that were parked are used again
    meter.wait(lambda: meter.num_done == 40)
    assert meter.most == 3


def test_jobs_that_wait_aside_do_not_keep_others_from_running() -> None:
    meter, workers, lane = Meter(), Workers(), Lane(2)
    workers.submit(lane, [meter.job] * 6)
    for num_running in (2, 4, 6):
        meter.wait(lambda num_running=num_running: meter.num_running == num_running)  # type: ignore[misc]  # default
        for slot in list(meter.slots):  # each that steps aside lets another begin, which adds its own
            slot.step_aside()
    for slot in meter.slots[:3]:
        slot.come_back()
    meter.gate.set()
    meter.wait(lambda: meter.num_done == 6)
    meter.gate.clear()
    meter.most = 0
    workers.submit(lane, [meter.job] * 6)
    meter.wait(lambda: meter.num_running == 2)
    meter.gate.set()
    meter.wait(lambda: meter.num_done == 12)
    assert meter.most == 2  # the count is right again


def test_the_limit_may_change_while_jobs_run() -> None:
    meter, workers, lane = Meter(), Workers(), Lane(1)
    workers.submit(lane, [meter.job] * 8)
    meter.wait(lambda: meter.num_running == 1)
    workers.resize(lane, 4)
    meter.wait(lambda: meter.num_running == 4)
    workers.resize(lane, 2)
    meter.gate.set()
    meter.wait(lambda: meter.num_done == 8)
    meter.most = 0
    meter.gate.clear()
    workers.submit(lane, [meter.job] * 5)
    meter.wait(lambda: meter.num_running == 2)
    meter.gate.set()
    meter.wait(lambda: meter.num_done == 13)
    assert meter.most == 2


def test_a_job_that_raises_does_not_take_its_place_with_it() -> None:
    meter, workers, lane = Meter(), Workers(), Lane(1)
    meter.gate.set()

    def broken(slot: WorkPermit) -> None:
        raise RuntimeError("broken")

    workers.submit(lane, [broken, broken, meter.job])
    meter.wait(lambda: meter.num_done == 1)


def test_ends_of_downloads_are_gathered_while_more_are_under_way_and_others_are_not_delayed() -> None:
    frames: list[list[ToReader]] = []
    sent = threading.Semaphore(0)
    is_busy = True

    def send(messages: object) -> None:
        assert isinstance(messages, list)
        frames.append(messages)
        sent.release()

    outbox = Outbox(send, lambda: is_busy, linger_seconds=30.0)
    threading.Thread(target=outbox.run, daemon=True).start()
    for i in range(5):
        outbox.post(FetchDone(ticket=str(i)))
    assert not sent.acquire(timeout=0.1)
    outbox.post(Alive())
    assert sent.acquire(timeout=WAIT_SECONDS)
    assert [len(frame) for frame in frames] == [6]
    is_busy = False
    outbox.post(FetchDone(ticket="last"))
    assert sent.acquire(timeout=WAIT_SECONDS)
    assert len(frames[1]) == 1


def test_jobs_for_which_no_thread_starts_are_taken_by_those_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, workers, lane = Meter(), Workers(), Lane(8)
    workers.submit(lane, [meter.job, meter.job])
    meter.wait(lambda: meter.num_running == 2)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        workers.submit(lane, [meter.job] * 5)
    meter.gate.set()
    meter.wait(lambda: meter.num_done == 7)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            Workers().submit(Lane(1), [meter.job])
