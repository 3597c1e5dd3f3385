# SPDX-License-Identifier: Apache-2.0
"""The environment: two layers, the patch set on vLLM's own files, the wheel."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from vllm_kairos import patching

CHECKOUT = Path(__file__).resolve().parent.parent
PROXY = "examples/online_serving/disaggregated_serving/disagg_proxy_demo.py"


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )


def copy_touched(source: Path, target: Path) -> None:
    """The files that say the version, and those that patches change."""
    paths = {"vllm/_version.py", "PKG-INFO"}
    for patch in patching.load_patches(patching.patch_directory()):
        paths |= set(patch.diffs)
    for path in paths:
        if (source / path).exists():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / path, target / path)


def contents(root: Path) -> dict[str, bytes]:
    files = [file for file in sorted(root.rglob("*")) if file.is_file()]
    return {str(file.relative_to(root)): file.read_bytes() for file in files}


def states(target: Path) -> dict[str, str]:
    patches = patching.load_patches(patching.patch_directory())
    files = patching.read_target(target, patches)
    return dict(patching.patch_states(target, patches, files))


def test_every_patch_applies_to_the_source_tree_and_reverts_byte_for_byte(
    vllm_sdist: Path, tmp_path: Path
) -> None:
    copy_touched(vllm_sdist, tmp_path)
    before = contents(tmp_path)
    assert set(states(tmp_path).values()) == {"not applied"}
    patching.apply(tmp_path)
    assert set(states(tmp_path).values()) == {"applied"}
    after = contents(tmp_path)
    assert after != before
    patching.apply(tmp_path)
    assert contents(tmp_path) == after
    patching.revert(tmp_path)
    assert contents(tmp_path) == before


def test_git_makes_the_same_of_the_patches(vllm_sdist: Path, tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for name in ("ours", "git"):
        copy_touched(vllm_sdist, tmp_path / name)
    patching.apply(tmp_path / "ours")
    for patch in sorted(patching.patch_directory().glob("*.patch")):
        # The context is short on purpose: upstream moves.
        done = run("git", "apply", "--unidiff-zero", patch, cwd=tmp_path / "git")
        assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "git") == contents(tmp_path / "ours")


def test_the_installed_wheel_takes_all_but_the_example(
    layer_state: dict[str, Any], tmp_path: Path
) -> None:
    site = Path(layer_state["base"]) / "lib/python3.11/site-packages"
    copy_touched(site, tmp_path)
    before = contents(tmp_path)
    patching.apply(tmp_path)
    found = list(states(tmp_path).values())
    assert found[:2] == ["applied", "applied"]
    assert set(found[2:]) <= {"skipped"}
    patching.revert(tmp_path)
    assert contents(tmp_path) == before


def test_the_manifest_is_that_of_the_patches(vllm_sdist: Path) -> None:
    done = run(sys.executable, CHECKOUT / "ci/patch_manifest.py", "--check", vllm_sdist)
    assert done.returncode == 0, done.stderr


def test_this_interpreter_runs_the_patched_vllm(layer_state: dict[str, Any]) -> None:
    assert (
        patching.default_target() == Path(sys.prefix) / "lib/python3.11/site-packages"
    )
    found = states(patching.default_target())
    assert set(found.values()) <= {"applied", "skipped"}


def test_a_spawned_process_sees_the_patched_vllm_too(
    layer_state: dict[str, Any], tmp_path: Path
) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(
        "import importlib.util, multiprocessing\n"
        "def where(queue):\n"
        "    queue.put(importlib.util.find_spec('vllm').origin)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=where, args=(queue,))\n"
        "    process.start()\n"
        "    print(queue.get(timeout=60))\n"
        "    process.join()\n"
    )
    done = run(sys.executable, script)
    assert done.stdout.startswith(sys.prefix), done.stdout + done.stderr


def test_another_checkout_gets_a_layer_of_its_own(
    layer_state: dict[str, Any], tmp_path: Path
) -> None:
    other = tmp_path / "other checkout"
    for name in ("vllm_kairos", "patches", "profiles", "ci"):
        shutil.copytree(CHECKOUT / name, other / name)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(CHECKOUT / name, other / name)
    for patch in (other / "patches").glob("*.patch"):
        patch.unlink()
    (other / "patches" / patching.MANIFEST).write_text(
        json.dumps({"vllm": patching.VLLM_VERSION, "patches": []})
    )
    layer = tmp_path / "other layer"
    base = Path(layer_state["base"])
    done = run(
        *(base / "bin/python", other / "ci/env_layer.py", "--base", base),
        *("--layer", layer, "--sdist", layer_state["sdist"], "--checkout", other),
        env={"PYTHONPATH": str(other), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    touched = "vllm/v1/core/sched/scheduler.py"
    site = "lib/python3.11/site-packages"
    here = (Path(sys.prefix) / site / touched).read_bytes()
    there = (layer / site / touched).read_bytes()
    assert there == (base / site / touched).read_bytes() != here
    which = run(
        layer / "bin/python",
        "-c",
        "import vllm_kairos; print(vllm_kairos.__file__)",
        cwd=tmp_path,
    )
    assert which.stdout.strip() == str(other / "vllm_kairos/__init__.py"), which.stderr
    command = run(layer / "bin/vllm-kairos", "patch", "check", cwd=tmp_path)
    assert command.returncode == 2, "no patches: nothing can be applied"


def test_setup_prints_one_path_even_when_run_twice_at_once(
    layer_state: dict[str, Any],
) -> None:
    script = str(CHECKOUT / "ci/setup_env.sh")
    both = [
        subprocess.Popen(
            [script, option], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for option in ("--print-python", "--print-sdist")
    ]
    python, sdist = (process.communicate(timeout=300)[0] for process in both)
    assert python == f"{sys.prefix}/bin/python\n"
    assert sdist == f"{layer_state['sdist']}\n"


def test_setup_names_an_option_it_does_not_know() -> None:
    done = run(CHECKOUT / "ci/setup_env.sh", "--print-everything")
    assert done.returncode == 2
    assert "--print-everything" in done.stderr and "--print-python" in done.stderr
    assert done.stdout == ""


def test_the_wheel_carries_patches_profiles_and_entry_points(
    layer_state: dict[str, Any], tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    for name in ("vllm_kairos", "patches", "profiles"):
        shutil.copytree(CHECKOUT / name, tree / name)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(CHECKOUT / name, tree / name)
    done = run(
        *(Path(layer_state["base"]) / "bin/python", "-m", "pip", "wheel", "--no-deps"),
        *("--no-build-isolation", "--no-index", "-w", tmp_path, tree),
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next(name for name in names if name.endswith("entry_points.txt"))
        text = archive.read(entry_points).decode()
        archive.extractall(tmp_path / "installed")
    for file in (CHECKOUT / "patches").iterdir():
        assert f"vllm_kairos/_patches/{file.name}" in names
    for file in (CHECKOUT / "profiles").glob("*.json"):
        assert f"vllm_kairos/_profiles/{file.name}" in names
    for line in (
        "vllm-kairos = vllm_kairos.cli:main",
        "[vllm.scheduler_plugins]",
        "[vllm.general_plugins]",
    ):
        assert line in text
    check = run(
        *(sys.executable, "-m", "vllm_kairos.cli", "patch", "check"),
        *("--target", patching.default_target()),
        cwd=tmp_path / "installed",
    )
    assert check.returncode == 0, check.stdout + check.stderr
    where = run(
        *(sys.executable, "-c"),
        "from vllm_kairos import patching; print(patching.patch_directory())",
        cwd=tmp_path / "installed",
    )
    assert where.stdout.strip().endswith("installed/vllm_kairos/_patches")
