"""What a server shows of itself while it is measured: its processes' CPU time, and a few of its Prometheus series."""

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from types import TracebackType

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from pdserve_bench.load.records import ServerSample

INTERVAL_S = 1.0
TIMEOUT_S = 2.0
"""A busy server may not answer sooner: that sample goes without its series."""

SERIES = (
    "num_requests_waiting",
    "num_requests_running",
    "num_requests_transferring",
    "worker_requests_waiting",
    "worker_requests_running",
    "worker_requests_transferring",
    "kv_blocks_free",
    "kv_blocks_reserved",
    "kv_blocks_cached",
    "kv_blocks_usable",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "rejections_total",
    "retries_total",
    "num_preemptions_total",
)
"""After a prefix such as `pdserve:` or `vllm:`."""

CPU = "process_cpu_s"
"""The series that is not the server's own: CPU seconds so far, by label `process`."""

_log = logging.getLogger(__name__)


def useful_series(text: str) -> dict[str, float]:
    """Those of `SERIES` in a page of Prometheus' text format, by name and labels as they stand there.

    Raises:
        ValueError: it is not such a page.
    """
    lines = [line for line in text.splitlines() if _stem(line) in SERIES]
    families = text_string_to_metric_families("\n".join(lines) + "\n")
    samples = [sample for family in families for sample in family.samples]
    return {
        series_name(sample.name, sample.labels): float(sample.value)
        for sample in samples
        if math.isfinite(sample.value)
    }


def series_name(name: str, labels: Mapping[str, str]) -> str:
    """`name{label="value",…}`, labels in order of their names."""
    shown = ",".join(f'{label}="{labels[label]}"' for label in sorted(labels))
    return f"{name}{{{shown}}}" if shown else name


def _stem(line: str) -> str:
    name = line.partition("{")[0].partition(" ")[0]
    return name.rpartition(":")[2]


class ServerView:
    """Looks once on entry, then each interval, and once on exit, from the event loop of the load generator.

    A server without metrics is seen by its CPU time alone; a process that ends keeps what it was last seen with.
    """

    def __init__(self, pids: Mapping[str, int], metrics_url: str = "", interval_s: float = INTERVAL_S) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._metrics_url = metrics_url
        self._interval_s = interval_s
        self._seen: list[ServerSample] = []
        self._first_cpu_s: dict[str, float] = {}
        self._last_cpu_s: dict[str, float] = {}

    async def __aenter__(self) -> "ServerView":
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        self._stopped = asyncio.Event()
        try:
            await self._look()
        except BaseException:
            await self._session.close()
            raise
        self._first_cpu_s = dict(self._last_cpu_s)
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        try:
            await self._task
            if kind is None:
                await self._look()
        finally:
            await self._session.close()

    @property
    def cpu_s(self) -> dict[str, float]:
        """Of each process, from entry to the last look."""
        return {name: self._last_cpu_s[name] - first_s for name, first_s in self._first_cpu_s.items()}

    def samples(self, begin_unix_s: float) -> tuple[ServerSample, ...]:
        """Their times from `begin_unix_s` on the wall clock, where a run began; the first lies shortly before it."""
        return tuple(ServerSample(one.at_s - begin_unix_s, one.values) for one in self._seen)

    async def _watch(self) -> None:
        while not self._stopped.is_set():
            try:
                await asyncio.wait_for(self._stopped.wait(), self._interval_s)
            except TimeoutError:
                await self._look()

    async def _look(self) -> None:
        at_s = time.time()
        self._note_cpu()
        cpu = {series_name(CPU, {"process": name}): value for name, value in self._last_cpu_s.items()}
        self._seen.append(ServerSample(at_s, {**cpu, **await self._series()}))

    def _note_cpu(self) -> None:
        for name, process in self._processes.items():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            self._last_cpu_s[name] = float(times.user + times.system)

    async def _series(self) -> dict[str, float]:
        if not self._metrics_url:
            return {}
        try:
            async with self._session.get(self._metrics_url) as response:
                response.raise_for_status()
                return useful_series(await response.text())
        except TimeoutError:
            return {}
        except (aiohttp.ClientError, ValueError) as error:
            _log.warning("%s: no more metrics from there: %s", self._metrics_url, error)
            self._metrics_url = ""
            return {}
