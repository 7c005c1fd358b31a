"""What a server shows while it is measured: useful series only, CPU by process, and no trouble if there is nothing."""

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from coordinator.metrics import Metrics
from pdserve_bench.compare.server_view import CPU, ServerView, series_name, useful_series

PAGE = """# HELP pdserve:kv_blocks_free KV blocks that hold nothing
# TYPE pdserve:kv_blocks_free gauge
pdserve:kv_blocks_free{model="m",role="decode",worker="decode-0"} 7.0
pdserve:num_requests_waiting{model="m"} 3.0
pdserve:rejections_total{model="m",reason="queue \\"full\\""} 2.0
pdserve:rejections_created{model="m",reason="queue"} 1.7e+09
pdserve:time_to_first_token_seconds_bucket{le="0.1",model="m"} 5.0
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:kv_cache_usage_perc{model_name="m"} NaN
kv_blocks_free_of_somebody 1.0
"""


def test_only_useful_series_are_kept_with_their_labels() -> None:
    assert useful_series(PAGE) == {
        'pdserve:kv_blocks_free{model="m",role="decode",worker="decode-0"}': 7.0,
        'pdserve:num_requests_waiting{model="m"}': 3.0,
        'pdserve:rejections_total{model="m",reason="queue "full""}': 2.0,
        'vllm:num_requests_running{engine="0",model_name="m"}': 4.0,
    }
    assert useful_series("") == {}
    assert series_name("x", {}) == "x"


def test_our_own_counters_are_among_them() -> None:
    """By the names under which the coordinator exports them."""
    from prometheus_client import generate_latest

    metrics = Metrics(frozenset({"m"}), 60.0)
    metrics.tokens("m", 5, None)
    metrics.rejected("m", "queue_full", 2)
    found = useful_series(generate_latest(metrics.registry).decode())
    assert found['pdserve:generation_tokens_total{model="m"}'] == 5.0
    assert found['pdserve:rejections_total{model="m",reason="queue_full"}'] == 2.0


def test_a_page_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="many"):
        useful_series('pdserve:num_requests_waiting{model="m"} many\n')


@asynccontextmanager
async def serving(answer: Callable[[], web.Response]) -> AsyncIterator[str]:
    async def metrics(_: web.Request) -> web.Response:
        return answer()

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
    finally:
        await runner.cleanup()


async def test_it_looks_at_once_now_and_then_and_at_the_end() -> None:
    asked = asyncio.Semaphore(0)
    values = iter(range(1000))

    def answer() -> web.Response:
        asked.release()
        return web.Response(text=f"pdserve:prompt_tokens_total {next(values)}\n")

    begin_s = time.time()
    async with serving(answer) as url, ServerView({"me": os.getpid()}, url, 0.02) as view:
        for _ in range(4):
            await asked.acquire()
        burnt = sum(range(3_000_000))
    assert burnt
    samples = view.samples(begin_s)
    assert [one.values["pdserve:prompt_tokens_total"] for one in samples] == list(range(len(samples)))
    assert len(samples) >= 5
    times = [one.at_s for one in samples]
    assert times == sorted(times)
    assert times[0] >= 0
    assert view.samples(begin_s + 5.0)[0].at_s == pytest.approx(times[0] - 5.0)
    first, last = (one.values[f'{CPU}{{process="me"}}'] for one in (samples[0], samples[-1]))
    assert view.cpu_s == {"me": last - first}
    assert view.cpu_s["me"] > 0


@pytest.mark.parametrize("status", [404, 500])
async def test_a_server_without_metrics_is_asked_once(status: int, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def answer() -> web.Response:
        asked.append(status)
        return web.Response(status=status)

    with caplog.at_level(logging.WARNING):
        async with serving(answer) as url, ServerView({"me": os.getpid()}, url, 0.001) as view:
            while len(view.samples(0.0)) < 4:  # noqa: ASYNC110 - it gives no sign of its looks
                await asyncio.sleep(0)
    assert len(asked) == 1
    assert "no more metrics" in caplog.text
    assert all(set(one.values) == {f'{CPU}{{process="me"}}'} for one in view.samples(0.0))


async def test_a_server_that_cannot_be_reached_is_no_trouble() -> None:
    async with ServerView({"me": os.getpid()}, "http://127.0.0.1:9/metrics") as view:
        pass
    assert len(view.samples(0.0)) == 2


async def test_a_process_that_ends_keeps_its_last_figure() -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    async with ServerView({"child": child.pid, "me": os.getpid()}) as view:
        await child.communicate(b"\n")
    assert view.cpu_s["child"] >= 0.0
    assert view.cpu_s.keys() == {"child", "me"}


async def test_an_error_within_is_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="of the run"):
        async with ServerView({"me": os.getpid()}):
            raise RuntimeError("of the run")
