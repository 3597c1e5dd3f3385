# SPDX-License-Identifier: Apache-2.0
"""Where the models of the configurations are, and what a file of them says."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import make_smollm2
import yaml

from vllm_kairos.files import UserError

TASKS = Path(__file__).resolve().parent / "tasks"


def _smollm2() -> Path:
    folder = make_smollm2.default_folder()
    make_smollm2.make(folder)
    return folder


#: Models made here, by name. Others are named by an environment variable.
MADE: dict[str, Callable[[], Path]] = {"SmolLM2-135M-Instruct": _smollm2}


@dataclass(frozen=True)
class Metric:
    """A metric and the value it is to reach.

    Attributes:
        name: As lm-eval names it, with its filter.
        value: Measured once, on one engine.
    """

    name: str
    value: float


@dataclass(frozen=True)
class TaskConfig:
    """A task.

    Attributes:
        name: As lm-eval names it.
        metrics: What is compared.
        chat: Over the chat API.
    """

    name: str
    metrics: tuple[Metric, ...]
    chat: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """One file of ``configs/``.

    Attributes:
        model_name: A model of `MADE`, or any with `model_path_env`.
        tasks: What is measured.
        limit: Documents of each task, `None` for all.
        num_fewshot: Answered documents before each.
        rtol: How far below its value a metric may be.
        num_concurrent: Requests at a time.
        max_model_len: Longest sequence.
        dtype: Of weights and KV.
        tau_ms: TBT SLO that chunks are bounded by.
        step_ms: Milliseconds of a step, and of a prefill token in it: what
            the proxies are told of this model on the machine it is run on.
        token_ms: See `step_ms`.
        model_path_env: Environment variable with the model's folder.
        device: ``cpu`` or ``gpu``.
    """

    model_name: str
    tasks: tuple[TaskConfig, ...]
    limit: int | None = None
    num_fewshot: int | None = None
    rtol: float = 0.08
    num_concurrent: int = 4
    max_model_len: int = 4096
    dtype: str = "float32"
    tau_ms: float = 1000.0
    step_ms: float = 40.0
    token_ms: float = 3.0
    model_path_env: str = ""
    device: str = "cpu"
    extra: tuple[str, ...] = field(default=())

    def model(self) -> Path:
        """Folder of the model, made where it can be.

        Raises:
            UserError: It is not known, or not there.
        """
        if self.model_path_env:
            path = os.environ.get(self.model_path_env, "")
            if not (Path(path) / "config.json").is_file():
                raise UserError(
                    f"{self.model_path_env} is {path!r}, expected the folder of "
                    f"{self.model_name}"
                )
            return Path(path)
        if self.model_name not in MADE:
            raise UserError(
                f"model {self.model_name!r} is not known, expected one of: "
                f"{', '.join(MADE)}, or a model_path_env"
            )
        return MADE[self.model_name]()


def load_config(path: Path) -> ModelConfig:
    """A configuration.

    Raises:
        UserError: It cannot be read, or a field is missing or unknown.
    """
    try:
        data = yaml.safe_load(path.read_text())
        data["tasks"] = tuple(_task(item) for item in data["tasks"])
        data["extra"] = tuple(data.get("extra", ()))
        config = ModelConfig(**data)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    if not config.tasks or not all(task.metrics for task in config.tasks):
        raise UserError(f"{path}: expected tasks, each with a metric")
    return config


def _task(item: dict[str, Any]) -> TaskConfig:
    return TaskConfig(
        item["name"],
        tuple(Metric(m["name"], float(m["value"])) for m in item["metrics"]),
        item.get("api", "completions") == "chat",
    )


def config_paths(list_file: Path) -> list[Path]:
    """The configurations that a list file names.

    Raises:
        UserError: It cannot be read, names none, or one that is not there.
    """
    try:
        lines = list_file.read_text().splitlines()
    except OSError as error:
        raise UserError(f"{list_file}: {error.strerror or error}") from error
    words = [line.strip() for line in lines]
    paths = [list_file.parent / word for word in words if word and word[0] != "#"]
    if not paths:
        raise UserError(f"{list_file}: names no configuration")
    for path in paths:
        if not path.is_file():
            raise UserError(f"{list_file}: {path.name} is not there")
    return paths
