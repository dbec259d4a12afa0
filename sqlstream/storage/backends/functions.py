"""Functions of the user that options name as `module:function`: the helper process has nothing else of the user's program."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter

from sqlstream.errors import ConfigError, text_of
from sqlstream.storage.base.urls import redact_text


def load_function(option: str, name: str, search_path: Sequence[str]) -> Callable[..., object]:
    """Return the function that an option names; its module is imported.

    Args:
        option: The option, for messages.
        name: `module:function`.
        search_path: Where the reading process looks for modules; looked at behind our own path.

    Raises:
        ConfigError: It is not there, or cannot be called.
    """
    sys.path += [place for place in search_path if place not in sys.path]
    module, _, function = name.partition(":")
    cure = "give 'module:function' of a module that this process can import"
    if module == "__main__":
        cure = "the helper process is another program than yours: put the function into a module of its own"
    try:
        found = attrgetter(function)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{option}={name!r} is not there ({error}): {cure}") from error
    except BaseException as error:  # sys.exit, too: only the module raises in the helper's threads
        text = redact_text(text_of(error))
        raise ConfigError(f"{option}={name!r} cannot be imported ({text}): mend its module") from error
    if not callable(found):
        raise ConfigError(f"{option}={name!r} is a {type(found).__name__}, which cannot be called: name a function")
    function_found: Callable[..., object] = found
    return function_found
