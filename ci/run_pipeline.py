# SPDX-License-Identifier: Apache-2.0
"""Runs ci/pipeline.yaml on one machine: all default steps, or those touched.

    python ci/run_pipeline.py                     all default steps
    python ci/run_pipeline.py --changed main      those that a change touches
    python ci/run_pipeline.py --step Accuracy     one step, also an optional one
    python ci/run_pipeline.py --list              what there is
    python ci/run_pipeline.py --dry-run           what would run, without running

The file is in the form of vLLM's Buildkite pipelines. Of their keys these are
known: label, timeout_in_minutes, source_file_dependencies, commands, optional,
device and num_devices; of our own, if_set names an environment variable without
which a step is skipped. The commands of a step share one shell and run in the
root of the checkout, with this interpreter's commands first on PATH.

A step passes if every command succeeds, if every pytest among them passed at
least one test, and if its commands counted at least one check together. The
last line printed is "N passed, N failed".

exit codes: 0 all passed, 1 a step failed, 2 bad arguments or pipeline.
"""

from __future__ import annotations

import argparse
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vllm_kairos.files import UserError

CHECKOUT = Path(__file__).resolve().parent.parent
PIPELINE = Path(__file__).resolve().parent / "pipeline.yaml"

_STEP_KEYS = {
    "label": str,
    "timeout_in_minutes": int,
    "source_file_dependencies": list,
    "commands": list,
    "optional": bool,
    "device": str,
    "num_devices": int,
    "if_set": str,
}
#: What tools print of how many files they looked at.
_FILES = (
    re.compile(r"(\d+) files? already formatted"),
    re.compile(r"no issues found in (\d+) source files?"),
)
_PYTEST_END = re.compile(
    r"^=*\s*((?:\d+ [a-z]+, )*\d+ [a-z]+|no tests ran) in [\d.]+s.*$"
)
_PYTEST_PART = re.compile(r"(\d+) (passed|failed|errors?|skipped|x?failed|xpassed)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Step:
    """One step of the pipeline.

    Attributes:
        label: Its name.
        commands: Shell commands, in one shell.
        timeout_minutes: Longest it may take.
        sources: Path prefixes that concern it; empty for every change.
        optional: Runs only when named.
        devices: GPUs it needs.
        if_set: Environment variable it needs, empty for none.
    """

    label: str
    commands: tuple[str, ...]
    timeout_minutes: int = 60
    sources: tuple[str, ...] = ()
    optional: bool = False
    devices: int = 0
    if_set: str = ""

    def lacks(self, devices: int) -> str:
        """What it needs and this machine has not, empty for nothing."""
        if self.devices > devices:
            return f"needs {self.devices} GPU(s), this machine has {devices}"
        if self.if_set and not os.environ.get(self.if_set):
            return f"{self.if_set} is not set"
        return ""

    def touched_by(self, paths: Iterable[str]) -> bool:
        """Whether a change to these paths concerns it."""
        if not self.sources:
            return True
        return any(path.startswith(self.sources) for path in paths)


@dataclass(frozen=True)
class Pipeline:
    """The steps, and the paths that concern all of them."""

    steps: tuple[Step, ...]
    run_all: tuple[str, ...] = ()


@dataclass
class Count:
    """What a command said it had looked at."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    files: int = 0

    def add(self, line: str) -> None:
        """Read a line of output."""
        line = _COLOUR.sub("", line).rstrip()
        if end := _PYTEST_END.match(line):
            # The last summary counts: a test may print one of its own.
            found = {kind: int(n) for n, kind in _PYTEST_PART.findall(end[1])}
            self.passed = found.get("passed", 0)
            self.failed = sum(found.get(k, 0) for k in ("failed", "error", "errors"))
            self.skipped = found.get("skipped", 0)
            return
        for pattern in _FILES:
            if counted := pattern.search(line):
                self.files += int(counted[1])
                # A look at any number of files is one check.
                self.passed = 1

    def told(self) -> str:
        """What was counted, empty where nothing was."""
        if self.files:
            return f"{self.files} files checked, "
        if self.passed or self.failed or self.skipped:
            return (
                f"{self.passed} tests passed, {self.failed} failed, "
                f"{self.skipped} skipped, "
            )
        return ""


@dataclass
class Outcome:
    """How a step went.

    Attributes:
        step: The step.
        verdict: ``passed``, ``failed`` or ``skipped``.
        word: Why, where it did not pass.
        passed: Checks that passed.
        failed: Checks that failed.
        skipped: Checks that were skipped.
        seconds: How long it took.
    """

    step: Step
    verdict: str
    word: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def line(self) -> str:
        """One line for the summary."""
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        text = f"{self.verdict:8} {self.seconds:6.0f} s  {self.step.label}: "
        if self.verdict == "skipped":
            return f"{self.verdict:8}        -  {self.step.label}: {self.word}"
        return text + counts + (f" ({self.word})" if self.word else "")


def load(path: Path) -> Pipeline:
    """The pipeline in a file.

    Raises:
        UserError: It cannot be read, or says something that is not known.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        where = str(error).replace("\n", " ")
        raise UserError(f"{path}: not YAML: {where}") from error
    if not isinstance(data, dict) or not isinstance(data.get("steps"), list):
        raise UserError(f"{path}: no list of steps in it")
    steps = tuple(_step(path, n, item) for n, item in enumerate(data["steps"], 1))
    labels = [step.label for step in steps]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"{path}: two steps are labelled {label!r}")
    return Pipeline(steps, tuple(data.get("run_all_patterns") or ()))


