"""The optional packages of the engine: how to install an extra into this installation, and whether versions fit.

Called wherever a package may be missing. Reads only the metadata of installed distributions.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from engine.errors import ConfigError

NAME = "step-engine"
EXTRAS = {
    "ray": "ray",
    **dict.fromkeys(
        ("torch", "transformers", "tokenizers", "safetensors", "jinja2", "pyarrow", "numpy", "peft"), "train"
    ),
    **dict.fromkeys(("textual", "shtab"), "inspect"),
    "optuna": "tune",
}
"""The extra that installs each optional package."""
FOR_RUNS = ("ray", "train")


def install_command(*extras: str) -> str:
    """A shell command that installs extras into this environment, from where the engine itself was installed, with the
    versions that a clone lists."""
    source, editable = _source()
    versions = Path(source) / ("constraints-gpu.txt" if "vllm" in extras else "constraints.txt")
    listed = f"-c {shlex.quote(str(versions))} " if versions.is_file() else ""
    wanted = shlex.quote(f"{source}[{','.join(extras)}]")
    return f"{shlex.quote(sys.executable)} -m pip install {listed}{'-e ' * editable}{wanted}"


def _source() -> tuple[str, bool]:
    """The directory or wheel from which pip installed the engine, else its name; and whether it is a clone in place."""
    from importlib import metadata  # late: it takes longer to load than everything else here

    clone = Path(__file__).resolve().parents[1]
    try:
        found = json.loads(metadata.distribution(NAME).read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return str(clone), True
    path = Path(unquote(urlsplit(found.get("url", "")).path))
    if not found.get("url", "").startswith("file:") or not path.exists():
        in_clone = (clone / "pyproject.toml").is_file()  # whose egg-info, found first, does not say where it is from
        return (str(clone), True) if in_clone else (NAME, False)
    return str(path), bool(found.get("dir_info", {}).get("editable"))


def missing_package(name: str, extras: Sequence[str] = ()) -> str:
    """The message if a package of an extra is not installed. `extras`: all extras that the caller needs, if more."""
    wanted = install_command(*(extras or (EXTRAS[name],)))
    return f"this needs the package {name}, which is not installed; run `{wanted}`"


def require_packages(*names: str) -> None:
    """Raises: `ModuleNotFoundError` for a package that is not installed, `ConfigError` for a version that does not
    fit."""
    for name in names:
        if find_spec(name) is None:
            raise ModuleNotFoundError(missing_package(name, FOR_RUNS), name=name)
    require_versions()


def require_versions() -> None:
    """Raises: `ConfigError` if an installed package of `FOR_RUNS` has a version that the engine cannot use."""
    from importlib import metadata

    try:
        from packaging.requirements import Requirement

        wanted = [Requirement(text) for text in metadata.requires(NAME) or ()]
    except (ImportError, metadata.PackageNotFoundError):
        return
    for one in wanted:
        if one.marker is not None and not any(one.marker.evaluate({"extra": extra}) for extra in ("", *FOR_RUNS)):
            continue
        try:
            version = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            continue
        if not one.specifier.contains(version, prereleases=True):
            law = f"is not a version that this engine can use: it needs {one.name}{one.specifier}"
            raise ConfigError(f"package {one.name}", version, law, f"run `{install_command(*FOR_RUNS)}`")
