"""A disk so small that it fills, for whoever may mount one."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A file system of its own at `place`."""

    def __init__(self, place: Path, kib: int) -> None:
        self.place = place
        place.mkdir()
        made = mount("-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place))
        if made.returncode:
            pytest.skip(f"a disk of a given size needs the right to mount one: {made.stderr.strip()}")

    def grow(self, kib: int) -> None:
        assert not mount("-o", f"remount,size={kib}k", str(self.place)).returncode


def mount(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)


@contextmanager
def small_disk(place: Path, kib: int) -> Iterator[SmallDisk]:
    disk = SmallDisk(place, kib)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
