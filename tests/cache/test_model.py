"""A real cache beside the naive ledger: any sequence of operations of several processes leaves the two alike.

The processes are simulated: each has a store of its own (connection, locks, owner file, pins), and dies by closing its files,
which is all that the kernel does. One thread drives them all, so what must happen can be said exactly; races are the storm's.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from sqlstream.cache import Cache
from sqlstream.cache.acquire.holds import Hold, HoldState
from sqlstream.cache.admin.clear import clear
from sqlstream.cache.directory import CacheDirectory
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.files.read_hold import ReadHold
from sqlstream.cache.ledger_session import LedgerSession
from sqlstream.cache.model.refs import ObjectRef, charged_bytes
from sqlstream.cache.model.tuning import CacheTuning
from sqlstream.cache.recovery import recover
from sqlstream.errors import CacheFullError, StorageError
from sqlstream.process import locks
from sqlstream.testing.invariants import violations
from sqlstream.testing.reference import ReferenceLedger
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.actors import body
from tests.cache.session import Session

NUM_OBJECTS, NUM_PLAYERS = 10, 3
IMPATIENT = CacheTuning(room_timeout_seconds=-1.0)
"""No other process moves while one would wait."""
SIZES = [500 + 2900 * i for i in range(NUM_OBJECTS)]
URLS = [f"http://nowhere/o/{i}.bin" for i in range(NUM_OBJECTS)]
OBJECTS = {url: body(f"/o/{i}.bin", SIZES[i]) for i, url in enumerate(URLS)}
KEYS = {ObjectRef.of(url).key: url for url in URLS}
LIMITS = [None, 4096, 12_288, 32_768, 61_440, 100_000]  # from the smallest object's charge to more than all objects take

players = st.integers(0, NUM_PLAYERS - 1)
numbers = st.integers(0, NUM_OBJECTS - 1)
limits = st.sampled_from(LIMITS)


def charge(url: str) -> int:
    return charged_bytes(len(OBJECTS[url]))


def ref(url: str, *, is_size_known: bool = True) -> ObjectRef:
    return ObjectRef.of(url, size_bytes=len(OBJECTS[url]) if is_size_known else None)


@dataclass(eq=False)
class Player:
    """A process: what it has open, and the samples that it holds."""

    name: str
    store: CacheDirectory
    fetcher: ScriptedFetcher
    holds: list[tuple[Hold, list[str]]] = field(default_factory=list)
    read_holds: list[tuple[ReadHold, str]] = field(default_factory=list)
    """What it reads under locks."""

    @property
    def read_hold_name(self) -> str:
        """Who pins that in the reference; in the ledger nobody does."""
        return f"{self.name}, for_reading"

    @property
    def session(self) -> Session:
        """How it is used."""
        return Session(LedgerSession(self.store, self.fetcher, verifies_reads=False))

    def run_nothing(self) -> None:
        """Run one transaction: register, write what was deferred."""
        self.session.owner.run(lambda _: None)

    def close(self) -> None:
        """End in order."""
        for hold, _ in self.read_holds:
            self.session.release(hold)
        self.session.downloads.cancel(self.fetcher)
        for url in self.fetcher.pending:
            self.fetcher.deliver(url)  # each cancelled download still ends, as one of a real fetcher does
        self.session.close()
        self.session.database.close()

    def die(self) -> None:
        """Close everything, as the kernel does for the dead; nothing is written."""
        for hold, _ in self.read_holds:
            hold.close()
        owner, downloads = self.session.owner, self.session.downloads
        for lead in list(downloads.leads.values()):
            locks.close_descriptor(lead.part.fd)
        assert owner._fd is not None
        locks.close_descriptor(owner._fd)
        self.session.database.close()


class CacheMachine(RuleBasedStateMachine):
    """Rules are what processes do; after each, ledger, disk and reference are compared."""

    template: Path  # an empty cache: to make one takes longer than all else

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="sqlstream-model-"))
        self.directory = self.root / "cache"
        shutil.copytree(self.template, self.directory)
        self.reference = ReferenceLedger()
        self.players: list[Player | None] = [None] * NUM_PLAYERS
        self.num_started = self.charged_before = 0
        self.num_leaked = len(locks._leaked)

    def teardown(self) -> None:
        for player in filter(None, self.players):
            self.end(player)
        if self.num_started:
            assert self.broken_promises(at_rest=True) == []
            sizes = {file.key: charged_bytes(file.size_bytes) for file in Disk(self.directory).scan_data()}
            assert {KEYS[key]: size for key, size in sizes.items()} == self.reference.ready
        shutil.rmtree(self.root)
        for connection in locks._leaked[self.num_leaked :]:  # to ruined ledgers, three descriptors each; now nobody has others
            assert isinstance(connection, sqlite3.Connection)
            connection.close()
        del locks._leaked[self.num_leaked :]

    # -- processes ----------------------------------------------------------------------------------------------------

    def player(self, number: int) -> Player:
        """The process of this number; the first that is alive if it is not."""
        return self.players[number] or next(filter(None, self.players))

    @property
    def is_anybody_alive(self) -> bool:
        return any(self.players)

    @rule(number=players, limit=limits)
    def start(self, number: int, limit: int | None) -> None:
        if self.players[number] is not None:
            return
        self.num_started += 1
        store = CacheDirectory(Disk(self.directory), IMPATIENT)
        player = Player(name=f"player {self.num_started}", store=store, fetcher=ScriptedFetcher(OBJECTS))
        player.session.stop_background()  # what it does at any time happens here when a rule says so
        player.session.owner.set_limit(0, limit)
        player.run_nothing()
        self.players[number] = player
        self.reference.join(player.name, limit)
        self.reference.join(player.read_hold_name, None)

    @precondition(lambda self: self.is_anybody_alive)
    @rule(number=players)
    def die(self, number: int) -> None:
        player = self.player(number)
        player.die()
        self.leave(player)

    @precondition(lambda self: self.is_anybody_alive)
    @rule(number=players)
    def close(self, number: int) -> None:
        self.end(self.player(number))

    def end(self, player: Player) -> None:
        """End in order: what is above the limit goes then, as far as no other owner pins it, and nothing otherwise."""
        player.close()
        self.leave(player)
        if not self.reference.is_above_limit:
            return
        is_gone = {url: not os.path.exists(player.session.disk.data_path(ref(url).key, ".bin")) for url in self.reference.ready}
        self.reference.evict(url for url, gone in is_gone.items() if gone)
        assert not self.reference.is_above_limit or not self.reference.evictable()

    def leave(self, player: Player) -> None:
        self.players[self.players.index(player)] = None
        self.reference.leave(player.read_hold_name)
        self.reference.leave(player.name)

    @precondition(lambda self: self.is_anybody_alive)
    @rule(number=players, limit=limits)
    def change_limit(self, number: int, limit: int | None) -> None:
        player = self.player(number)
        player.session.owner.set_limit(0, limit)
        self.reference.join(player.name, limit)

    # -- objects ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.is_anybody_alive)
    @rule(number=players, wanted=st.lists(numbers, min_size=1, max_size=3, unique=True), is_size_known=st.booleans())
    def hold(self, number: int, wanted: Sequence[int], is_size_known: bool) -> None:
        """Acquire a sample, waiting for room if need be: it must come if everything together can fit, else it must not."""
        player, urls = self.player(number), [URLS[i] for i in wanted]
        if self.reference.filling.keys() & set(urls):
            return  # it would wait for whoever leads them
        self.forget_prefetched(player)  # they are given back before anybody waits
        must_fit = self.reference.fits({url: charge(url) for url in urls})
        try:
            hold = acquire(player, [ref(url, is_size_known=is_size_known) for url in urls])
        except CacheFullError:
            assert not must_fit, f"{urls} fit, and were refused"
            # What came before the room ran out stays, as anything does that is whole.
            self.follow(player, may_come=urls)
            return
        assert must_fit, f"{urls} do not fit, and came"
        for url in urls:
            assert Path(player.session.disk.data_path(ref(url).key, ".bin")).read_bytes() == OBJECTS[url]
        player.holds.append((hold, urls))
        self.follow(player, may_come=urls)
        self.reference.pin(player.name, urls)

    @precondition(lambda self: self.is_anybody_alive)
    @rule(number=players, first=numbers, num=st.integers(1, 4))
    def prefetch(self, number: int, first: int, num: int) -> None:
        """Acquire samples ahead, as far as there is room now; some are on their way for a while."""
        player = self.player(number)
        urls = [URLS[(first + i) % NUM_OBJECTS] for i in range(num)]
        player.fetcher.holds_back = True
        holds = player.session.acquire([[ref(url)] for url in urls])
        player.fetcher.holds_back = False
        # The evicted first: there is room only without them.
        self.follow(player, may_come=[])
        for hold, url in zip(holds, urls, strict=False):
            if hold.error is not None:
                limit = self.reference.limit_bytes
                assert limit is not None
                assert charge(url) > limit
                player.session.release(hold)
                continue
            if url in player.fetcher.pending and url not in self.reference.entries:
                self.reference.reserve(player.name, url, charge(url))
            else:
                assert url in self.reference.entries
                self.reference.pin(player.name, [url])
            player.holds.append((hold, [url]))

    @precondition(lambda self: any(player.fetcher.pending for player in filter(None, self.players)))
    @rule(number=players, which=st.integers(0, 9), is_whole=st.booleans())
    def deliver(self, number: int, which: int, is_whole: bool) -> None:
        """A download ends, well or not."""
        player = next(p for p in (self.player(number), *self.players) if p is not None and p.fetcher.pending)
        url = player.fetcher.pending[which % len(player.fetcher.pending)]
        if not is_whole:
            player.fetcher.script(url, StorageError(f"{url}: refused on cue"))
        player.fetcher.deliver(url)
        player.run_nothing()
        if is_whole:
            self.reference.publish(url, charge(url))
        else:
            self.reference.abandon(url)
        self.settle_waiters()

    @precondition(lambda self: any(player.holds for player in filter(None, self.players)))
    @rule(number=players, which=st.integers(0, 9), is_claimed=st.booleans())
    def release(self, number: int, which: int, is_claimed: bool) -> None:
        player = next(p for p in (self.player(number), *self.players) if p is not None and p.holds)
        hold, urls = player.holds[which % len(player.holds)]
        if is_claimed and hold.state is HoldState.PREFETCHED and player.session.claim(hold):
            return  # from now on nobody may revoke it
        player.holds.remove((hold, urls))
        player.session.release(hold)
        player.run_nothing()
        self.reference.unpin(player.name, urls)

    @precondition(lambda self: self.is_anybody_alive)
    @rule(number=players, which=numbers)
    def read_under_a_lock(self, number: int, which: int) -> None:
        """Lock an object that is here, however full the cache is: it stays, and no row says so."""
        player, url = self.player(number), URLS[which]
        player.run_nothing()
        holds = player.session.read_holds([[ref(url)]])
        assert bool(holds) == (url in self.reference.ready)
        for hold in holds:
            assert player.session.claim(hold)
            player.read_holds.append((hold, url))
            self.reference.pin(player.read_hold_name, [url])

    @precondition(lambda self: any(player.read_holds for player in filter(None, self.players)))
    @rule(number=players, which=st.integers(0, 9))
    def release_the_lock(self, number: int, which: int) -> None:
        player = next(p for p in (self.player(number), *self.players) if p is not None and p.read_holds)
        hold, url = player.read_holds.pop(which % len(player.read_holds))
        player.session.release(hold)
        self.reference.unpin(player.read_hold_name, [url])

    def forget_prefetched(self, player: Player) -> None:
        """A process that may have to wait gives back what it only prefetched; here it does so at once."""
        player.session.holdings.revoke_prefetched()
        for hold, urls in [held for held in player.holds if held[0].state is HoldState.RELEASED]:
            player.holds.remove((hold, urls))
            self.reference.unpin(player.name, urls)
        player.run_nothing()

    def settle_waiters(self) -> None:
        """Those who waited for somebody else's download look again."""
        for player in filter(None, self.players):
            for hold, urls in list(player.holds):
                player.session.wait(hold, timeout_seconds=0)
                if hold.error is not None or hold.is_void:
                    player.holds.remove((hold, urls))
                    player.session.release(hold)
                    self.reference.unpin(player.name, urls)

    # -- the directory ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.is_anybody_alive)
    @rule(number=players)
    def clear(self, number: int) -> None:
        session = self.player(number).session
        expected = self.reference.evictable()
        report = clear(session.ledger, session.disk, dataset=None, older_than_seconds=None, index=False)
        assert report.removed_entries == len(expected)
        assert report.removed_bytes == sum(map(charge, expected))
        assert report.kept_filling_entries == len(self.reference.filling)
        self.reference.evict(expected)

    @precondition(lambda self: self.reference.evictable() and self.is_anybody_alive)
    @rule(number=players, which=numbers, cut=st.booleans())
    def lose_a_file_and_verify(self, number: int, which: int, cut: bool) -> None:
        session, free = self.player(number).session, sorted(self.reference.evictable())
        url = free[which % len(free)]
        path = session.disk.data_path(ref(url).key, ".bin")
        if cut:
            os.truncate(path, 7)
        else:
            os.unlink(path)
        findings = recover.verify(session.ledger, session.disk, repair=True)
        if cut or findings:  # a file that is gone may pass for one that somebody unlinked before it died
            assert [(finding.key, finding.repaired) for finding in findings] == [(ref(url).key.hex(), True)]
        assert recover.verify(session.ledger, session.disk, repair=False) == []
        self.reference.evict([url])

    @precondition(lambda self: self.is_anybody_alive)
    @rule(number=players)
    def ruin_the_ledger(self, number: int) -> None:
        """Rubbish over it: made anew from files, locks, and what the living wrote down."""
        for name in ("ledger.sqlite", "ledger.sqlite-wal"):
            path = self.directory / name
            if path.exists():
                with open(path, "r+b") as file:
                    file.write(b"rubbish " * (path.stat().st_size // 8))
        self.player(number).run_nothing()

    # -- the comparison -----------------------------------------------------------------------------------------------

    def follow(self, player: Player, may_come: Sequence[str]) -> None:
        """Let the reference evict what was evicted, which must have been allowed, and take up what came."""
        player.run_nothing()
        rows = ready_rows(player.session)
        self.reference.evict(set(self.reference.ready) - set(rows))
        for url in rows.keys() - self.reference.ready.keys():
            assert url in may_come
            self.reference.reserve(player.name, url, rows[url])
            self.reference.publish(url, rows[url])
            self.reference.unpin(player.name, [url])

    def broken_promises(self, *, at_rest: bool = False) -> list[str]:
        """All but L2: what is above a limit that was lowered stays while it is pinned, and when its pins died with the last."""
        return [line for line in violations(self.directory, at_rest=at_rest) if not line.startswith("L2")]

    @invariant()
    def ledger_disk_and_reference_agree(self) -> None:
        if not self.is_anybody_alive:
            return
        session = next(filter(None, self.players)).session
        account = session.ledger.account()
        assert self.broken_promises() == []
        for player in filter(None, self.players):
            player.run_nothing()  # a rebuild goes by what they wrote down, which may name too many pins: they know better
            held = [hold for hold, _ in player.holds if hold.number]
            assert player.session.held_bytes == sum(dict(pin for hold in held for pin in hold.charges.items()).values())
        if account.limit_bytes is not None:  # a limit that was lowered takes nothing away, and lets nothing in
            assert account.charged_bytes <= max(account.limit_bytes, self.charged_before)
        self.charged_before = account.charged_bytes
        assert ready_rows(session) == self.reference.ready
        names = {player.session.owner.id: player.name for player in self.players if player is not None}
        rows = session.read("SELECT owner, key FROM pin")
        pins = {(names[owner], KEYS[key]) for owner, key in rows if owner in names}
        assert pins == {(name, url) for name in names.values() for url in self.reference.pinned(name)}
        pinning = session.read("SELECT id FROM owner WHERE length(pins) > 0")
        assert {owner for (owner,) in pinning if owner in names} == {owner for owner, _ in rows if owner in names}
        filling = session.read("SELECT key, part FROM entry WHERE state = 'filling'")
        on_their_way = {KEYS[key] for key, part in filling if session.disk.part_is_live(part)}
        assert on_their_way == self.reference.filling.keys()
        assert session.ledger.waiting_owners() == []


def acquire(player: Player, refs: Sequence[ObjectRef]) -> Hold:
    """As `Cache.hold` does."""
    session = player.session
    for _ in range(20):
        hold = session.acquire_one(refs)
        assert session.wait(hold, timeout_seconds=0)
        if hold.error is not None:
            session.release(hold)
            raise hold.error
        if session.claim(hold):
            return hold
        session.release(hold)
    raise AssertionError("it goes in circles")


def ready_rows(session: Session) -> dict[str, int]:
    rows = session.read("SELECT key, charged_bytes FROM entry WHERE state = 'ready'")
    return {KEYS[key]: charged_bytes for key, charged_bytes in rows}


@pytest.mark.parametrize(
    ("num_examples", "num_steps", "is_always_the_same"),
    [(30, 25, True), pytest.param(1500, 60, False, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
    ids=["short", "long"],
)
def test_any_sequence_of_operations_leaves_the_cache_as_the_naive_ledger_says(
    tmp_path: Path, num_examples: int, num_steps: int, is_always_the_same: bool
) -> None:
    Cache(tmp_path / "template").close()
    (tmp_path / "template" / "ballast").unlink()  # faster to make than to copy
    machine = type("CacheMachine", (CacheMachine,), {"template": tmp_path / "template"})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            derandomize=is_always_the_same,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
