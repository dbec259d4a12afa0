"""Content that is not in the rows of an index: what the engine asks of it, wherever it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sqlstream.cache.session import AnyHold, ObjectRef
from sqlstream.transforms.base import Sample

if TYPE_CHECKING:
    from sqlstream.stream.engine.slots import PlannedSample


class SampleContent(Protocol):
    """Where the content of a row is."""

    @property
    def refs(self) -> tuple[ObjectRef, ...]:
        """The objects that it is read from."""
        ...

    @property
    def is_shared(self) -> bool:
        """These objects hold a whole shard, or a row group: all samples of it are read from them."""
        ...

    @property
    def identities(self) -> dict[str, object]:
        """What names the content of each column, as `CachedChain` names objects."""
        ...

    def note_changed(self) -> None:
        """Note that what it is read from is another version than was indexed."""
        ...

    def look_up(self) -> None:
        """Find out anew what it is read from, after that could not be held."""
        ...

    def fill(self, sample: Sample, hold: AnyHold | None, first: int) -> AnyHold | None:
        """Put the content into a sample.

        Args:
            sample: The sample.
            hold: Has its objects: those that were wanted, or others that the cache has in their place; None: it wants none.
            first: Which object of the hold is the first of these.

        Returns:
            The hold, or an open one that took its place.
        """
        ...


class ContentSource(Protocol):
    """The content of the rows of one index, in this process."""

    @property
    def names_versions(self) -> bool:
        """Some of its objects are of a version that their key does not hold (`ObjectRef.is_listed`)."""
        ...

    def read(self, row_ids: Sequence[int]) -> tuple[list[Sample], Any]:
        """Return rows, in the order asked, and what `plan` needs of them, before predownload transforms see them.

        Args:
            row_ids: Their ids.
        """
        ...

    def plan(self, slots: Sequence[PlannedSample], prepared: Any) -> None:
        """Note in slots where their content is.

        Args:
            slots: Of rows that were read.
            prepared: What `read` has returned beside these.
        """
        ...
