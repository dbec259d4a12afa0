"""In what unit the processes of a node fetch the shards of a dataset in an epoch: the first one chooses, the others follow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sqlstream.cache.directory import CacheDirectory
from sqlstream.cache.ledger.ledger import LedgerTransaction
from sqlstream.cache.ledger.shard_units import ChosenUnit, ShardWish, chosen_unit, note_unit


def agreed_unit(directory: CacheDirectory, wish: ShardWish, choose: Callable[[int | None], ChosenUnit]) -> ChosenUnit:
    """Return what was chosen for an epoch by a process that lives; else what this one chooses, which is noted.

    Args:
        directory: The cache directory, whose ledger has the choice.
        wish: Who asks.
        choose: Returns a choice, by the limit of the directory in bytes (None: none).
    """
    while True:
        dead: str | None = None
        if (found := chosen_unit(directory.ledger, wish)) is not None:
            if found[0] == directory.owner.id or directory.disk.owners.is_live(found[0]):
                return found[1]
            dead = found[0]
        chosen = choose(directory.limit_in_force())
        if directory.owner.run(partial(_note, directory, wish, chosen, dead)):
            return chosen


def _note(
    directory: CacheDirectory, wish: ShardWish, chosen: ChosenUnit, instead_of: str | None, tx: LedgerTransaction
) -> bool:
    assert directory.owner.id is not None
    return note_unit(tx, wish, directory.owner.id, chosen, instead_of)
