# SPDX-License-Identifier: Apache-2.0
"""The command line as an operator meets it."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_kairos.cli import COMMANDS, main
from vllm_kairos.files import UserError, check_output_directory, check_output_file
from vllm_kairos.given import given_flags, refuse_unread


def test_without_a_command_the_help_is_shown_and_the_code_is_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: vllm-kairos")
    assert all(f"\n    {name} " in said for name in COMMANDS)


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == "vllm-kairos 0.1.0\n"


def test_an_unknown_command_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["simulat"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "'simulat'" in said and "simulate" in said and said.count("\n") == 1


@pytest.mark.parametrize("name", ["patch", "profile", "simulate", "paper", "proxy"])
def test_every_flag_says_what_it_is_for(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    flags = [n for n, line in enumerate(lines) if line.startswith("  --")]
    assert flags
    for place in flags:
        # Text stands beside a short flag, and under a long one.
        beside = "  " in lines[place].strip()
        under = lines[place + 1 : place + 2]
        assert beside or (under and under[0].startswith(" " * 20)), lines[place]
    assert f"  vllm-kairos {name} " in "\n".join(lines), "there is no example"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--alpha 1.3", "--alpha is not used with --scheduling-policy round_robin"),
        (
            "--scheduling-policy sq --alpha 1.3",
            "--alpha is not used with --scheduling-policy sq",
        ),
        ("--state-max-age-ms 1000", "--state-max-age-ms is not used without --engine-"),
    ],
)
def test_a_flag_of_the_proxy_that_nothing_reads_is_refused_also_at_its_default(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = ["--model", "m", "--prefill", "p:1", "--decode", "d:1"]
    assert main(["proxy", *nodes, *flags.split()]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_flags_given_are_told_from_those_left_out() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", "-r", type=int, default=4)
    parser.add_argument("--name", default="4")
    parser.add_argument("--on", action="store_true")
    parser.add_argument("--option", action="append", default=["a"])
    parser.add_argument("rest", nargs="*", metavar="WORD")
    assert given_flags(parser, []) == {}
    assert given_flags(parser, ["-r", "4"]) == {"rate": "--rate"}
    words = ["--on", "--option", "b", "--na", "4", "w"]
    assert given_flags(parser, words) == {
        "name": "--name",
        "on": "--on",
        "option": "--option",
        "rest": "WORD",
    }


def test_flags_that_somebody_else_parsed_are_not_refused() -> None:
    refuse_unread(argparse.Namespace(rate=4), "with --capacity", ("rate",))


def signalled(
    words: list[str], number: signal.Signals, path: str = ""
) -> tuple[int, str]:
    """Exit code and errors of a process that gets a signal when it says so."""
    with subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"},
        # A shell's background job is started with Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line == "now\n":
                break
        run.send_signal(number)
        _, error = run.communicate(timeout=30)
    return run.returncode, error


STOPS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.mark.parametrize(("number", "code"), STOPS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_stopped_while_it_starts_says_nothing(
    name: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    # Each imports it, and this one takes its time.
    package = tmp_path / "numpy"
    package.mkdir()
    slow = "import time\nprint('now', flush=True)\ntime.sleep(60)\n"
    (package / "__init__.py").write_text(slow)
    words = ["-m", "vllm_kairos.cli", name]
    assert signalled(words, number, str(tmp_path)) == (code, "")


@pytest.mark.parametrize(("number", "code"), STOPS)
def test_a_command_that_is_stopped_while_it_ends_says_nothing(
    number: signal.Signals, code: int
) -> None:
    text = """
import atexit, sys, time
from vllm_kairos.cli import main
atexit.register(lambda: [time.sleep(0.1) for _ in range(600)])
atexit.register(print, "now", flush=True)
sys.argv[1:] = ["patch", "check", "--target", "/nope"]
sys.exit(main())
"""
    stopped, error = signalled(["-c", text], number)
    assert stopped == code
    # What it had to say before.
    assert error.startswith("vllm-kairos patch: error: ") and error.count("\n") == 1


@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_that_goes_away_is_no_error(buffered: bool) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    words = ["simulate", "--requests", "20", "--no-progress", "--jobs", "1"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_kairos.cli", *words],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "nope" / "p.json"
    assert main(["profile", "--model", "m", "--output", str(output)]) == 2
    said = capsys.readouterr().err
    assert f"--output {output}: {tmp_path / 'nope'} does not exist" in said
    assert said.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_a_file_needs_its_folder_and_a_folder_may_be_new(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    check_output_file(tmp_path / "new", "--output")
    check_output_file(file, "--output")
    check_output_directory(tmp_path, "--output")
    check_output_directory(tmp_path / "new" / "er", "--output")
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(UserError, match="is a directory"):
        check_output_file(tmp_path, "--output")
    with pytest.raises(UserError, match="is not a directory"):
        check_output_file(file / "x", "--output")
    with pytest.raises(UserError, match="is a file"):
        check_output_directory(file, "--output")
    with pytest.raises(UserError, match="is not a directory"):
        check_output_directory(file / "x", "--output")