def _step(path: Path, number: int, item: Any) -> Step:
    where = f"{path}: step {number}"
    if not isinstance(item, dict):
        raise UserError(f"{where} is {item!r}, expected a mapping")
    where += f" ({item.get('label')})"
    for key, value in item.items():
        kind = _STEP_KEYS.get(key)
        if kind is None:
            raise UserError(f"{where}: key {key!r} is not known")
        if not isinstance(value, kind) or (kind is int and value is True):
            raise UserError(f"{where}: {key} is {value!r}, expected {kind.__name__}")
    commands = item.get("commands") or []
    if not item.get("label") or not commands:
        raise UserError(f"{where}: expected a label and at least one command")
    gpu = item.get("device") not in (None, "cpu")
    return Step(
        item["label"],
        tuple(map(str, commands)),
        item.get("timeout_in_minutes", 60),
        tuple(map(str, item.get("source_file_dependencies") or ())),
        item.get("optional", False),
        item.get("num_devices", 1) if gpu else 0,
        item.get("if_set", ""),
    )


def gpus() -> int:
    """GPUs of this machine, by the driver's own tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    found = subprocess.run([tool, "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in found.stdout.splitlines())


def changed_paths(base: str, checkout: Path = CHECKOUT) -> list[str]:
    """Paths that differ from where a branch left `base`, new files included.

    Raises:
        UserError: There is no such commit.
    """

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", checkout, *words], capture_output=True, text=True
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["git failed"])[-1]
            raise UserError(f"--changed {base}: {last}")
        return done.stdout

    if base.startswith("-"):
        raise UserError(f"--changed {base}: expected a commit")
    start = git("merge-base", base, "HEAD").strip()
    paths = git("diff", "--name-only", start).splitlines()
    paths += git("ls-files", "--others", "--exclude-standard").splitlines()
    return sorted(set(paths))


def choose(
    pipeline: Pipeline, labels: Sequence[str], changed: Sequence[str] | None
) -> list[Step]:
    """The steps to run, in the order of the pipeline.

    Raises:
        UserError: A label is unknown.
    """
    if labels:
        known = {step.label.lower(): step for step in pipeline.steps}
        for label in labels:
            if label.lower() not in known:
                names = ", ".join(step.label for step in pipeline.steps)
                raise UserError(f"--step {label!r} is not one of: {names}")
        chosen = {known[label.lower()].label for label in labels}
        return [step for step in pipeline.steps if step.label in chosen]
    steps = [step for step in pipeline.steps if not step.optional]
    if changed is None or (
        pipeline.run_all and any(p.startswith(pipeline.run_all) for p in changed)
    ):
        return steps
    return [step for step in steps if step.touched_by(changed)]


def script_of(step: Step, marker: str) -> str:
    """One shell script of a step's commands, each announced by a line."""
    lines = ["set -euo pipefail"]
    for number, command in enumerate(step.commands):
        lines += [f"printf '\\n%s %s\\n' {marker} {number}", command]
    return "\n".join(lines) + "\n"


