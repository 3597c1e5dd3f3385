# SPDX-License-Identifier: Apache-2.0
"""Makes a checkout's own layer over the base environment (see setup_env.sh).

The layer is a virtual environment that holds a patched copy of the `vllm`
package and this checkout in editable form. Everything else it imports from the
base. Parts are made again only when what they were made from has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from vllm_kairos import patching
from vllm_kairos.files import UserError, write_atomically

STATE = "kairos-layer.json"

#: Commands of the layer that are Python: name and what runs them.
PYTHON_COMMANDS = {
    "vllm": "vllm.entrypoints.cli.main:main",
    "pytest": "pytest:main",
    "mypy": "mypy.__main__:console_entry",
    "lm_eval": "lm_eval.__main__:cli_evaluate",
}
#: Commands of the base that are programs of their own.
PROGRAMS = ("ruff",)

# A "#!" line has a length limit and cannot hold a blank, so sh is asked to
# start the interpreter, and Python reads the same line as a string.
SCRIPT = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import sys

from {module} import {function}

if __name__ == "__main__":
    sys.exit({function}())
"""

ENV = """# SPDX-License-Identifier: Apache-2.0
# Source this before `vllm serve`: vLLM's CPU worker does not start without.
export LD_PRELOAD='{preload}'"${{LD_PRELOAD:+:$LD_PRELOAD}}"
export PATH='{bin}':"$PATH"
"""


def fingerprint(*parts: str | Path) -> str:
    """A digest over strings and over the contents of files."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


class Layer:
    """The layer at `path`, and what each part of it was made from."""

    def __init__(self, base: Path, path: Path, sdist: Path, checkout: Path):
        self.base = base
        self.path = path
        self.sdist = sdist
        self.checkout = checkout
        self.python = path / "bin" / "python"
        self.site = path / "lib" / "python3.11" / "site-packages"
        self.base_site = base / "lib" / "python3.11" / "site-packages"
        try:
            self.state = json.loads((path / STATE).read_text())
        except (OSError, ValueError):
            self.state = {}

    def _save(self) -> None:
        text = json.dumps(self.state, indent=2) + "\n"
        write_atomically(self.path / STATE, text.encode())

    def part(self, name: str, made_from: str) -> bool:
        """Whether a part is to be made; it counts as missing until `done`."""
        if self.state.get(name) == made_from:
            return False
        if self.state.pop(name, None) is not None:
            self._save()
        return True

    def done(self, name: str, made_from: str) -> None:
        self.state[name] = made_from
        self._save()

    def make(self) -> None:
        """Make every part that is missing or out of date."""
        own = Path(__file__)
        patches = patching.patch_directory()
        patch_files = [*sorted(patches.glob("*.patch")), Path(patching.__file__)]
        manifest = patches / patching.MANIFEST
        if manifest.exists():
            patch_files.append(manifest)
        parts = (
            ("venv", fingerprint(str(self.base), own), self._venv),
            ("vllm", fingerprint(*patch_files), self._vllm),
            ("source", fingerprint(str(self.sdist), *patch_files), self._source),
            (
                "package",
                fingerprint(
                    self.checkout / "setup.py", self.checkout / "pyproject.toml"
                ),
                self._package,
            ),
        )
        for name, made_from, make in parts:
            if self.part(name, made_from):
                print(f"This checkout's layer: {name}", file=sys.stderr)
                make()
                self.done(name, made_from)

    def _venv(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.state = {}
        run_quietly(
            *(self.base / "bin" / "python", "-m", "venv", "--without-pip", self.path)
        )
        # After the layer's own directory on sys.path, so the layer wins.
        # addsitedir also reads the base's own .pth files.
        (self.site / "kairos-base.pth").write_text(
            f"import site; site.addsitedir({str(self.base_site)!r})\n"
        )
        for name, entry in PYTHON_COMMANDS.items():
            module, function = entry.split(":")
            script = self.path / "bin" / name
            script.write_text(
                SCRIPT.format(python=self.python, module=module, function=function)
            )
            script.chmod(0o755)
        for name in PROGRAMS:
            (self.path / "bin" / name).symlink_to(self.base / "bin" / name)
        preload = (
            f"{find_library('libtcmalloc_minimal.so.4')}:{self.base}/lib/libiomp5.so"
        )
        (self.path / "env.sh").write_text(
            ENV.format(preload=preload, bin=self.path / "bin")
        )
        self.state["ld_preload"] = preload
        self.state["base"] = str(self.base)
        self.state["checkout"] = str(self.checkout)
        self.state["sdist"] = str(self.sdist)

    def _vllm(self) -> None:
        """A copy of the base's vLLM; only its .py files can differ."""

        def copy(source: str, target: str) -> None:
            if source.endswith(".so"):
                os.symlink(source, target)
            else:
                shutil.copy2(source, target)

        # Made aside, so that a process that starts now finds the old or the
        # new package, and a patch that does not apply leaves the old one.
        new, old = self.path / "new", self.path / "old"
        for directory in (new, old):
            shutil.rmtree(directory, ignore_errors=True)
        new.mkdir()
        shutil.copytree(self.base_site / "vllm", new / "vllm", copy_function=copy)
        patching.apply(new)
        target = self.site / "vllm"
        if target.exists():
            target.rename(old)
        (new / "vllm").rename(target)
        for directory in (new, old):
            shutil.rmtree(directory, ignore_errors=True)

    def _source(self) -> None:
        """vLLM's examples and tests, which no wheel carries, patched."""
        new = self.path / "source.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        for name in ("examples", "tests"):
            shutil.copytree(self.sdist / name, new / name)
        for name in ("PKG-INFO", "pyproject.toml"):
            shutil.copy2(self.sdist / name, new / name)
        patches = patching.load_patches(patching.patch_directory())
        files = patching.read_target(new, patches)
        if set(patching.patch_states(new, patches, files).values()) != {"skipped"}:
            patching.apply(new)
        target = self.path / "source"
        shutil.rmtree(target, ignore_errors=True)
        new.rename(target)

    def _package(self) -> None:
        run_quietly(
            *(self.base / "bin" / "python", "-m", "pip"),
            *("--disable-pip-version-check", "--python", self.python),
            *("install", "--no-deps", "--no-build-isolation"),
            *("--no-index", "-e", self.checkout),
        )


def run_quietly(*command: str | Path) -> None:
    """Run a command whose output matters only if it fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.stderr.write(done.stdout)
        raise subprocess.CalledProcessError(done.returncode, command)


def find_library(name: str) -> str:
    """Path of a shared library that the loader knows."""
    ldconfig = shutil.which("ldconfig", path=f"{os.environ['PATH']}:/sbin:/usr/sbin")
    if ldconfig:
        known = subprocess.run(
            [ldconfig, "-p"], capture_output=True, text=True, check=True
        )
        for line in known.stdout.splitlines():
            if line.split()[:1] == [name]:
                return line.split(" => ")[-1].strip()
    raise UserError(f"no library {name} found, install libtcmalloc-minimal4")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("base", "layer", "sdist", "checkout"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    try:
        Layer(args.base, args.layer, args.sdist, args.checkout).make()
    except UserError as error:
        print(f"setup_env.sh: error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        print(
            f"setup_env.sh: error: exit code {error.returncode} from: {command}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
