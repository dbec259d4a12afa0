"""Decoders of fields by their extensions: those of `DecodeByExtension`, and functions of the user before them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sqlstream.errors import DecodeError
from sqlstream.transforms.decode_by_extension import IMAGE_EXTENSIONS as _IMAGE_EXTENSIONS
from sqlstream.transforms.decode_by_extension import IMAGE_FORMS, DecodeByExtension

DecodingError = DecodeError
IMAGE_EXTENSIONS = sorted(_IMAGE_EXTENSIONS)

FieldDecoder = Callable[[str, bytes], Any]
"""From the name of a field, with a dot before it, and its content to a value; None: another one decodes it."""


class Continue:
    """What a decoder returns to have others go on, with another name or other content."""

    def __init__(self, key: str, data: Any) -> None:
        self.key, self.data = key, data


class ImageHandler:
    """Decodes images, as one of the names `l8 rgb rgba8 torchrgb pil …` says.

    Args:
        imagespec: The name.
        extensions: Extensions of the fields that it decodes.
    """

    calls_given_code = False

    def __init__(self, imagespec: str, extensions: Collection[str] = IMAGE_EXTENSIONS) -> None:
        if imagespec not in IMAGE_FORMS or imagespec.startswith("wids"):
            known = ", ".join(name for name in IMAGE_FORMS if not name.startswith("wids"))
            raise ValueError(f"imagespec={imagespec!r} is unknown: give one of {known}")
        self.imagespec = imagespec
        self.extensions = set(extensions)
        self._decode = DecodeByExtension(imagespec)

    def __call__(self, key: str, data: bytes) -> Any:
        """Return the image; None: the field is none."""
        if key.rpartition(".")[2].lower() not in self.extensions:
            return None
        return self._decode({"png": data})["png"]  # Pillow finds out what it is


def imagehandler(imagespec: str, extensions: Collection[str] = IMAGE_EXTENSIONS) -> ImageHandler:
    """Return a decoder of images."""
    return ImageHandler(imagespec, extensions)


def call_extension_handler(key: str, data: Any, f: Callable[[Any], Any], extensions: Sequence[str]) -> Any:
    """Return what a function makes of a field whose name ends with one of the extensions; else None."""
    parts = key.lower().split(".")
    for extension in extensions:
        wanted = extension.split(".")
        if len(wanted) <= len(parts) and parts[-len(wanted) :] == wanted:
            return f(data)
    return None


def handle_extension(extensions: str, f: Callable[[Any], Any]) -> FieldDecoder:
    """Return a decoder for fields of these extensions, a text with spaces: `handle_extension("seg.jpg", decode_mask)`."""
    return partial(call_extension_handler, f=f, extensions=extensions.lower().split())


_DECODE = DecodeByExtension()


def gzfilter(key: str, data: bytes) -> Continue | None:
    """Decompress a field that ends with `.gz`, and have others decode it by the extension before that."""
    if not key.endswith(".gz"):
        return None
    return Continue(key[:-3], _DECODE({"gz": data})["gz"])


def basichandlers(key: str, data: bytes) -> Any:
    """Decode texts, numbers, JSON, arrays and the like; None for other fields. Pickles are refused."""
    extension = key.rpartition(".")[2]
    if extension == "gz":
        return None
    made = _DECODE({extension: data})[extension]
    return None if made is data else made


def torch_video(key: str, data: bytes) -> Any:
    """Decode a video with torchvision: frames, sound and what is known of them."""
    extension = key.rpartition(".")[2]
    if extension not in {"mp4", "ogv", "mjpeg", "avi", "mov", "h264", "mpg", "webm", "wmv"}:
        return None
    import torchvision.io  # type: ignore[import-not-found,unused-ignore]  # their dependency, and none of ours

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file.{extension}"
        path.write_bytes(data)
        return torchvision.io.read_video(str(path), pts_unit="sec")


def torch_audio(key: str, data: bytes) -> Any:
    """Decode sound with torchaudio: samples and their rate."""
    extension = key.rpartition(".")[2]
    if extension not in {"flac", "mp3", "sox", "wav", "m4a", "ogg", "wma"}:
        return None
    import torchaudio  # type: ignore[import-not-found,import-untyped,unused-ignore]  # theirs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file.{extension}"
        path.write_bytes(data)
        return torchaudio.load(str(path))


_OURS = (gzfilter, basichandlers, torch_video, torch_audio)
"""Decoders that draw nothing."""


def _is_of_extension(handler: Any) -> bool:
    """Return whether `handle_extension` has made it, and it calls a function of the user."""
    return isinstance(handler, partial) and handler.func is call_extension_handler


class Decoder:
    """Decodes the fields of a sample: the first handler that returns something other than None decides.

    Without functions of the user that is `DecodeByExtension`, field by field.

    Args:
        handlers: Decoders of fields.
        pre: Decoders before them; None: `gzfilter`.
        post: Decoders behind them; None: `basichandlers`.
        only: Names of the fields to decode; None: all.
        partial: Leave fields alone that are no bytes; False: an error.
    """

    def __init__(
        self,
        handlers: list[Any],
        pre: list[Any] | None = None,
        post: list[Any] | None = None,
        only: str | Sequence[str] | None = None,
        partial: bool = False,
    ) -> None:
        if wrong := [some for some in (*handlers, *(pre or ()), *(post or ())) if not callable(some)]:
            raise ValueError(f"decode({wrong[0]!r}): a decoder is a name of an image format, or a function of (key, data)")
        names = only.split() if isinstance(only, str) else only
        self.only = None if names is None else frozenset(names)
        self.partial = partial
        self.handlers = [*(pre if pre is not None else [gzfilter]), *handlers, *(post if post is not None else [basichandlers])]
        images = [some for some in handlers if type(some) is ImageHandler and some.extensions == _IMAGE_EXTENSIONS]
        self.whole: DecodeByExtension | None = None
        """What decodes a sample where there are no functions of the user."""
        if pre is None and post is None and len(images) == len(handlers):
            self.whole = DecodeByExtension(images[0].imagespec if images else None, only=names, partial=partial)
        self.calls_given_code = self.whole is None

    @property
    def given(self) -> tuple[FieldDecoder, ...]:
        """The functions of the user among its handlers."""
        if self.whole is not None:
            return ()
        called = (some.keywords["f"] if _is_of_extension(some) else some for some in self.handlers)
        return tuple(some for some in called if type(some) is not ImageHandler and not any(some is own for own in _OURS))

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return the sample with its fields decoded."""
        return self.decode(sample)

    def decode(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return the sample with its fields decoded.

        Raises:
            DecodingError: A field does not decode, is a pickle, or holds no bytes.
        """
        if self.whole is not None:
            made = self.whole(sample.copy())  # a stage before it may give the same one again
            for name, value in made.items():
                if name[:2] == "__" and isinstance(value, bytes):
                    made[name] = _as_text(value)
            return made
        return {name: self._field(sample, name, value) for name, value in sample.items()}

    def _field(self, sample: dict[str, Any], name: str, value: Any) -> Any:
        if name.startswith("__"):
            return _as_text(value)
        if self.only is not None and name not in self.only:
            return value
        try:
            if not isinstance(value, bytes):
                if self.partial:
                    return value
                raise DecodeError(f"expected bytes, got {type(value).__name__}: say partial=True, or only=[…]")
            return self.decode1(name, value)
        except Exception as error:
            raise DecodeError(f"{name!r} of sample {sample.get('__key__')!r} does not decode: {error}") from error

    def decode1(self, key: str, data: Any) -> Any:
        """Return the value of a field."""
        key = "." + key
        for handler in self.handlers:
            made = handler(key, data)
            if isinstance(made, Continue):
                key, data = made.key, made.data
            elif made is not None:
                return made
        return data

    def __repr__(self) -> str:
        """Return what it decodes."""
        default = (gzfilter, basichandlers)
        shown = [_named(some) for some in self.handlers if some not in default]
        return f"decode({', '.join(shown)})"


def _as_text(value: Any) -> Any:
    """Return what a sample says of itself as text; bytes that are none stay."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def _named(handler: Any) -> str:
    if isinstance(handler, partial):
        return f"handle_extension({' '.join(handler.keywords.get('extensions', ()))})"
    return str(getattr(handler, "imagespec", None) or getattr(handler, "__qualname__", repr(handler)))


default_decoder = Decoder([])
