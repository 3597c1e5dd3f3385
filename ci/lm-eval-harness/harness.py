# SPDX-License-Identifier: Apache-2.0
"""One model served four ways, and lm-eval driven against each.

``alone``      one engine by itself
``pd``         prefill node, then decode node, by round robin
``deflected``  every request's prefill on the decode node, in chunks
``kairos``     the policy, as an operator would run it
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import lm_eval  # type: ignore[import-untyped]
from evaluation import Evaluation, Generation
from lm_eval.models.openai_completions import (  # type: ignore[import-untyped]
    LocalChatCompletion,
    LocalCompletionsAPI,
)
from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]
from models import TASKS, ModelConfig, TaskConfig
from work import StepReader

from quickstart.engines import START_TIMEOUT_S, Engine, EngineSpec, core_for
from quickstart.processes import Server, free_ports, stop_all, wait_until_ready
from quickstart.servers import proxy_command
from vllm_kairos.core.profile import EngineLimits, FittedPredictor, Profile
from vllm_kairos.core.settings import Settings
from vllm_kairos.files import save_profile

HERE = Path(__file__).resolve().parent
WAIT_S = 2 * START_TIMEOUT_S
BUDGET_TOKENS = 2048
_FOREVER_MS = "100000000"
#: Names the file that faults.py, loaded by engines alone, reads.
FAULT_FILE = "KAIROS_TEST_FAULT_FILE"


class Harness:
    """A prefill and a decode engine, and a proxy for every arm but `alone`.

    A second decode engine can be told to damage KV. Arms of the name
    ``faulty_pd`` and ``faulty_deflected`` decode there.

    Args:
        config: What is served and measured.
        directory: For logs and the profile.
        fault: Let all arms decode on the engine with this fault.
    """

    def __init__(self, config: ModelConfig, directory: Path, fault: str = ""):
        self.config = config
        self.directory = directory
        self.fault = fault
        self.model = config.model()
        self.servers: list[Server] = []
        self.engines: dict[str, Engine] = {}
        self.urls: dict[str, str] = {}
        self._fault_file = directory / "fault"
        self._tasks = TaskManager(include_path=str(TASKS))

    def start(self) -> None:
        """Start engines and proxies; raises `StartError` where one does not."""
        self.set_fault(self.fault)
        profile = self._profile()
        names = ["prefill", "decode"]
        if self.config.device == "cpu":
            names.append("faulty")
        for number, name in enumerate(names):
            engine = Engine(self._spec(name, number), self.directory / f"{name}.log")
            self.engines[name] = engine
            self.servers.append(engine)
        wait_until_ready(self.servers, WAIT_S)
        self._steps = StepReader(
            {name: self.directory / f"{name}.steps.csv" for name in names}
        )
        self.urls["alone"] = self.engines["prefill"].url
        slo = ["kairos", "--profile", profile, "--tau-ms", str(self.config.tau_ms)]
        # Bound on arrival: late, whichever node is idle first would serve.
        always = [*slo, "--dispatch", "eager", "--alpha", "1000000"]
        always += ["--ttft-slo-ms", _FOREVER_MS]
        # On a busy machine reports are late; nothing is deflected on old ones.
        always += ["--state-max-age-ms", "60000"]
        decode = self.decoder
        # These need no prompt lengths: a tokenizer less to load for each.
        untold = ["--tokenizer", "none"]
        self._proxy("pd", decode, "round_robin", *untold)
        self._proxy("deflected", decode, *always)
        self._proxy("kairos", decode, *slo, "--ttft-slo-ms", "60000")
        if "faulty" in self.engines:
            self._proxy("faulty_pd", "faulty", "round_robin", *untold)
            self._proxy("faulty_deflected", "faulty", *always, *untold)
        wait_until_ready(self.servers, WAIT_S)
        for arm, url in self.urls.items():
            if arm != "alone":
                self._wait_for_state(url)

    @property
    def decoder(self) -> str:
        """Decode engine of the arms that are compared."""
        return "faulty" if self.fault else "decode"

    @property
    def chunk_tokens(self) -> int:
        """Most prompt tokens of a step that is safe by what the proxies are told."""
        c = self.config
        limit_ms = Settings(tau_ms=c.tau_ms).limit_ms
        return int((limit_ms - c.step_ms) / c.token_ms)

    def stop(self) -> None:
        """Stop all of them."""
        stop_all(self.servers)

    def set_fault(self, name: str) -> None:
        """Turn a fault of `faults.FAULTS` on, or with an empty name off."""
        self._fault_file.write_text(name)

    def _profile(self) -> str:
        c = self.config
        path = self.directory / "profile.json"
        profile = Profile(
            name=c.model_name,
            model=str(self.model),
            hardware=c.device,
            engine_version="0.18.1",
            kind="calibrated",
            created="2026-01-01",
            prefill=FittedPredictor({"1": c.step_ms, "c": c.token_ms}),
            decode=FittedPredictor({"1": c.step_ms, "B": c.step_ms / 20}),
            mixed=FittedPredictor({"c": c.token_ms}),
            engine=EngineLimits(BUDGET_TOKENS, 64, 30_000),
        )
        save_profile(path, profile)
        return str(path)

    def _spec(self, name: str, number: int) -> EngineSpec:
        port, side_channel_port, report_port = free_ports(3)
        on_gpu = self.config.device != "cpu"
        extra = ["--dtype", self.config.dtype, *self.config.extra]
        environment = {"VLLM_SERVER_DEV_MODE": "1"}
        scheduler = "kairos"
        if on_gpu:
            environment["CUDA_VISIBLE_DEVICES"] = str(number)
            extra += ["--kv-transfer-config", _transfer("NixlConnector", "cuda")]
        else:
            # Tokens' ranks are counted by a function that is compiled when an
            # engine is first asked for log-probabilities: half a minute each.
            environment["TORCHDYNAMO_DISABLE"] = "1"
        if name == "faulty":
            scheduler = "faults.DropsLastChunk"
            extra += ["--kv-transfer-config", _transfer("FaultyNixlConnector", "cpu")]
            environment |= {"PYTHONPATH": str(HERE)}
            environment[FAULT_FILE] = str(self._fault_file)
        return EngineSpec(
            name=name,
            model=self.model,
            port=port,
            side_channel_port=side_channel_port,
            report_port=report_port,
            core=None if on_gpu else core_for(number),
            scheduler=scheduler,
            step_log=self.directory / f"{name}.steps.csv",
            max_model_len=self.config.max_model_len,
            budget_tokens=BUDGET_TOKENS,
            extra=extra,
            environment=environment,
        )

    def _proxy(self, arm: str, decoder: str, policy: str, *flags: str) -> None:
        prefill, decode = self.engines["prefill"].spec, self.engines[decoder].spec
        (port,) = free_ports(1)
        command = [sys.executable, *proxy_command(), "--model", str(self.model)]
        command += ["--port", str(port), "--kv-handshake", "nixl"]
        command += ["--prefill", prefill.address, "--decode", decode.address]
        command += ["--scheduling-policy", policy, "--engine-state"]
        command += [prefill.report_address, decode.report_address, *flags]
        self.urls[arm] = f"http://127.0.0.1:{port}"
        self.servers.append(
            Server(
                f"proxy ({arm})",
                command,
                self.urls[arm],
                self.directory / f"proxy-{arm}.log",
                ready_path="/status",
            )
        )

    def _wait_for_state(self, url: str) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            text = httpx.get(f"{url}/metrics", timeout=10).text
            if text.count("\nkairos_proxy_state_age_seconds{") >= 2:
                return
            time.sleep(0.2)
        raise AssertionError(f"{url}: no state reports of the engines")

    def forget(self) -> None:
        """Empty the prefix caches: no arm finds the KV of another."""
        for engine in self.engines.values():
            httpx.post(
                f"{engine.url}/reset_prefix_cache", timeout=60
            ).raise_for_status()

    def routes(self, arm: str) -> Counter[str]:
        """Requests so far by the path they took."""
        if arm == "alone":
            return Counter()
        text = httpx.get(f"{self.urls[arm]}/metrics", timeout=10).text
        start = "kairos_proxy_requests_total{path="
        found: Counter[str] = Counter()
        for line in text.splitlines():
            if line.startswith(start):
                name, value = line.removeprefix(start).split("} ")
                found[name.strip('"')] = int(float(value))
        return found

    def evaluate(
        self,
        arm: str,
        tasks: Sequence[TaskConfig] | None = None,
        concurrent: int | None = None,
        limit: int | None = None,
    ) -> Evaluation:
        """Run tasks against an arm.

        Args:
            arm: Its name.
            tasks: Those to run, all by default.
            concurrent: Requests at a time, the configuration's by default.
            limit: Documents of each task, the configuration's by default.
        """
        self.forget()
        before = self.routes(arm)
        out = Evaluation(arm)
        started = time.monotonic()
        self._steps.take()
        for task in tasks or self.config.tasks:
            self._evaluate(out, task, concurrent or self.config.num_concurrent, limit)
            out.work[task.name] = self._steps.take()
        out.seconds = time.monotonic() - started
        out.routes = self.routes(arm) - before
        return out

    def _evaluate(
        self, out: Evaluation, task: TaskConfig, concurrent: int, limit: int | None
    ) -> None:
        path = "chat/completions" if task.chat else "completions"
        arguments = {
            "model": str(self.model),
            "base_url": f"{self.urls[out.arm]}/v1/{path}",
            "num_concurrent": concurrent,
            "max_length": self.config.max_model_len,
            "max_retries": 1,
            "timeout": 600,
        }
        more: dict[str, Any] = {"return_token_ids": True}
        if task.chat:
            more |= {"logprobs": True, "top_logprobs": 2}
        else:
            arguments["tokenizer_backend"] = "huggingface"
            more["logprobs"] = 2
        kind = "local-chat-completions" if task.chat else "local-completions"
        with recorded() as answers:
            result = lm_eval.simple_evaluate(
                model=kind,
                model_args=arguments,
                tasks=[task.name],
                num_fewshot=self.config.num_fewshot,
                limit=limit or self.config.limit,
                task_manager=self._tasks,
                apply_chat_template=task.chat,
                gen_kwargs=more,
                bootstrap_iters=0,
            )
        for metric in task.metrics:
            value = result["results"][task.name].get(metric.name)
            assert value is not None, f"{task.name} has no metric {metric.name}"
            out.metrics[task.name, metric.name] = float(value)
        samples = sorted(result["samples"][task.name], key=lambda s: s["doc_id"])
        if samples and isinstance(samples[0]["filtered_resps"][0], tuple | list):
            out.likelihoods[task.name] = [
                float(response[0])
                for sample in samples
                for response in sample["filtered_resps"]
            ]
        else:
            out.generations[task.name] = {g.prompt: g for g in answers}
            assert len(out.generations[task.name]) == len(samples), (
                f"{task.name}: {len(samples)} documents, "
                f"{len(out.generations[task.name])} different prompts answered"
            )


def _transfer(connector: str, device: str) -> str:
    fields = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_buffer_device": device,
    }
    if connector == "FaultyNixlConnector":
        fields["kv_connector_module_path"] = "faults"
    return json.dumps(fields)


@contextmanager
def recorded() -> Iterator[list[Generation]]:
    """Note every generation that lm-eval is answered, token ids and all.

    lm-eval keeps the text alone, in which two token sequences can look alike.
    """
    noted: list[Generation] = []
    owners = (LocalCompletionsAPI, LocalChatCompletion)
    # As they are stored: one is a static method, the other is not.
    originals = [vars(owner)["parse_generations"] for owner in owners]

    def noting(original: Any) -> Any:
        def parse(self: Any, outputs: Any, **rest: Any) -> Any:
            answers = outputs if isinstance(outputs, list) else [outputs]
            noted.extend(_generation(answer) for answer in answers)
            return original.__get__(self, type(self))(outputs=outputs, **rest)

        return parse

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        for owner, original in zip(owners, originals, strict=True):
            owner.parse_generations = noting(original)
        yield noted
    finally:
        for owner, original in zip(owners, originals, strict=True):
            owner.parse_generations = original


def _generation(answer: dict[str, Any]) -> Generation:
    (choice,) = answer["choices"]
    prompt = choice.get("prompt_token_ids") or answer["prompt_token_ids"]
    logprobs = choice["logprobs"]
    if "content" in logprobs:  # The chat API's form.
        content = logprobs["content"]
        chosen = [part["logprob"] for part in content]
        tops = [[top["logprob"] for top in part["top_logprobs"]] for part in content]
    else:
        chosen = logprobs["token_logprobs"]
        tops = [list(top.values()) for top in logprobs["top_logprobs"]]
    gaps = tuple(
        min((abs(own - other) for other in top if other != own), default=0.0)
        for own, top in zip(chosen, tops, strict=True)
    )
    return Generation(tuple(prompt), tuple(choice["token_ids"]), tuple(chosen), gaps)
