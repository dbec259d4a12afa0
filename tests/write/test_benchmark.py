"""The benchmark of writing, small: its contenders of ours run, and it sees what differs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.writing import content, ours_mds, ours_tar, ratios


def test_what_the_benchmark_writes_is_compared_by_its_content(tmp_path: Path) -> None:
    for name, write in (("mds", ours_mds), ("tar", ours_tar)):
        for folder, number in (("a", 5), ("b", 5), ("c", 6)):
            write(tmp_path / name / folder, number, 100)
        first, second, third = (content(tmp_path / name / folder) for folder in "abc")
        assert first == second != third


def test_a_ratio_of_the_benchmark_leaves_out_what_all_contenders_pay() -> None:
    found = {
        "none": [{"cpu_seconds": 1.0}],
        "mds sqlstream": [{"cpu_seconds": 2.0, "mb_per_second": 300.0}],
        "mds MosaicML": [{"cpu_seconds": 4.0, "mb_per_second": 200.0}],
        "tar sqlstream": [{"cpu_seconds": 2.0}],
    }
    assert ratios(found) == {
        "mds: CPU of mds MosaicML / mds sqlstream": [3.0],
        "mds: MB/s of mds sqlstream / mds MosaicML": [1.5],
    }
