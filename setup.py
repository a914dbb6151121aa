"""Adds to the wheel what pyproject.toml cannot: configs/ and dashboards/, as data of the package `engine`.

In a clone they stay where they are; `engine.cli.shipped_files` finds both places.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = {
    "configs": ("*.yaml", "workloads/*.yaml"),
    "dashboards": ("prometheus.yml", "alerts.yml", "compose.yaml", "generated/*.json", "grafana/**/*.yaml"),
}


class BuildWithShippedFiles(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        root = Path(__file__).resolve().parent
        for folder, patterns in SHIPPED.items():
            for file in sorted(file for pattern in patterns for file in (root / folder).glob(pattern)):
                target = Path(self.build_lib) / "engine" / "shipped" / file.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)


setup(cmdclass={"build_py": BuildWithShippedFiles})
