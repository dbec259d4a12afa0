"""What MosaicML's classes show of themselves: signatures that name all parameters, and methods that are not here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn


def shows_parameters_of(other: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a constructor whose `**options` go to `other`: its signature names these, as MosaicML's does."""

    def show(init: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(init)
        named = {name: one for name, one in own.parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}
        others = inspect.signature(other).parameters
        parameters = [*named.values(), *(one for name, one in others.items() if name not in named)]
        init.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # functions may have one
        return init

    return show


class Refused:
    """An attribute of theirs that is not here, so that `hasattr` says so; who reads it is told what to do.

    It is no `__getattr__`, which would hide the AttributeErrors that properties of a subclass raise.

    Args:
        cure: What to do.
    """

    def __init__(self, cure: str) -> None:
        self._cure = cure
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        """Learn the name."""
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        """Say what to do.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(f"{owner.__name__}.{self._name} is not here: {self._cure}", name=self._name, obj=instance)
