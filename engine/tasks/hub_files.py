"""Data files of a dataset on the Hugging Face hub, downloaded once into its local cache.

    hf://datasets/openai/gsm8k/main/train-*.parquet
    hf://datasets/openai/gsm8k@v1.0/main/train-*.parquet          a revision: a commit, branch or tag

Called by `data_files.py`. Without a connection, the cache serves.
"""

import glob
import re
from pathlib import Path

from engine.errors import ConfigError, reason_of
from engine.extras import require_packages

HUB = "hf://"
"""How the address of a file on the hub begins."""
FORM = "hf://datasets/OWNER/NAME/FILE, where FILE may be a glob"
_ADDRESS = re.compile(
    r"hf://datasets/(?P<name>[^/@]+/[^/@]+)(@(?P<revision>refs/(convert|pr)/[^/]+|[^/]+))?/(?P<files>.+)"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def download_files(address: str, config_field: str) -> Path:
    """The path, or the glob, of the files in the local cache.

    Raises: `ConfigError` for an address of another form, for a dataset that is neither in the cache nor on the hub, and
    for files that it does not have.
    """
    require_packages("huggingface_hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    parts = _ADDRESS.fullmatch(address)
    if parts is None:
        raise ConfigError(config_field, address, "is not an address of dataset files on the hub", f"give {FORM}")
    name, revision, files = parts["name"], parts["revision"], parts["files"]
    wanted = [files, files.replace("**/", "")]  # the hub's ** matches at least one folder
    try:
        folder = snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=wanted)
    except HfHubHTTPError as error:
        status = "" if error.response is None else f" (HTTP {error.response.status_code})"
        fix = "correct the name or the revision; for a gated or private dataset, run `hf auth login`"
        raise ConfigError(config_field, address, f"the hub refuses this dataset{status}", fix) from error
    except Exception as error:  # whatever its HTTP client raises without a connection
        law = f"is not in the local cache, and cannot be downloaded: {reason_of(error.__cause__ or error)}"
        at = f" --revision {revision}" if revision else ""
        fix = f"download it where there is a connection: hf download {name} --repo-type dataset{at} --include '{files}'"
        raise ConfigError(config_field, address, law, fix) from error
    found = Path(glob.escape(folder)) / files
    if not glob.glob(str(found), recursive=True):
        raise ConfigError(config_field, address, "matches no file of the dataset", f"look at the files of {name}")
    return found if glob.has_magic(files) else Path(folder) / files


def names_commit(address: str) -> bool:
    """Whether its files can never change."""
    parts = _ADDRESS.fullmatch(address)
    return parts is not None and bool(_COMMIT.fullmatch(parts["revision"] or ""))
