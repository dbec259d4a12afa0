"""What a loader gives its workers beside their copy of the dataset."""

from __future__ import annotations

from dataclasses import dataclass

from sqlstream.stream.transport.handover import Handover
from sqlstream.stream.transport.packing import BatchPacker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOutlet:
    """Where batches and pins of a loader's workers go; pickled into each worker, or inherited."""

    packing: BatchPacker | None
    """Gathers long values of samples for the shared memory of batches; None: samples leave as they are."""
    handover: Handover | None
    """Takes the pins of a worker that ends; None: there are no objects, or no descriptors left."""
