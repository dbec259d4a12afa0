"""Signatures that name all parameters, also those that are handed on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


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
