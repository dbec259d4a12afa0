"""A chain with cache points: samples are stored there, and the transforms before a point are skipped when a sample is found.

Stored samples are entries of the cache's ledger like any object: one account, one limit, evicted and pinned alike. They are
looked up when a window is planned, before anything is downloaded; one that is found replaces all objects of its row.

The key of a stored sample is made of everything that decides its content: the row as the transforms see it (without
`__epoch__`), the identity of its objects, and the transforms up to the point. Random numbers drawn before a point depend on
that key alone: they are the same in every epoch, whether the sample was found or made again. Behind the last point they depend
on (seed, epoch, position) and the number of points, as in other chains.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlstream.cache import Cache
from sqlstream.cache.session import KEY_BYTES, STORED_SAMPLE_EXTENSION, ObjectRef, PutItem
from sqlstream.config import SampleOptions
from sqlstream.errors import CacheError, ConfigError, DecodeError
from sqlstream.process import locks
from sqlstream.stream.chain.global_rng import GlobalGenerators
from sqlstream.stream.engine.sample_maker import holds_path
from sqlstream.stream.engine.slots import PlannedSample
from sqlstream.transforms.base import Chain, Sample, Transform
from sqlstream.transforms.cached import CachePoint, describe, split_at_points
from sqlstream.transforms.codec import decode_sample, encode_sample
from sqlstream.transforms.reading import OpenFiles

logger = logging.getLogger(__name__)

BATCH = 32
"""Samples stored in one transaction: half a window; each holds a file open until the next one."""
BATCH_BYTES = 32 << 20
"""Fewer samples if they are large: they wait in memory."""
FIRST_STAGE = 1
"""First stage of the samples' generators (`transforms/rng.py`); stage 0 are the predownload transforms."""
_EPOCH = "__epoch__"
_said: set[tuple[str, Path]] = set()
"""Warnings that this process has given, by cache directory: each once, whatever dataset stores there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A cache point, and the transforms between the one before and it."""

    point: CachePoint
    chain: Chain


