"""Parts of shards that are compressed as a whole, as paths: copies under the extensions of the parts, entries of their own.

No request brings such a part alone. The first sample that wants it waits for the content of its shard, an entry like any
other, and stores the copies; later ones want the copies alone, for as long as the cache has all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlstream.cache.session import AnyHold, CacheSession, ObjectRef
from sqlstream.transforms.base import Sample

if TYPE_CHECKING:
    from sqlstream.stream.engine.content.row_content import SampleContent


@dataclass(slots=True, eq=False)
class PartCopies:
    """Where the content of a row is, and the copies of its parts; a `SampleContent`."""

    source: SampleContent
    """Where the parts are."""
    copies: Mapping[str, ObjectRef]
    """The copy of each part, by its column; their `is_stored_sample` says that nothing fetches them."""
    session: CacheSession
    are_here: bool = False
    """The cache has all copies, as it was asked last."""

    @property
    def refs(self) -> tuple[ObjectRef, ...]:
        """The copies, if they are here, else what they are made of."""
        return tuple(self.copies.values()) if self.are_here else self.source.refs

    @property
    def is_shared(self) -> bool:
        """Copies are of one sample each; what they are made of is that of all samples of the shard."""
        return not self.are_here and self.source.is_shared

    @property
    def identities(self) -> dict[str, object]:
        """See `SampleContent.identities`."""
        return self.source.identities

    def note_changed(self) -> None:
        """See `SampleContent.note_changed`."""
        self.source.note_changed()

    def look_up(self) -> None:
        """Ask the cache once more whether the copies are here."""
        look_up([self], self.session)

    def fill(self, sample: Sample, hold: AnyHold | None, first: int) -> AnyHold | None:
        """Put the paths of the copies into a sample; see `SampleContent.fill`.

        What they are made of is released first: no process waits for room while it keeps room that it does not need.
        """
        if hold is None or not self.copies:
            return hold
        if not self.are_here:
            content = dict(sample)
            self.source.fill(content, hold, first)
            bodies = {ref.key: content[name] for name, ref in self.copies.items()}
            copies = [ref.made() for ref in self.copies.values()]
            self.session.release(hold)
            hold = self.session.hold_made((*hold.refs[:first], *copies), bodies)
        sample.update(zip(self.copies, hold.paths[first:], strict=True))
        return hold


def look_up(content: Sequence[PartCopies], session: CacheSession) -> None:
    """Note whether the copies of samples are here, with one look at the ledger for all of them."""
    stored = session.stored([*{ref.key: None for some in content for ref in some.copies.values()}])
    for some in content:
        some.are_here = bool(some.copies) and all(ref.key in stored for ref in some.copies.values())
