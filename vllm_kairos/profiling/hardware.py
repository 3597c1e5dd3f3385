# SPDX-License-Identifier: Apache-2.0
"""What this machine is called in a profile."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def describe_hardware() -> str:
    """The GPUs, or the processor where there is none."""
    return _gpus() or _processor()


def _gpus() -> str | None:
    try:
        names = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return None
    names = [name.strip() for name in names if name.strip()]
    if not names:
        return None
    return " + ".join(f"{names.count(n)}x {n}" for n in dict.fromkeys(names))


def _processor() -> str:
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = " ".join(line.partition(":")[2].split())
                break
    except OSError:
        name = name or "unknown processor"
    return f"{name}, {os.cpu_count()} logical cores"
