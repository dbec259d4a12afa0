"""Parquet files that Arrow takes as they are: encrypted ones, and pages that are not what their checksums say."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

from sqlstream import StreamingDataset
from sqlstream.errors import SourceError

TABLE = pa.table({"secret": [f"text {number}" for number in range(100)], "open": range(100)})
KINDS: dict[str, dict[str, Any]] = {"built": {}, "lazy": {"lazy_index_chunk_size": 10}}


class PlainKeys(pe.KmsClient):
    """Wraps keys in base64 alone."""

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
        return base64.b64encode(key_bytes).decode()


def rows_of(path: Path, kind: str) -> list[dict[str, Any]]:
    with StreamingDataset(
        f"{path}", path.parent / "cache", columns_to_download=[], on_error="raise", show_progress=False, **KINDS[kind]
    ) as dataset:
        return [{name: sample[name] for name in TABLE.column_names} for sample in dataset]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_plain_footer", [False, True])
def test_an_encrypted_file_is_an_error_that_says_so(kind: str, has_plain_footer: bool, tmp_path: Path) -> None:
    """Arrow ends the process that asks for the place of a column which it cannot decrypt."""
    factory = pe.CryptoFactory(lambda _: PlainKeys())
    wishes = pe.EncryptionConfiguration(footer_key="a", column_keys={"b": ["secret"]}, plaintext_footer=has_plain_footer)
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), wishes)
    pq.write_table(TABLE, tmp_path / "t.parquet", encryption_properties=properties)
    with pytest.raises(SourceError, match=r"t\.parquet is encrypted, .* without encryption"):
        rows_of(tmp_path / "t.parquet", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_that_is_not_what_its_checksum_says_is_an_error_and_no_other_value(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(TABLE, path, write_page_checksum=True, use_dictionary=False, compression="none", row_group_size=10)
    assert rows_of(path, kind) == TABLE.to_pylist()
    damaged = path.read_bytes().replace(b"text 27", b"text 72")  # in the page, in no statistics
    path.write_bytes(damaged)
    with pytest.raises(SourceError, match=r"t\.parquet cannot be read: .*CRC checksum verification failed"):
        rows_of(path, kind)


def test_content_in_its_file_is_compared_with_the_checksums_of_its_pages(tmp_path: Path) -> None:
    pictures = [{"bytes": b"picture %d" % number, "path": None} for number in range(10)]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"image": pictures}), path, write_page_checksum=True, use_dictionary=False, compression="none")
    path.write_bytes(path.read_bytes().replace(b"picture 5", b"picture 6"))
    with (
        pytest.raises(SourceError, match=r"t\.parquet cannot be read: .*CRC checksum verification failed"),
        StreamingDataset(f"{path}", tmp_path / "cache", show_progress=False) as dataset,
    ):
        dataset[0]
