"""SQLite's own system calls, failing or fatal on cue: what an error code made up in Python cannot show.

SQLite lets its calls of the operating system be replaced, for its own tests (`xSetSystemCall` of a VFS); its answers to a
failing `write` are then its own: which error, which rollback, which state of its files.
"""

from __future__ import annotations

import _sqlite3
import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from sqlstream.errors import MissingDependencyError

_SIGNATURES: dict[bytes, Any] = {
    b"open": (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    b"read": (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t),
    b"pread64": (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64),
    b"write": (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t),
    b"pwrite64": (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64),
    b"ftruncate": (ctypes.c_int, ctypes.c_int, ctypes.c_int64),
    b"unlink": (ctypes.c_int, ctypes.c_char_p),
}
"""Answer and arguments of those that reach a file's bytes or its name; syncs cannot be replaced."""


class _Vfs(ctypes.Structure):
    """`sqlite3_vfs`, version 3 (sqlite.org/c3ref/vfs.html)."""


_Pointer = ctypes.c_void_p
_Vfs._fields_ = [
    ("version", ctypes.c_int),
    ("file_size", ctypes.c_int),
    ("longest_path", ctypes.c_int),
    ("next", _Pointer),
    ("name", ctypes.c_char_p),
    ("data", _Pointer),
    ("methods", _Pointer * 13),
    ("set_system_call", ctypes.CFUNCTYPE(ctypes.c_int, _Pointer, ctypes.c_char_p, _Pointer)),
    ("get_system_call", ctypes.CFUNCTYPE(_Pointer, _Pointer, ctypes.c_char_p)),
    ("next_system_call", _Pointer),
]


@contextlib.contextmanager
def sqlite_system_calls(note: Callable[[str], object], seen_as: Mapping[int, int] = MappingProxyType({})) -> Iterator[None]:
    """Call `note` before each system call of SQLite in this process, while the body runs; an OSError makes that call fail.

    Args:
        note: Takes the name of the call (`open`, `read`, `write`, `ftruncate`, `unlink`, …); `SideEffects.note`, say.
        seen_as: What SQLite sees in place of the errno of a call that fails by itself (`{ENOSPC: EDQUOT}`, say).

    Raises:
        MissingDependencyError: This Python has SQLite built in, where its calls are out of reach.
    """
    try:
        find = ctypes.CDLL(_sqlite3.__file__).sqlite3_vfs_find
    except (AttributeError, OSError) as error:
        raise MissingDependencyError("sqlite_system_calls needs a Python that loads SQLite as a shared library") from error
    find.restype, find.argtypes = ctypes.POINTER(_Vfs), [ctypes.c_char_p]
    vfs = find(None)
    address = ctypes.cast(vfs, _Pointer)
    kept = []
    try:
        for name, signature in _SIGNATURES.items():
            original = vfs.contents.get_system_call(address, name)
            if original:
                kept.append(_replacement(name.decode(), signature, original, note, seen_as))
                vfs.contents.set_system_call(address, name, ctypes.cast(kept[-1], _Pointer))
        yield
    finally:
        vfs.contents.set_system_call(address, None, None)  # all as they were


def _replacement(name: str, signature: Any, original: int, note: Callable[[str], object], seen_as: Mapping[int, int]) -> Any:
    function_type = ctypes.CFUNCTYPE(*signature, use_errno=True)
    call_original = function_type(original)

    def call(*arguments: Any) -> int:
        try:
            note(name)
        except OSError as error:
            ctypes.set_errno(error.errno or 0)
            return -1
        answer = int(call_original(*arguments))
        if answer < 0 and (number := ctypes.get_errno()) in seen_as:
            ctypes.set_errno(seen_as[number])
        return answer

    return function_type(call)