def environment() -> dict[str, str]:
    """Of the commands: this interpreter's first, nothing fetched by chance."""
    variables = dict(os.environ)
    variables["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), variables.get("PATH", os.defpath)]
    )
    variables |= {
        "HF_HUB_OFFLINE": variables.get("HF_HUB_OFFLINE", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    variables.pop("PYTEST_ADDOPTS", None)
    return variables


@dataclass
class _Reader:
    """Follows a step's output: which command is at work, and its count."""

    step: Step
    marker: str
    counts: list[Count] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)

    def take(self, line: str) -> None:
        if line.startswith(f"{self.marker} "):
            self._close()
            number = int(line.split()[1])
            self.counts.append(Count())
            self._started = time.monotonic()
            print(f"--- {self.step.commands[number].strip()}", flush=True)
            return
        print(line, flush=True)
        if self.counts:
            self.counts[-1].add(line)

    def _close(self) -> None:
        if self.counts:
            seconds = time.monotonic() - self._started
            print(f"    {self.counts[-1].told()}{seconds:.1f} s", flush=True)

    def verdict(self, status: int, timed_out: bool) -> str:
        """Why the step failed, empty if it did not."""
        self._close()
        if timed_out:
            return f"not done after {self.step.timeout_minutes} minutes"
        if status:
            command = self.step.commands[max(len(self.counts) - 1, 0)]
            return f"exit code {status} from: {command.strip().splitlines()[0]}"
        for command, count in zip(self.step.commands, self.counts, strict=True):
            if "pytest" in command and count.passed == 0:
                return f"no test passed in: {command.strip().splitlines()[0]}"
            if count.failed:
                return f"{count.failed} failed in: {command.strip().splitlines()[0]}"
        if sum(count.passed for count in self.counts) == 0:
            return "nothing was checked"
        return ""


def run_step(step: Step, cwd: Path = CHECKOUT) -> Outcome:
    """Run a step; what it prints is passed on.

    All processes it leaves behind in its group are ended.
    """
    started = time.monotonic()
    marker = f"@@{os.urandom(6).hex()}"
    reader = _Reader(step, marker)
    with tempfile.NamedTemporaryFile("w", suffix=".sh", delete=False) as file:
        file.write(script_of(step, marker))
    process = subprocess.Popen(
        ["bash", file.name],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    timed_out = False
    try:
        deadline = started + 60 * step.timeout_minutes
        timed_out = not _follow(process, reader, deadline)
    finally:
        _end(process)
        Path(file.name).unlink()
    word = reader.verdict(process.returncode, timed_out)
    return Outcome(
        step,
        "failed" if word else "passed",
        word,
        sum(count.passed for count in reader.counts),
        sum(count.failed for count in reader.counts),
        sum(count.skipped for count in reader.counts),
        time.monotonic() - started,
    )


def _follow(process: subprocess.Popen[bytes], reader: _Reader, deadline: float) -> bool:
    """Pass on output until the shell has ended; whether that was in time."""
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            ended = process.poll() is not None
            # A child that outlives the shell may hold the pipe open.
            if selector.select(0 if ended else 0.5):
                data = os.read(process.stdout.fileno(), 65536)
                if data:
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        reader.take(line.decode(errors="replace"))
                    continue
                selector.unregister(process.stdout)
            if ended:
                if rest:
                    reader.take(rest.decode(errors="replace"))
                return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + 20
        while number == signal.SIGTERM and time.monotonic() < deadline:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.05)
    process.wait()


def run(steps: Sequence[Step], devices: int) -> list[Outcome]:
    """Run steps in turn, those excepted whose needs are not met."""
    outcomes = []
    for number, step in enumerate(steps, 1):
        print(f"\n+++ [{number}/{len(steps)}] {step.label}", flush=True)
        if word := step.lacks(devices):
            print(f"skipped: {word}", flush=True)
            outcomes.append(Outcome(step, "skipped", word))
            continue
        outcomes.append(run_step(step))
        print(outcomes[-1].line(), flush=True)
    return outcomes


def summarize(outcomes: Sequence[Outcome]) -> int:
    """Print how all went; the exit code."""
    print("\n+++ Summary")
    for outcome in outcomes:
        print(outcome.line())
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"{len(outcomes)} steps in {seconds / 60:.1f} minutes")
    bad = [outcome for outcome in outcomes if outcome.verdict == "failed"]
    passed = sum(outcome.passed for outcome in outcomes)
    # A step can fail without a failed test: by time, or for want of any.
    failed = sum(max(outcome.failed, outcome in bad) for outcome in outcomes)
    if not bad and passed == 0:
        print("nothing was checked: every step was skipped or none was chosen")
        failed = 1
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


def main(words: Sequence[str] | None = None) -> int:
    """Parse arguments and run."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipeline", type=Path, default=PIPELINE, metavar="FILE")
    parser.add_argument(
        "--step", action="append", default=[], metavar="LABEL", help="may be repeated"
    )
    parser.add_argument(
        "--changed", metavar="BASE", help="only steps whose sources differ from BASE"
    )
    parser.add_argument("--list", action="store_true", help="name the steps")
    parser.add_argument("--dry-run", action="store_true", help="run nothing")
    args = parser.parse_args(words)
    try:
        pipeline = load(args.pipeline)
        changed = changed_paths(args.changed) if args.changed else None
        steps = choose(pipeline, args.step, changed)
    except UserError as error:
        print(f"run_pipeline.py: error: {error}", file=sys.stderr)
        return 2
    if args.list:
        for step in pipeline.steps:
            needs = f", needs {step.devices} GPU(s)" if step.devices else ""
            when = "when named" if step.optional else "by default"
            print(f"{step.label}: {when}, {step.timeout_minutes} min at most{needs}")
        return 0
    if args.dry_run:
        for step in steps:
            print(step.label)
            for command in step.commands:
                print(f"    {command.strip()}")
        return 0
    # Ended from outside, as by a timeout: what was started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return summarize(run(steps, gpus()))


if __name__ == "__main__":
    sys.exit(main())
