"""What names shards: braces, `::` and variables as WebDataset expands them, and commands that name a URL."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import chain, product

from sqlstream.environment import whole_environment
from sqlstream.errors import ConfigError
from sqlstream.storage.base import urls

MAX_SHARDS = 10_000_000
"""Most URLs of one text; more is a slip of the pen, and would fill the memory."""

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_MAX_DEPTH = 10
"""Variables in variables: so often WebDataset replaces them."""
_NUMBERS = re.compile(r"(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})(?:\.\.-?([0-9]{1,18}))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?([0-9]{1,18}))?")
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SIGN = re.compile(r"\\.|[{},]|[^\\{},]+|\\$", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_OPTIONS = {
    ("aws", "s3", "cp"): ("--quiet", "--only-show-errors", "--no-progress"),
    ("gsutil", "cat"): (),
    ("gsutil", "-q", "cat"): (),
    ("gsutil", "-m", "cat"): (),
    ("gcloud", "storage", "cat"): (),
    ("curl",): ("--silent", "--show-error", "--location", "--fail"),
    ("cat",): (),
}
"""Commands that print one object, and the options that do not choose what is read or how."""
_STARTS = {"aws": "s3://", "gsutil": "gs://", "gcloud": "gs://", "curl": "http"}
_CURL_FLAGS = re.compile(r"-[sSLf]+")
_SHELL = re.compile(r"[$`]|(^|\s)~")
"""What a shell replaces, also within quotes."""


def expand(text: str, variables: Mapping[str, str] | None = None) -> list[str]:
    r"""Return the shards that a text names, as WebDataset does: split at `::`, then variables, then braces.

    Args:
        text: `s-{000000..000127}.tar`, `{a,b}/{0..9..3}.tar::c.tar`, `${DIR}/x.tar`; `\{` is no brace.
        variables: Environment variables, of which `${DIR}` is `WDS_DIR`; None: those of this process.

    Raises:
        ConfigError: A brace is not closed, a variable is not set, or there are more than `MAX_SHARDS`.

    Example:
        >>> expand("s-{08..11..2}.tar::t-{a,b}.tar")
        ['s-08.tar', 's-10.tar', 't-a.tar', 't-b.tar']
    """
    found: list[str] = []
    for part in text.split("::"):
        for shard in _braces(_with_variables(part, variables)):
            if len(found) == MAX_SHARDS:
                raise ConfigError(f"{shown(text)} names more than {MAX_SHARDS} shards: check its braces")
            found.append(_ESCAPED.sub(r"\1", shard))
    return found


def url_of(shard: str, *, allow_pipes: bool = False) -> str:
    """Return the URL or path that a command names, for commands that only print an object; what is no command stays.

    Args:
        shard: A URL, a path, or `pipe:` and a command.
        allow_pipes: A command that does more, or has options that choose how the object is read, stays, and is to be run.

    Raises:
        ConfigError: It does, and is not to be run.

    Example:
        >>> url_of("pipe:aws s3 cp s3://bucket/000.tar -"), url_of("pipe:curl -s -L 'https://host/0.tar?x=1&y=2'")
        ('s3://bucket/000.tar', 'https://host/0.tar?x=1&y=2')
    """
    if not shard.startswith(urls.COMMAND):
        return shard
    command = shard.removeprefix(urls.COMMAND).strip()
    if (named := _named_by(command)) is not None:
        return named
    if allow_pipes and command:
        return urls.COMMAND + command
    raise ConfigError(
        f"{shown(shard)} is a command, and no program is run unless that is asked for: give the URL that it reads, with "
        "storage_options for its credentials, or source_options={'allow_pipes': True} if you trust it"
    )


def _named_by(command: str) -> str | None:
    """Return what a command prints, if it does nothing else."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:  # a quote is not closed
        return None
    for start, options in _OPTIONS.items():
        if tuple(words[: len(start)]) != start or _SHELL.search(command):
            continue
        is_curl = start == ("curl",)
        rest = [word for word in words[len(start) :] if word not in options and not (is_curl and _CURL_FLAGS.fullmatch(word))]
        printed = rest[:-1] if start[0] == "aws" and rest[-1:] in (["-"], ["/dev/stdout"]) else rest
        is_one = len(printed) == 1 and (start[0] != "aws" or len(rest) == 2)
        if is_one and printed[0].startswith(_STARTS.get(start[0], "")) and not printed[0].startswith("-"):
            return printed[0]
    return None


def _with_variables(part: str, variables: Mapping[str, str] | None) -> str:
    """Return a text with `${NAME}` replaced by the variable `WDS_NAME`, whose value may name others."""
    for _ in range(_MAX_DEPTH):
        if not _VARIABLE.search(part):
            break
        known = whole_environment() if variables is None else variables
        for name in set(_VARIABLE.findall(part)):
            if f"WDS_{name}" not in known:
                raise ConfigError(f"{shown(part)} needs the environment variable WDS_{name}, which is not set")
            part = part.replace(f"${{{name}}}", known[f"WDS_{name}"])
    return part


def _braces(text: str) -> Iterator[str]:
    """Yield what a text with braces stands for; braces with one word in them stay as they are."""
    pieces: list[list[str]] = []
    depth, body, count = 0, "", 1
    for sign in _SIGN.findall(text):
        depth += (sign == "{") - (sign == "}")
        if depth < 0:
            break
        if depth == 0 and sign == "}":
            pieces.append(_alternatives(body[1:], text))
            body, count = "", count * len(pieces[-1])
            if count > MAX_SHARDS:
                raise ConfigError(f"{shown(text)} names more than {MAX_SHARDS} shards: check its braces")
        elif depth == 0:
            pieces.append([sign])
        else:
            body += sign
    if depth:
        raise ConfigError(f"{shown(text)} has braces that do not match: write \\{{ for a brace that is part of a name")
    return map("".join, product(*pieces))


def _alternatives(body: str, text: str) -> list[str]:
    """Return what stands for braces with this body."""
    if match := _NUMBERS.fullmatch(body):
        first, last = match[1], match[2]
        is_padded = any(number.lstrip("-").startswith("0") and number.lstrip("-") != "0" for number in (first, last))
        width = max(len(first), len(last)) if is_padded else 0
        return [f"{number:0{width}d}" for number in _steps(int(first), int(last), match[3], text)]
    if match := _LETTERS.fullmatch(body):
        return [_ALPHABET[place] for place in _steps(_ALPHABET.index(match[1]), _ALPHABET.index(match[2]), match[3], text)]
    words, depth = [""], 0
    for sign in _SIGN.findall(body):
        depth += (sign == "{") - (sign == "}")
        if sign == "," and depth == 0:
            words.append("")
        else:
            words[-1] += sign
    if len(words) == 1:
        return [f"{{{inner}}}" for inner in _braces(body)]
    return list(chain.from_iterable(map(_braces, words)))


def _steps(first: int, last: int, step: str | None, text: str) -> range:
    by = int(step or 1) or 1
    steps = range(first, last + 1, by) if first < last else range(first, last - 1, -by)
    if len(steps) > MAX_SHARDS:
        raise ConfigError(f"{shown(text)} names more than {MAX_SHARDS} shards: check its braces")
    return steps


def shown(text: str) -> str:
    """Return a text for messages: cut, without credentials."""
    return repr((urls.redact(text) if urls.is_command(text) else urls.redact_text(text))[:300])
