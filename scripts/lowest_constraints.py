"""Prints constraints for pip: of each package that pyproject.toml names, the lowest version that it allows.

torch is left as the Makefile installs it: its older builds bring gigabytes of CUDA.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement


def lowest(requirements: list[str]) -> list[str]:
    """Return a pin for each requirement that has a lowest version."""
    pins = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.name.startswith("torch"):  # torch's own, which go with it
            continue
        pins += [f"{requirement.name}=={bound.version}" for bound in requirement.specifier if bound.operator == ">="]
    return pins


def main() -> None:
    """Print them."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    of_users = [text for extra, texts in optional.items() if extra not in ("demo", "dev") for text in texts]
    print("\n".join(sorted(set(lowest(project["dependencies"] + of_users)))))


if __name__ == "__main__":
    main()
