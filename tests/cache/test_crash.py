"""A child dies, or the disk fails, at its n-th side effect, n = 1, 2, … until it gets through; the promises hold after each."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from sqlstream.testing.faults import SideEffects
from tests.cache.actors import Stage
from tests.cache.deaths import (
    URLS,
    Act,
    Prepare,
    clear,
    die_everywhere,
    download,
    fail_everywhere,
    filled,
    name_of,
    opened,
    read,
)
from tests.cache.old_ledgers import as_version_1

# Each prepares a directory, then says what runs under faults.


def nothing(directory: Path) -> None:
    """The directory is not even there."""


def bare(directory: Path) -> None:
    """The ledger was deleted: migrations, and a rebuild, are due."""
    filled(directory)
    (directory / "ledger.sqlite").unlink()


def ruined(directory: Path) -> None:
    filled(directory)
    (directory / "ledger.sqlite").write_bytes(os.urandom(50_000))


def old(directory: Path) -> None:
    """The ledger is of version 1: an upgrade is due."""
    filled(directory)
    as_version_1(directory)


def restarted(directory: Path) -> None:
    filled(directory)
    connection = sqlite3.connect(directory / "ledger.sqlite")
    with connection:
        connection.execute("UPDATE meta SET boot_id = 'x', tick = tick + 1")
    connection.close()


def create(directory: Path, effects: SideEffects) -> None:
    opened(directory).close()


def stream(directory: Path, effects: SideEffects) -> None:
    with opened(directory, effects.note) as cache:
        read(cache, *URLS[3:10], *URLS[:2])


def verify(directory: Path, effects: SideEffects) -> None:
    with opened(directory) as cache:
        cache.verify(repair=True)


SCENES: list[tuple[Prepare, Act]] = [
    (nothing, create),
    (filled, download),
    (filled, stream),
    (filled, clear),
    (bare, verify),
    (ruined, download),
    (restarted, download),
    (old, download),
]
IDS = [f"{name_of(prepare)}-{name_of(act)}" for prepare, act in SCENES]


@pytest.mark.parametrize(("prepare", "act"), SCENES, ids=IDS)
def test_a_death_at_any_side_effect_breaks_no_promise(memory_path: Path, stage: Stage, prepare: Prepare, act: Act) -> None:
    (num_effects,) = stage.run_all(die_everywhere, [(memory_path, prepare, act)])
    assert num_effects >= 5


@pytest.mark.parametrize("act", [download, clear], ids=name_of)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EMFILE], ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
def test_a_fault_at_any_side_effect_ends_in_success_or_a_clear_error_and_leaks_nothing(
    memory_path: Path, stage: Stage, act: Act, number: int, lasts: bool
) -> None:
    ((num_effects, num_errors),) = stage.run_all(fail_everywhere, [(memory_path, act, number, lasts)])
    assert num_effects >= 5
    assert num_errors <= num_effects