class CachedChain:
    """Transforms of all samples of a process, with their cache points.

    Args:
        transforms: The chain; every `CacheTransform` in it is a point.
        cache: Where samples are stored.
        options: Which columns name objects, and how randomness is seeded.
        seed: Part of every sample's key.
        dataset: Id of the dataset in the ledger.
        previous: The chain of the predownload transforms.

    Raises:
        ConfigError: A point's key cannot be worked out.
    """

    def __init__(
        self,
        transforms: Sequence[Transform],
        cache: Cache,
        options: SampleOptions,
        *,
        seed: int | None,
        dataset: int | None,
        previous: Chain,
    ) -> None:
        points, rest = split_at_points(transforms)
        generators = GlobalGenerators if options.seed_transforms else None
        self._stages: list[_Stage] = []
        for stage, point in enumerate(points, FIRST_STAGE):
            previous = Chain(point.transforms, seed=seed, stage=stage, generators=generators, previous=previous)
            self._stages.append(_Stage(point=point, chain=previous))
        self.rest = Chain(rest, seed=seed, stage=FIRST_STAGE + len(points), generators=generators, previous=previous)
        """The transforms behind the last point."""
        self._columns = options.columns_to_download
        self._dataset = dataset
        self._session = cache.session
        self._directory = cache.path
        self._unwritten: dict[bytes, PutItem] = {}
        self._damaged: set[bytes] = set()
        """Stored samples that can neither be read nor removed, since other processes hold them."""

    @property
    def has_points(self) -> bool:
        """The chain stores samples."""
        return bool(self._stages)

    # -- looking for stored samples -----------------------------------------------------------------------------------

    def look_up(self, slots: Sequence[PlannedSample]) -> None:
        """Note for each slot the last point whose sample is stored, with one statement of the ledger for all of them.

        Between this and the claim a stored sample may be evicted; then the slot is looked up again.
        """
        if not self._stages:
            return
        for slot in slots:
            if not slot.stored_refs and slot.error is None:
                slot.stored_refs = self._refs(slot)
        ready = self._ready({ref.key for slot in slots for ref in slot.stored_refs})
        for slot in slots:
            slot.found = max((i for i, ref in enumerate(slot.stored_refs) if ref.key in ready), default=None)
            slot.want()

    def is_found_now(self, slot: PlannedSample) -> bool:
        """Look up a slot's sample once more: it may have been stored since the window was planned."""
        if slot.found is not None:
            return False
        self.look_up([slot])
        return slot.found is not None

    def _ready(self, keys: set[bytes]) -> set[bytes]:
        """Return the keys of the samples that are stored; those that this process has just made are written first."""
        try:
            if not keys.isdisjoint(self._unwritten):
                self.flush()
            return self._session.stored(list(keys)) - self._damaged
        except CacheError as error:
            self._say("the ledger of %s could not be asked for stored samples, so they are made again: %s", error)
            return set()

    def read(self, slot: PlannedSample) -> bool:
        """Read the stored sample of a slot that has one; return False if it is damaged: then it is made again."""
        if slot.found is None or slot.hold is None:
            return True
        ref = slot.stored_refs[slot.found]
        with locks.uninterrupted():  # an exception of a signal handler is no damage
            try:
                sample = decode_sample(Path(slot.hold.paths[0]).read_bytes())
            except (OSError, DecodeError) as error:
                self._say("a stored sample in %s (%s) is damaged and made again: %s", ref.url, error)
                if not self._session.discard(ref):
                    self._damaged.add(ref.key)
                return False
        if _EPOCH in sample:
            sample[_EPOCH] = slot.epoch
        slot.stored = sample
        return True

    def _refs(self, slot: PlannedSample) -> tuple[ObjectRef, ...]:
        """Return where the slot's sample is stored, for each point."""
        row = {name: value for name, value in slot.sample.items() if name != _EPOCH and name not in slot.refs}
        identities = {column: _object_identity(ref) for column, ref in slot.refs.items()} | {
            column: _identity(str(row[column])) for column in self._columns if row.get(column) is not None
        }
        if slot.content is not None:
            identities |= slot.content.identities
        content = json.dumps([row, identities], default=describe)
        return tuple(
            ObjectRef(
                url=f"{stage.point.name} of {slot.sample.get('__sample_key__')}",
                key=hashlib.blake2b(f"sample\0{stage.point.key}\0{content}".encode(), digest_size=KEY_BYTES).digest(),
                ext=STORED_SAMPLE_EXTENSION,
                dataset=self._dataset,
                is_stored_sample=True,
            )
            for stage in self._stages
        )

    # -- running ------------------------------------------------------------------------------------------------------

    def run_points(self, slot: PlannedSample) -> Sample:
        """Return the sample of a slot after the last point; its objects are here, or its stored sample is read.

        Raises:
            TransformError: A transform failed, or the sample cannot be stored at a point.
            ConfigError: A transform before a point makes several samples, or leaves the path of a cached file in them.
        """
        if slot.stored is None or slot.found is None:
            sample, num_done = slot.sample, 0
        else:
            sample, num_done = slot.stored, slot.found + 1
        for stage, ref in zip(self._stages[num_done:], slot.stored_refs[num_done:], strict=True):
            sample = self._run_stage(stage, ref, sample, slot.hold)
        return sample

    def _run_stage(self, stage: _Stage, ref: ObjectRef, sample: Sample, files: OpenFiles | None) -> Sample:
        name = stage.point.name
        words = int.from_bytes(ref.key[:8], "little"), 0, int.from_bytes(ref.key[8:], "little")
        result = stage.chain.run(sample, words, files=files, watches=True)
        if not isinstance(result, dict):
            raise ConfigError(
                f"CacheTransform {name!r}: a transform before this point makes several samples of one: put it behind the point"
            )
        for field, value in result.items():
            if holds_path(value, self._session.directories):
                raise ConfigError(
                    f"CacheTransform {name!r}: field {field!r} holds the path of a cached file ({value!r}), which may be gone "
                    "when the sample is found again: read the file before this point, or drop the field"
                )
        if stage.chain.drew:
            self._say(
                "samples are stored in %s at CacheTransform %r with random numbers drawn before it: these are the same in "
                "every epoch. Put such transforms behind the point if they should change",
                name,
            )
        data = encode_sample(result)
        self._store(ref, data)
        return decode_sample(data)  # as it is found another time: what follows never depends on a hit

    # -- storing ------------------------------------------------------------------------------------------------------

    def _store(self, ref: ObjectRef, data: bytes) -> None:
        self._unwritten[ref.key] = PutItem(ref=ref._replace(size_bytes=len(data), is_stored_sample=False), data=data)
        if len(self._unwritten) >= BATCH or sum(len(item.data) for item in list(self._unwritten.values())) >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Store the samples that wait, in one transaction; those without room are not stored, and the stream goes on."""
        unwritten, self._unwritten = self._unwritten, {}  # first: other threads add to the new dict
        items = list(unwritten.values())
        reason = self._session.put(items) if items else None
        if reason is not None:
            self._say("samples are not stored in %s, and made again when they are needed: %s", reason)

    def _say(self, text: str, *arguments: object) -> None:
        """Log a warning about this cache, once in a process."""
        if (text, self._directory) not in _said:
            _said.add((text, self._directory))
            logger.warning(text, self._directory, *arguments)


def _object_identity(ref: ObjectRef) -> object:
    """Return what names an object, with its version where a listing names it."""
    return [ref.key.hex(), ref.size_bytes, ref.etag] if ref.is_listed else ref.key.hex()


def _identity(path: str) -> list[object]:
    """Return what tells versions of a local source file apart; it is read in place, and may be changed there."""
    try:
        status = os.stat(path)
    except OSError:
        return [path]
    return [path, status.st_size, status.st_mtime_ns]
