"""Errors: one tree, and each of them survives every way in which it travels between processes."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator

import pytest
import torch.utils.data

from sqlstream import errors
from sqlstream.errors import MissingFieldError, ObjectNotFoundError, SqlStreamError

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, SqlStreamError)]
TEXT = "s3://bucket/a'b.jpg: no such object; check the column 'url'"


class Raising(torch.utils.data.Dataset[int]):
    """Sample i raises the i-th class, with a context that no plain reconstruction would bring back."""

    def __len__(self) -> int:
        return len(CLASSES)

    def __getitem__(self, index: int) -> int:
        raise CLASSES[index](TEXT, row=index)


def classes_in_docstring() -> Iterator[tuple[str, str | None, str | None]]:
    """Each line of the tree in the module's docstring: class, parent class, builtin."""
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"^([│├└─ ]*)([A-Z]\w+Error)(?: \((\w+)\))?", line):
            depth = len(match[1]) // 4
            parents[depth:] = [match[2]]
            yield match[2], parents[depth - 1] if depth else None, match[3]


def classes_in_code() -> Iterator[tuple[str, str | None, str | None]]:
    """The same of the classes themselves."""
    for cls in CLASSES:
        own = [base.__name__ for base in cls.__bases__ if issubclass(base, SqlStreamError)]
        builtin = [base.__name__ for base in cls.__bases__ if not issubclass(base, SqlStreamError) and base is not Exception]
        yield cls.__name__, next(iter(own), None), next(iter(builtin), None)


def test_the_tree_in_the_docstring_equals_the_classes() -> None:
    assert sorted(classes_in_docstring(), key=str) == sorted(classes_in_code(), key=str)


@pytest.mark.parametrize("cls", CLASSES)
def test_error_is_constructible_from_one_string_or_from_nothing(cls: type[SqlStreamError]) -> None:
    assert str(cls(TEXT)) == TEXT
    assert str(cls()) == ""
    assert cls(TEXT).context == {}


@pytest.mark.parametrize("cls", CLASSES)
def test_str_is_the_message_whatever_the_builtin_base_would_make_of_it(cls: type[SqlStreamError]) -> None:
    """KeyError quotes its argument, OSError looks for an errno."""
    assert str(cls(TEXT, url="s3://bucket/a")) == TEXT
    assert TEXT in repr(cls(TEXT)).replace("\\'", "'")


@pytest.mark.parametrize("cls", CLASSES)
def test_error_pickles_with_its_context(cls: type[SqlStreamError]) -> None:
    error = cls(TEXT, url="s3://bucket/a", attempt=3)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == TEXT
    assert copy.context == {"url": "s3://bucket/a", "attempt": 3}


def test_dataloader_worker_raises_each_error_again_with_its_type_and_text() -> None:
    loader = iter(torch.utils.data.DataLoader(Raising(), num_workers=1))
    for cls in CLASSES:
        with pytest.raises(cls) as caught:
            next(loader)
        assert type(caught.value) is cls
        assert str(caught.value).startswith(f"Caught {cls.__name__} in DataLoader worker process 0.\nOriginal Traceback")
        assert str(caught.value).rstrip().endswith(f"sqlstream.errors.{cls.__name__}: {TEXT}")


def test_error_is_caught_as_the_builtin_that_python_has_for_it() -> None:
    with pytest.raises(FileNotFoundError):
        raise ObjectNotFoundError(TEXT)
    with pytest.raises(KeyError):
        raise MissingFieldError(TEXT)
