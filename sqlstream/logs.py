"""The level of sqlstream's log where the environment names one; else logging is the program's own to configure."""

from __future__ import annotations

import logging

from sqlstream.environment import environment
from sqlstream.errors import ConfigError

_VARIABLES = ("SQLSTREAM_LOG_LEVEL", "SDS_LOG_LEVEL")
_FORMAT = "%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s"


def configure_logs() -> None:
    """Give the logger `sqlstream` the level of `SQLSTREAM_LOG_LEVEL`, else of `SDS_LOG_LEVEL`; without them change nothing.

    Where no handler is there for its records they go to standard error, as long as the program adds none to the root.

    Raises:
        ConfigError: It is no level.
    """
    for name, text in environment(*_VARIABLES).items():
        level = logging.getLevelNamesMapping().get(text.strip().upper())
        if level is None:
            raise ConfigError(f"environment variable {name}={text!r} is no level: give DEBUG, INFO, WARNING, ERROR or CRITICAL")
        logger = logging.getLogger("sqlstream")
        logger.setLevel(level)
        if not logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter(_FORMAT))
            handler.addFilter(lambda record: not logging.getLogger().handlers)  # noqa: ARG005 - a handler of the root shows it
            logger.addHandler(handler)
        return
