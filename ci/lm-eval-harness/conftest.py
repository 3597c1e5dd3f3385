# SPDX-License-Identifier: Apache-2.0
"""Options of the harness, and the servers that its tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Harness
from models import config_paths, load_config
from results import Results

from vllm_kairos.files import UserError

HERE = Path(__file__).resolve().parent
DEFAULT_LIST = HERE / "configs" / "models-small.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--config-list-file",
        default=str(DEFAULT_LIST),
        help="file that lists model configurations, one a line",
    )
    parser.addoption(
        "--fault",
        default="",
        help="decode with an engine that damages KV, to see the harness fail: "
        "corrupt_block, swap_blocks or drop_last_chunk",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "config_filename" in metafunc.fixturenames:
        list_file = Path(metafunc.config.getoption("--config-list-file"))
        try:
            paths = config_paths(list_file.resolve())
        except UserError as error:
            raise pytest.UsageError(str(error)) from None
        metafunc.parametrize(
            "config_filename", paths, ids=[path.stem for path in paths], scope="session"
        )


@pytest.fixture(scope="session")
def results(
    config_filename: Path,
    pytestconfig: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Results]:
    """Evaluations of the model of a configuration."""
    config = load_config(config_filename)
    directory = tmp_path_factory.mktemp(config_filename.stem)
    harness = Harness(config, directory, pytestconfig.getoption("--fault"))
    try:
        harness.start()
        yield Results(harness)
    finally:
        harness.stop()
