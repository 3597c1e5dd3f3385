# SPDX-License-Identifier: Apache-2.0
"""The pipeline runner: what it chooses, runs, counts and refuses to pass."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))

import run_pipeline
from run_pipeline import CHECKOUT, Pipeline, Step

#: As ruff says it: one check.
CHECKED = "3 files already formatted"
GOOD = "def test_one():\n    pass\ndef test_two():\n    pass\n"
#: With tests shared out among processes.
WORKERS = " -p xdist.plugin -n 2"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with a branch that left `main`."""

    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True)

    git("init", "-q", "-b", "main")
    for name in ("engine/a.py", "proxy/b.py", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1\n")
    git("add", "-A")
    git("commit", "-qm", "first")
    git("checkout", "-qb", "work")
    (tmp_path / "engine" / "a.py").write_text("2\n")
    git("commit", "-qam", "second")
    git("checkout", "-q", "main")
    (tmp_path / "README.md").write_text("2\n")
    git("commit", "-qam", "on main since")
    git("checkout", "-q", "work")
    return tmp_path


def run(text: str, folder: Path, *words: str) -> tuple[int, list[str], str]:
    """Run a pipeline: exit code, lines of stdout, stderr."""
    path = folder / "pipeline.yaml"
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, CHECKOUT / "ci/run_pipeline.py", "--pipeline", path, *words],
        capture_output=True,
        text=True,
        timeout=120,
        # Of the plugins only those named on a command line: a quick start.
        env={
            **os.environ,
            "PYTHONPATH": str(CHECKOUT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


def pytest_of(folder: Path, text: str, name: str = "test_it.py") -> str:
    (folder / name).write_text(text)
    return f"{sys.executable} -m pytest -q -p no:cacheprovider {folder / name}"


@pytest.mark.parametrize("workers", ["", WORKERS])
def test_tests_are_counted_and_the_last_line_says_so(
    tmp_path: Path, workers: str
) -> None:
    command = pytest_of(tmp_path, GOOD) + workers
    code, lines, _ = run(
        f"steps:\n- label: A\n  commands:\n  - {command}\n  - {command}\n", tmp_path
    )
    assert code == 0
    assert lines[-1] == "4 passed, 0 failed"
    assert any("A: 4 passed" in line for line in lines)
    assert sum(line.startswith("    2 tests passed") for line in lines) == 2


@pytest.mark.parametrize(
    "body",
    [
        "",
        "import pytest\n@pytest.mark.skip\ndef test_it():\n    pass\n",
        "import pytest\n@pytest.mark.xfail\ndef test_it():\n    assert 0\n",
    ],
)
@pytest.mark.parametrize("workers", ["", WORKERS])
def test_a_step_whose_tests_all_stay_away_fails(
    tmp_path: Path, body: str, workers: str
) -> None:
    command = pytest_of(tmp_path, body) + workers
    other = pytest_of(tmp_path, GOOD, "test_good.py")
    code, lines, _ = run(
        f"steps:\n- label: A\n  commands:\n  - {other}\n  - {command} || true\n",
        tmp_path,
    )
    assert code == 1
    assert lines[-1] == "2 passed, 1 failed"
    assert any("no test passed" in line for line in lines)


def test_a_worker_that_dies_fails_the_step(tmp_path: Path) -> None:
    body = GOOD + "def test_dies():\n    import os\n    os._exit(0)\n"
    command = pytest_of(tmp_path, body) + WORKERS
    code, lines, _ = run(
        f"steps:\n- label: A\n  commands:\n  - {command} || true\n", tmp_path
    )
    assert code == 1
    assert lines[-1] == "2 passed, 1 failed"


def test_a_step_that_checks_nothing_fails(tmp_path: Path) -> None:
    code, lines, _ = run("steps:\n- label: A\n  commands:\n  - echo hi\n", tmp_path)
    assert code == 1
    assert lines[-1] == "0 passed, 1 failed"
    assert any("nothing was checked" in line for line in lines)


def test_failures_are_counted_and_do_not_stop_the_next_step(tmp_path: Path) -> None:
    bad = pytest_of(tmp_path, GOOD + "def test_bad():\n    assert 0\n", "test_bad.py")
    good = pytest_of(tmp_path, GOOD, "test_good.py")
    code, lines, _ = run(
        f"steps:\n- label: A\n  commands:\n  - {bad}\n  - echo never\n"
        f"- label: B\n  commands:\n  - {good}\n",
        tmp_path,
    )
    assert code == 1
    assert lines[-1] == "4 passed, 1 failed"
    assert "never" not in lines
    summary = lines[lines.index("+++ Summary") :]
    assert "exit code 1" in summary[1]
    assert summary[2].startswith("passed")


def test_a_failure_that_the_shell_hides_still_fails(tmp_path: Path) -> None:
    bad = pytest_of(tmp_path, GOOD + "def test_bad():\n    assert 0\n")
    code, lines, _ = run(
        f"steps:\n- label: A\n  commands:\n  - {bad} || true\n", tmp_path
    )
    assert code == 1 and lines[-1] == "2 passed, 1 failed"


def test_a_command_in_a_pipe_that_fails_fails_the_step(tmp_path: Path) -> None:
    code, lines, _ = run(
        "steps:\n- label: A\n  commands:\n  - echo '5 files already formatted'\n"
        "  - (exit 3) | cat\n",
        tmp_path,
    )
    assert code == 1
    assert any("exit code 3" in line for line in lines)


def test_exports_reach_the_commands_after_them(tmp_path: Path) -> None:
    code, lines, _ = run(
        "steps:\n- label: A\n  commands:\n  - export N=7\n"
        "  - echo $N files already formatted\n",
        tmp_path,
    )
    assert code == 0 and lines[-1] == "1 passed, 0 failed"
    assert any("7 files checked" in line for line in lines)


def test_a_step_over_its_time_is_ended_with_its_children(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    step = Step("A", (f"sleep 300 & echo $! > {marker}; wait",), 1)
    object.__setattr__(step, "timeout_minutes", 1 / 60)
    started = time.monotonic()
    outcome = run_pipeline.run_step(step)
    assert time.monotonic() - started < 30
    assert outcome.verdict == "failed" and "not done after" in outcome.word
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_a_child_left_behind_neither_hangs_the_step_nor_lives_on(
    tmp_path: Path,
) -> None:
    marker = tmp_path / "pid"
    step = Step("A", (f"sleep 300 & echo $! > {marker}; echo {CHECKED}",))
    outcome = run_pipeline.run_step(step)
    assert outcome.verdict == "passed" and outcome.seconds < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_a_runner_that_is_terminated_ends_what_it_started(tmp_path: Path) -> None:
    marker, path = tmp_path / "pid", tmp_path / "pipeline.yaml"
    command = f"echo $$ > {marker}; sleep 300"
    path.write_text(f"steps:\n- label: A\n  commands:\n  - {command}\n")
    runner = subprocess.Popen(
        [sys.executable, CHECKOUT / "ci/run_pipeline.py", "--pipeline", path],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    deadline = time.monotonic() + 60
    while not (marker.exists() and marker.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    runner.terminate()
    assert runner.wait(timeout=60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_steps_for_a_gpu_are_skipped_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        Step("A", ("false",), devices=2),
        Step("B", (f"echo {CHECKED}",)),
    ]
    outcomes = run_pipeline.run(steps, devices=1)
    assert [o.verdict for o in outcomes] == ["skipped", "passed"]
    assert "needs 2 GPU(s), this machine has 1" in capsys.readouterr().out
    assert run_pipeline.summarize(outcomes) == 0
    assert run_pipeline.summarize(outcomes[:1]) == 1, "nothing ran at all"


def test_a_step_for_what_is_named_by_a_variable_is_skipped_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (step,) = (s for s in run_pipeline.load(run_pipeline.PIPELINE).steps if s.if_set)
    monkeypatch.delenv(step.if_set, raising=False)
    assert step.lacks(devices=2) == "KAIROS_DEEPSEEK_V2_LITE is not set"
    monkeypatch.setenv(step.if_set, "/models/v2-lite")
    assert step.lacks(devices=2) == ""
    assert "needs 2 GPU(s)" in step.lacks(devices=1)


def test_a_change_runs_the_steps_it_touches_and_those_for_every_change() -> None:
    lint = Step("Lint", ("true",))
    engine = Step("Engine", ("true",), sources=("vllm_kairos/engine/",))
    proxy = Step("Proxy", ("true",), sources=("vllm_kairos/proxy/",))
    rare = Step("Rare", ("true",), optional=True)
    pipeline = Pipeline((lint, engine, proxy, rare), ("setup.py",))
    choose = run_pipeline.choose
    assert choose(pipeline, [], ["vllm_kairos/engine/scheduler.py"]) == [lint, engine]
    assert choose(pipeline, [], ["README.md"]) == [lint]
    assert choose(pipeline, [], ["setup.py"]) == [lint, engine, proxy]
    assert choose(pipeline, [], None) == [lint, engine, proxy]
    assert choose(pipeline, ["rare"], None) == [rare]


def test_a_change_is_counted_from_where_the_branch_left(repository: Path) -> None:
    assert run_pipeline.changed_paths("main", repository) == ["engine/a.py"]
    (repository / "new.py").write_text("")
    (repository / "proxy" / "b.py").write_text("edited\n")
    assert run_pipeline.changed_paths("main", repository) == [
        "engine/a.py",
        "new.py",
        "proxy/b.py",
    ]


@pytest.mark.parametrize("base", ["no-such-branch", "--all"])
def test_a_base_that_is_none_is_one_line(repository: Path, base: str) -> None:
    with pytest.raises(run_pipeline.UserError, match=f"--changed {base}"):
        run_pipeline.changed_paths(base, repository)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("steps: [", "not YAML"),
        ("[]", "no list of steps"),
        ("steps:\n- label: A\n", "at least one command"),
        ("steps:\n- label: A\n  command: x\n", "'command' is not known"),
        ("steps:\n- label: A\n  commands: x\n", "expected list"),
        (
            "steps:\n- {label: A, commands: [x]}\n- {label: A, commands: [y]}\n",
            "two steps",
        ),
    ],
)
def test_a_bad_pipeline_is_one_line_and_exit_code_2(
    tmp_path: Path, text: str, word: str
) -> None:
    code, lines, errors = run(text, tmp_path)
    assert code == 2 and lines == []
    assert word in errors and errors.count("\n") == 1


def test_an_unknown_step_is_named(tmp_path: Path) -> None:
    text = "steps:\n- {label: A, commands: [x]}\n"
    code, _, errors = run(text, tmp_path, "--step", "B")
    assert code == 2 and "'B' is not one of: A" in errors


def test_list_and_dry_run_run_nothing(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    text = f"steps:\n- label: A\n  commands:\n  - touch {touched}\n"
    assert run(text, tmp_path, "--list")[1] == ["A: by default, 60 min at most"]
    assert run(text, tmp_path, "--dry-run")[1] == ["A", f"    touch {touched}"]
    assert not touched.exists()


def test_the_sources_that_the_pipeline_names_are_there() -> None:
    pipeline = run_pipeline.load(CHECKOUT / "ci/pipeline.yaml")
    tracked = [
        str(path.relative_to(CHECKOUT))
        for top in ("ci", "examples", "patches", "profiles", "tests", "vllm_kairos")
        for path in (CHECKOUT / top).rglob("*")
    ]
    tracked += [path.name for path in CHECKOUT.iterdir()]
    for step in pipeline.steps:
        for source in step.sources:
            assert any(p.startswith(source.rstrip("/")) for p in tracked), source
    assert {"Lint", "Patches", "Accuracy"} <= {s.label for s in pipeline.steps}


def test_tests_that_start_an_engine_are_where_their_step_looks() -> None:
    for path in (CHECKOUT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if "mark." + "engine" in text:
            assert path.parent == CHECKOUT / "tests" / "engine", path
    commands = [
        command
        for step in run_pipeline.load(CHECKOUT / "ci/pipeline.yaml").steps
        for command in step.commands
    ]
    unit = next(command for command in commands if "--ignore" in command)
    others = " ".join(command for command in commands if command is not unit)
    for word in unit.split():
        if word.startswith("--ignore="):
            assert word.removeprefix("--ignore=") in others, word
