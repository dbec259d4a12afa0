"""What the dataset classes of MosaicML's documentation have in common: fewer parameters, and other defaults."""

from __future__ import annotations

from typing import TypedDict

from sqlstream.compat.streaming.base.dataset import StreamingDataset
from sqlstream.compat.streaming.translation.signatures import shows_parameters_of


class Shared(TypedDict, total=False):
    """Parameters of all of them, but for the batch size, which some need."""

    remote: str | None
    local: str | None
    split: str | None
    download_retry: int
    download_timeout: float
    validate_hash: str | None
    keep_zip: bool
    epoch_size: int | None
    predownload: int | None
    cache_limit: int | None
    partition_algo: str
    num_canonical_nodes: int | None
    shuffle: bool
    shuffle_algo: str
    shuffle_seed: int
    shuffle_block_size: int


class Documented(Shared, total=False):
    """Parameters of all of them."""

    batch_size: int | None


class DocumentedDataset(StreamingDataset):
    """A dataset whose class says what its samples are; the parameters are those of `StreamingDataset`."""

    def __init__(
        self,
        *,
        remote: str | None = None,
        local: str | None = None,
        split: str | None = None,
        download_retry: int = 2,
        download_timeout: float = 60,
        validate_hash: str | None = None,
        keep_zip: bool = False,
        epoch_size: int | None = None,
        predownload: int | None = None,
        cache_limit: int | None = None,
        partition_algo: str = "orig",
        num_canonical_nodes: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        shuffle_algo: str = "py1s",
        shuffle_seed: int = 9176,
        shuffle_block_size: int = 1 << 18,
    ) -> None:
        super().__init__(
            remote=remote,
            local=local,
            split=split,
            download_retry=download_retry,
            download_timeout=download_timeout,
            validate_hash=validate_hash,
            keep_zip=keep_zip,
            epoch_size=epoch_size,
            predownload=predownload,
            cache_limit=cache_limit,
            partition_algo=partition_algo,
            num_canonical_nodes=num_canonical_nodes,
            batch_size=batch_size,
            shuffle=shuffle,
            shuffle_algo=shuffle_algo,
            shuffle_seed=shuffle_seed,
            shuffle_block_size=shuffle_block_size,
        )


shows_all_parameters = shows_parameters_of(DocumentedDataset.__init__)
"""Decorates the constructors of subclasses with parameters of their own."""
