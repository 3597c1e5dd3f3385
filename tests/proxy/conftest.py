# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.proxy.stubs import MODEL, LiveProxy, StubEngine, live, profile, report, until
from vllm_kairos.core.settings import Settings
from vllm_kairos.proxy import release
from vllm_kairos.proxy.flags import ProxySettings


@pytest.fixture(autouse=True)
def stops_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy stopped in a stub's own thread waits for that stub in vain."""
    monkeypatch.setattr(release, "STOP_S", 0.2)


@pytest_asyncio.fixture
async def engines() -> AsyncIterator[list[StubEngine]]:
    """Four engines: two prefill, two decode."""
    stubs = [StubEngine() for _ in range(4)]
    for stub in stubs:
        await stub.start()
    yield stubs
    for stub in stubs:
        await stub.stop()


@pytest_asyncio.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class Cluster:
    """A proxy in front of stub engines.

    Attributes:
        prefill: Prefill engines.
        decode: Decode engines.
        proxy: The proxy.
    """

    def __init__(
        self, prefill: list[StubEngine], decode: list[StubEngine], proxy: LiveProxy
    ):
        self.prefill = prefill
        self.decode = decode
        self.proxy = proxy

    @property
    def url(self) -> str:
        return self.proxy.url

    async def reports_arrived(self) -> None:
        """Wait until every engine with a state is known to the proxy."""
        fleet = self.proxy.kairos.service.fleet  # type: ignore[attr-defined]
        stubs = [*self.prefill, *self.decode]
        await until(
            lambda: all(
                fleet[s.address].report is not None
                for s in stubs
                if s.state is not None
            )
        )


MakeCluster = Callable[..., Cluster]


@pytest.fixture
def cluster(engines: list[StubEngine]) -> Iterator[MakeCluster]:
    """Makes a cluster of ``prefill`` and ``decode`` engines."""
    with contextlib.ExitStack() as stack:

        def make(
            prefill: int = 1,
            decode: int = 1,
            policy: str = "disagg",
            with_profile: bool = False,
            with_state: bool = False,
            **settings: Any,
        ) -> Cluster:
            p, d = engines[:prefill], engines[2 : 2 + decode]
            nodes = [s.address for s in (*p, *d)]
            if with_state:
                for stub in (*p, *d):
                    stub.state = report(engine_id=stub.address)
            settings.setdefault("slo", Settings(tau_ms=50.0, ttft_slo_ms=4000.0))
            proxy = stack.enter_context(
                live(
                    ProxySettings(
                        model=MODEL,
                        prefill=[s.address for s in p],
                        decode=[s.address for s in d],
                        policy=policy,
                        engine_state={s.address: s.state_address for s in (*p, *d)},
                        profiles=dict.fromkeys(nodes, profile())
                        if with_profile
                        else {},
                        **settings,
                    )
                )
            )
            return Cluster(p, d, proxy)

        yield make
