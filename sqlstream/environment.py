"""What is read from environment variables, whenever it is asked for; the only place that reads and sets them."""

from __future__ import annotations

import os
import re
import site
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlstream.errors import ConfigError


def default_cache_directory() -> Path:
    """Return `$SQLSTREAM_CACHE`, else `sqlstream` in the user's cache directory (XDG); never /tmp, which others may write.

    Raises:
        ConfigError: The user has no home directory, as in some containers.
    """
    if explicit := os.environ.get("SQLSTREAM_CACHE"):
        return Path(explicit)
    directory = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if directory == "~/.cache":
        raise ConfigError("this user has no home directory for a cache: give dst, or set SQLSTREAM_CACHE")
    return Path(directory) / "sqlstream"


def whole_environment() -> dict[str, str]:
    """Return all environment variables, as they are now."""
    return dict(os.environ)


def environment(*names: str, of: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return those of the named environment variables that are set and not empty, as they are now, or as they were in `of`."""
    variables = os.environ if of is None else of
    return {name: value for name in names if (value := variables.get(name))}


def bypass_proxies(host: str) -> None:
    """Have this process, and those that it starts, reach a host without the proxies that the environment names."""
    excluded = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{excluded},{host}" if excluded else host


def child_environment() -> dict[str, str]:
    """Return the environment for a Python child that imports the same `sqlstream` as we do.

    Where packages are installed a child looks by itself, behind the standard library: in PYTHONPATH they would come before it,
    and old backports (`pathlib`, `argparse`, `asyncio`) in its place.
    """
    package_root, inherited = str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")
    installed = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    if package_root in map(os.path.realpath, installed):
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": f"{package_root}{os.pathsep}{inherited}" if inherited else package_root}


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherRank:
    """What the launcher of this process told it through environment variables."""

    launcher: str
    """`torchrun`, `SLURM` or `Open MPI`."""
    rank: int
    """This process among all of the job."""
    world_size: int
    """Processes of the job."""
    local_rank: int | None
    """This process among those of its node; None: not told."""
    local_world_size: int | None
    """Processes of this node; None: not told."""
    node: int | None
    """This node among all of the job; None: not told."""
    num_nodes: int | None
    """Nodes of the job; None: not told."""


# launcher, then the variables of rank, world_size, local_rank, local_world_size, node, num_nodes ("": the launcher has none).
# The innermost launcher first: mpirun starts its daemons by srun, whose variables its processes inherit.
# Only `srun` sets the STEP variables: sbatch gives its script SLURM_NTASKS and SLURM_PROCID=0, though it is a single process.
_LAUNCHER_VARIABLES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    (
        *("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "", ""),
    ),
    ("SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
    ("SLURM", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_NODEID", "SLURM_NNODES"),
)


def read_launcher_rank(*, must_be_whole: bool = True) -> LauncherRank | None:
    """Return what torchrun, SLURM's srun or Open MPI's mpirun told this process; None without a launcher.

    Args:
        must_be_whole: Refuse a job of which only RANK or only WORLD_SIZE is told: every process would read all data. False for
            those who know both from elsewhere (Lightning sets WORLD_SIZE alone, then initialises torch.distributed).

    Raises:
        ConfigError: A variable is not a number, or one is missing.
    """
    for launcher, *names in _LAUNCHER_VARIABLES:
        if names[1] == "SLURM_NTASKS" and "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ:
            continue  # the body of a batch script: not a task of any step
        rank, world_size, local_rank, local_world_size, node, num_nodes = (_integer_variable(name) for name in names)
        if rank is not None and world_size is not None:
            if launcher == "SLURM":
                local_world_size = _slurm_tasks_of_node(node)
            return LauncherRank(
                launcher=launcher,
                rank=rank,
                world_size=world_size,
                local_rank=local_rank,
                local_world_size=local_world_size,
                node=node,
                num_nodes=num_nodes,
            )
        if must_be_whole and launcher == "torchrun" and ((rank or 0) > 0 or (world_size or 1) > 1):
            present, absent = ("RANK", "WORLD_SIZE") if world_size is None else ("WORLD_SIZE", "RANK")
            raise ConfigError(
                f"{present}={os.environ[present]} is set but {absent} is not, so this process's share of the data is unknown: "
                f"set {absent}, start with torchrun, or initialise torch.distributed first"
            )
    return None


def _integer_variable(name: str) -> int | None:
    """Return an environment variable as a number; None if it is not set, or has no name."""
    text = os.environ.get(name, "") if name else ""
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {name}={text!r} is not a whole number: correct or unset it") from None


def _slurm_tasks_of_node(node: int | None) -> int | None:
    """Return the number of tasks on `node` out of SLURM's `4(x2),3`, which means 4, 4, 3."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE")
    if text is None or node is None:
        return None
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(f"SLURM's tasks per node {text!r} cannot be read: expected a form such as '4(x2),3'")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks[node] if node < len(tasks) else None
