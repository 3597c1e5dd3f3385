# SPDX-License-Identifier: Apache-2.0
"""Writes patches/manifest.json from the patches and a pristine vLLM tree.

Run after a patch was added or changed:
    ci/setup_env.sh --print-sdist | xargs python ci/patch_manifest.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from vllm_kairos import patching, unified_diff
from vllm_kairos.files import UserError, write_atomically


def manifest_of(directory: Path, tree: Path) -> patching.Manifest:
    """The manifest of a directory's patches, applied in turn to a tree.

    Raises:
        UserError: A patch cannot be read, or does not apply to the tree.
    """
    contents: dict[str, bytes] = {}
    entries = []
    for file in sorted(directory.glob("*.patch")):
        text = file.read_bytes()
        hashes = {}
        try:
            for diff in unified_diff.parse(text):
                if diff.path not in contents:
                    contents[diff.path] = (tree / diff.path).read_bytes()
                before = contents[diff.path]
                after = contents[diff.path] = diff.apply(before)
                if diff.revert(after) != before:
                    raise ValueError(f"{diff.path}: does not revert")
                hashes[diff.path] = patching.FileHashes(
                    patching.sha256(before), patching.sha256(after)
                )
        except (OSError, ValueError) as error:
            raise UserError(f"{file.name}: {error}") from error
        entries.append(patching.PatchEntry(file.name, patching.sha256(text), hashes))
    return patching.Manifest(patching.VLLM_VERSION, entries)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, help="vLLM's source tree as released")
    parser.add_argument(
        "--check", action="store_true", help="only say whether it is up to date"
    )
    args = parser.parse_args()
    directory = patching.patch_directory()
    path = directory / patching.MANIFEST
    try:
        manifest = manifest_of(directory, args.tree)
    except UserError as error:
        print(f"patch_manifest.py: error: {error}", file=sys.stderr)
        return 2
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    if args.check:
        current = path.read_bytes() if path.exists() else b""
        if current != data:
            print(f"{path} is out of date", file=sys.stderr)
            return 1
        return 0
    write_atomically(path, data)
    print(f"{path}: {len(manifest.patches)} patches")
    return 0


if __name__ == "__main__":
    sys.exit(main())
