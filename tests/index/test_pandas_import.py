"""A fork waits for Arrow's import of pandas by another thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.processes import ROOT

PROGRAM = """
import os, sys, tarfile, traceback
from importlib.abc import MetaPathFinder
from io import BytesIO
from pathlib import Path

from tests.index.lazily import open_lazily, rows_of
from tests.index.sources import all_rows, build

class Recorder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "pandas":
            sys.meta_path.remove(self)
            print(kind, "by load_pandas" if "load_pandas" in [at.name for at in traceback.extract_stack()] else "elsewhere")
            raise ModuleNotFoundError("as if it were not installed", name="pandas")

root = Path(sys.argv[1])
(root / "t.csv").write_text("index,n\\na,1\\nb,2\\n")
(root / "t.jsonl").write_text('{"index": "a", "n": 1}\\n{"index": "b", "n": 2}\\n')
(root / "texts").mkdir()
for name in "ab":
    (root / "texts" / f"{name}.txt").write_text(name)
with tarfile.open(root / "t.tar", "w") as tar:
    for name in "ab":
        member = tarfile.TarInfo(f"{name}.txt")
        member.size = 1
        tar.addfile(member, BytesIO(name.encode()))
if not (pid := os.fork()):
    import pyarrow as pa, pyarrow.parquet as pq

    pq.write_table(pa.table({"index": ["a", "b"], "n": [1, 2]}), root / "t.parquet")
    os._exit(0)
os.waitpid(pid, 0)
sys.meta_path.insert(0, Recorder())
KINDS = {
    "csv": lambda: all_rows(build(root, root / "t.csv")),
    "jsonl": lambda: all_rows(build(root, root / "t.jsonl")),
    "directory": lambda: all_rows(build(root, root / "texts", data_type="text")),
    "memory": lambda: all_rows(build(root, [{"index": "a"}, {"index": "b"}])),
    "tar": lambda: all_rows(build(root, root / "t.tar")),
    "lazy tar": lambda: [open_lazily(root, root / "t.tar")] * 2,
    "parquet": lambda: all_rows(build(root, root / "t.parquet")),
    "lazy parquet": lambda: rows_of(open_lazily(root, root / "t.parquet", where="n + 0 > 0")),
}
for kind, rows in KINDS.items():
    if pid := os.fork():
        os.waitpid(pid, 0)
        continue
    try:
        print(kind, len(rows()))
    except BaseException:
        traceback.print_exc(file=sys.stdout)
    sys.stdout.flush()
    os._exit(0)
"""


def test_arrow_imports_pandas_where_a_fork_waits_for_it_and_for_parquet_and_tars_nowhere(tmp_path: Path) -> None:
    """A child that was forked meanwhile waited for ever, for a lock of Arrow's that a thread of its parent had."""
    said = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = [line for kind in ("csv", "jsonl", "directory", "memory") for line in (f"{kind} by load_pandas", f"{kind} 2")]
    assert said.stdout.splitlines() == [*expected, "tar 2", "lazy tar 2", "parquet 2", "lazy parquet 2"]
