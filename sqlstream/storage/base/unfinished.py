"""Whether a writing of shards has ended, by the journal that lies beside them: who reads the shards must know, too."""

from __future__ import annotations

JOURNAL_NAME = ".sqlstream-write.jsonl"
"""The journal of a writing (`write.base.journal`); on a disk it goes when the index is there, unless the source has a name."""
END = b'{"is_complete": true}\n'
"""The last line of one whose writing has ended."""
