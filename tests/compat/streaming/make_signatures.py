"""Writes signatures.json: what parameters the public callables of MosaicML Streaming have, from the installed package.

    python -m venv PEER && PEER/bin/pip install torch numpy filelock tqdm catalogue typing-extensions
    PEER/bin/pip install --no-deps mosaicml-streaming==0.13.0
    PEER/bin/python tests/compat/streaming/make_signatures.py tests/compat/streaming/signatures.json

What the package imports and is not there (clouds, transformers, torchvision) is stood in for: no signature depends on it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

PACKAGE, VERSION = "streaming", "0.13.0"
STOOD_FOR = frozenset("transformers torchvision zstd snappy brotli xxhash PIL boto3 botocore google azure oci paramiko".split())
CALLABLES = {
    "streaming": (
        *("StreamingDataset", "Stream", "StreamingDataLoader", "LocalDataset"),
        *("MDSWriter", "JSONWriter", "CSVWriter", "TSVWriter", "XSVWriter"),
    ),
    "streaming.base.util": (
        *("merge_index", "clean_stale_shared_memory", "bytes_to_int", "number_abbrev_to_int", "get_list_arg"),
        *("wait_for_file_to_exist", "retry"),
    ),
    "streaming.vision": ("StreamingADE20K", "StreamingCIFAR10", "StreamingCOCO", "StreamingImageNet"),
    "streaming.vision.base": ("StreamingVisionDataset",),
    "streaming.text": ("StreamingC4", "StreamingEnWiki", "StreamingPile"),
    "streaming.multimodal": ("StreamingInsideWebVid", "StreamingOutsideDTWebVid", "StreamingOutsideGIWebVid"),
}
METHODS = {
    "StreamingDataset": ("__getitem__", "__len__", "get_item", "state_dict", "load_state_dict"),
    "StreamingDataLoader": ("state_dict", "load_state_dict"),
    "LocalDataset": ("get_item",),
    "MDSWriter": ("write", "finish"),
}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that no signature depends on.

    Args:
        names: The packages.
    """

    def __init__(self, names: Collection[str] = STOOD_FOR) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a stand-in, but for the package's own modules."""
        is_stood_for = name.partition(".")[0] in self._names
        return importlib.util.spec_from_loader(name, self, is_package=True) if is_stood_for else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return a module that has every name."""
        module: Any = mock.MagicMock(name=spec.name)
        module.__spec__, module.__path__ = spec, []
        for kind in ("VisionDataset", "BatchFeature", "BatchEncoding"):  # a base class, and what isinstance asks for
            setattr(module, kind, type(kind, (), {}))
        return module  # type: ignore[no-any-return]  # it stands in for one

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def parameters(function: Any) -> list[list[object]]:
    """Return name, kind and default (as Python writes it; None: there is none) of each parameter."""
    found = inspect.signature(function).parameters.values()
    missing = inspect.Parameter.empty
    return [[p.name, p.kind.name, None if p.default is missing else repr(p.default)] for p in found if p.name != "self"]


def signatures(package: str) -> dict[str, list[list[object]]]:
    """Return the signatures of all callables, by their names below the package.

    Args:
        package: The peer's, or the drop-in's.
    """
    found = {}
    for where, names in CALLABLES.items():
        module = importlib.import_module(where.replace(PACKAGE, package, 1))
        for name in names:
            key, value = f"{where}.{name}".removeprefix(f"{PACKAGE}."), getattr(module, name)
            found[key] = parameters(value)
            for method in METHODS.get(name, ()):
                found[f"{key}.{method}"] = parameters(getattr(value, method))
    return found


if __name__ == "__main__":
    sys.meta_path.insert(0, StandIns())
    importlib.import_module(PACKAGE)
    assert importlib.import_module(f"{PACKAGE}._version").__version__ == VERSION
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(signatures(PACKAGE).items())]
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n")
