"""`refresh="epoch"`: as an epoch begins the source is looked at again, and a new version of it gives the rows from there on.

Only the trainer looks, before its workers start: an epoch has one index in all of its processes. Of several ranks each builds
(or pulls) the index that it finds, then they compare; unless all have found the same one, all keep the one that they have.
"""

from __future__ import annotations

import contextlib
import logging

from sqlstream.distributed import disagree, have_same
from sqlstream.errors import SqlStreamError
from sqlstream.index.file.index import Index
from sqlstream.stream.opening import open_any
from sqlstream.stream.orders import open_order
from sqlstream.stream.pipeline import Pipeline
from sqlstream.stream.run.schedule import Schedule

logger = logging.getLogger(__name__)


def refresh_rows(pipeline: Pipeline, schedule: Schedule) -> None:
    """Give a dataset the rows that its source has now, if it was asked for that, and the next iteration begins an epoch.

    A source that cannot be looked at, or indexed, is a warning, and the rows stay as they are.

    Raises:
        ConfigError: There are other ranks, but no way to talk to them.
    """
    if pipeline.options.refresh is None or schedule.keeps_rows:
        return
    pipeline.cache.check_open()
    with contextlib.ExitStack() as stack:
        index, fresh, problem = None, None, "the ranks have found different versions of it"
        try:
            index = stack.enter_context(contextlib.closing(open_any(pipeline.options, pipeline.cache)))
            if index.fingerprint != pipeline.index.fingerprint:
                seed, directory = schedule.identity.shuffle_seed, pipeline.cache.path / "index"
                fresh = open_order(pipeline.options, seed, index, directory)
            found = index.fingerprint
        except SqlStreamError as error:
            found, problem = None, str(error)
        except BaseException:  # a rank that ends without a word would have the others wait for it
            disagree(schedule.layout.whole)
            raise
        if not have_same(schedule.layout.whole, found):
            logger.warning("%s is not refreshed, this epoch has the rows of the one before: %s", pipeline.index.src, problem)
        elif index is not None and fresh is not None:
            stack.pop_all()  # it stays open
            known = [_shown(pipeline.index), _shown(index)]
            schedule.renew(fresh.schedule)
            pipeline.renew(index, fresh.lengths)
            logger.info(
                "%s has changed: epoch %d has its rows of now (%s)", index.src, schedule.counter.next.epoch, " → ".join(known)
            )


def _shown(index: Index) -> str:
    return "not counted" if index.known_length is None else str(index.known_length)
