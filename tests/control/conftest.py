from collections.abc import Iterator
from pathlib import Path

import pytest
from control_rig import Rig


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.chdir(tmp_path)
    rig = Rig(tmp_path / "runs" / "20260101-000000-run")
    yield rig
    rig.close()
