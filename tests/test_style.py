"""The style guide, executable: size budgets, full annotations, tensor shape comments."""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import sqlstream
from sqlstream.transforms import presets

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = sorted(path for folder in ("sqlstream", "migrations") for path in (ROOT / folder).rglob("*.py"))
COMPAT = ROOT / "sqlstream/compat"
FILES = [*PACKAGE, *sorted((ROOT / "tests").rglob("*.py"))]
MAX_FILE, MAX_CLASS, MAX_FUNCTION, MAX_PARAMETERS = 600, 400, 90, 8  # lines, lines, lines, count
MAX_FILES = 14  # of a folder, without its `__init__.py`
LONG_FILE, LONG_CLASS, LONG_FUNCTION = 400, 250, 60  # above them a reviewer asks whether there are two ideas


class LongCodeWarning(UserWarning):
    """Something is longer than most things of its kind; it may stay so."""


SHAPE = re.compile(r"#.*\[[^\]]*\]")  # `# [b, c, h, w]`; `# []` for a scalar tensor
MAKES_TENSOR = re.compile(r"torch\.(?!device|Generator|cuda|distributed|utils|jit|get_|is_|set_)")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def body_lines(node: Function) -> int:
    """Lines of code of a function, docstring left out."""
    has_doc = ast.get_docstring(node) is not None and len(node.body) > 1
    start = node.body[1 if has_doc else 0].lineno
    return (node.end_lineno or start) - start + 1


def parameters(node: Function) -> list[ast.arg]:
    """Every parameter but `self` and `cls`."""
    a = node.args
    named = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    return [p for p in named if p.arg not in ("self", "cls")]


class Source:
    """A file, read, parsed and walked once.

    Args:
        text: the file.
    """

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))


def public_constructors(source: Source) -> set[ast.AST]:
    """Constructors and pipelines that users know by name: they take what users know, as many parameters as that is."""
    public = {*sqlstream.__all__, *presets.__all__}
    constructors: set[ast.AST] = {
        method
        for node in source.nodes
        if isinstance(node, ast.ClassDef) and node.name in public
        for method in node.body
        if isinstance(method, Function) and method.name == "__init__"
    }
    return constructors | {node for node in source.tree.body if isinstance(node, Function) and node.name in presets.__all__}


def size_violations(source: Source, mirrors_a_peer: bool) -> Iterator[str]:
    """What is longer, or takes more parameters, than anything should; and functions without their types.

    Args:
        source: the file.
        mirrors_a_peer: it is of `compat/`, where a function has as many parameters as the peer's.
    """
    unbounded = set(source.nodes) if mirrors_a_peer else public_constructors(source)
    yield from longer_than(MAX_FILE, MAX_CLASS, MAX_FUNCTION, source)
    for node in source.nodes:
        if isinstance(node, Function) and node not in unbounded and (n := len(parameters(node))) > MAX_PARAMETERS:
            yield f"{node.lineno}: {node.name} takes {n} parameters > {MAX_PARAMETERS}"
        if isinstance(node, Function) and (node.returns is None or any(p.annotation is None for p in parameters(node))):
            yield f"{node.lineno}: {node.name} is not fully annotated"


def longer_than(file: int, class_: int, function: int, source: Source) -> Iterator[str]:
    """Files, classes and functions with more lines than so many."""
    if len(source.lines) > file:
        yield f"1: file has {len(source.lines)} lines > {file}"
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and (n := (node.end_lineno or 0) - node.lineno + 1) > class_:
            yield f"{node.lineno}: class {node.name} has {n} lines > {class_}"
        if isinstance(node, Function) and (n := body_lines(node)) > function:
            yield f"{node.lineno}: {node.name} has {n} lines > {function}"


def tensor_lines(source: Source) -> Iterator[int]:
    """Lines which bind a tensor: annotated `Tensor`, or assigned from a `torch.*` call."""
    for node in source.nodes:
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            if re.search(r"\bTensor\b", ast.unparse(node.annotation)):
                yield node.lineno
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and MAKES_TENSOR.match(ast.unparse(node.value.func))
        ):
            yield node.end_lineno or node.lineno


def violations(source: Source, mirrors_a_peer: bool = False) -> list[str]:
    """Every broken rule of one file, as `line: rule`."""
    shapeless = [f"{n}: tensor without shape comment" for n in tensor_lines(source) if not SHAPE.search(source.lines[n - 1])]
    return [*size_violations(source, mirrors_a_peer), *shapeless]


def test_a_folder_can_be_said_in_one_sentence() -> None:
    num_files = Counter(path.parent.relative_to(ROOT).as_posix() for path in PACKAGE if path.name != "__init__.py")
    del num_files["sqlstream/transforms"], num_files["migrations/versions"]  # of one kind each
    assert [folder for folder, num in num_files.items() if num > MAX_FILES] == [], "group its files by idea"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_keeps_the_style_guide(path: Path) -> None:
    source = Source(path.read_text())
    assert violations(source, mirrors_a_peer=COMPAT in path.parents) == []
    long = list(longer_than(LONG_FILE, LONG_CLASS, LONG_FUNCTION, source))
    if long:
        warnings.warn(f"{path.relative_to(ROOT)}: {', '.join(long)}: is it more than one idea?", LongCodeWarning, stacklevel=1)


def test_parameters_of_statements_have_no_numbers() -> None:
    """Python 3.12.0 to 3.12.3 takes `?1` for a name, and warns of each statement that is given a sequence for it."""
    numbered = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in PACKAGE
        for node in Source(path.read_text()).nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"[ (]\?\d", node.value)
    ]
    assert numbered == []


def test_a_class_name_occurs_once_in_the_package() -> None:
    """But for `compat/`, which has the names of the peers."""
    homes: dict[str, list[str]] = {}
    for path in (path for path in PACKAGE if COMPAT not in path.parents):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
