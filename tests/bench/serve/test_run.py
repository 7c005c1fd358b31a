"""A run, its checks and a search, against a server with set timing; and over gRPC against scripted workers."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from pdserve_bench.load.client import RequestError
from pdserve_bench.load.generator import Progress, RunOptions
from pdserve_bench.measures.summary import Slo
from pdserve_bench.serve.flags import LoadFlags
from pdserve_bench.serve.options import CannotMeasureError, ServerOptions
from pdserve_bench.serve.run import Search, Served, ServeOptions, serve_once, serve_search
from pdserve_bench.serve.search import SearchConfig, Trial
from pdserve_bench.serve.session import opened
from tests.support.front_door import front_door
from tests.support.timed_server import Behaviour, TimedServer

FLAGS = LoadFlags(num_prompts=6, input_len="20", output_len="5")


def ignore(_name: str, _progress: Progress) -> None:
    pass


async def served(behaviours: list[Behaviour], options: ServeOptions) -> tuple[Served, TimedServer]:
    """Requests get `behaviours` in turn, and the plain one after them."""
    left = iter(behaviours)
    plan = FLAGS.load().plan(options.seed)
    async with (
        TimedServer(lambda _: next(left, Behaviour())) as server,
        opened(ServerOptions(server.base_url), ignore) as session,
    ):
        return await serve_once(session, options, plan), server


async def test_answers_that_differ_from_those_of_the_idle_server_are_wrong() -> None:
    wrong = Behaviour(num_before_end=2, finish_reason="stop")
    one, server = await served([wrong, Behaviour(), wrong], ServeOptions(seed=1, num_warmups=0, num_checked=6))
    assert (one.num_checked, one.summary.num_wrong, one.summary.num_good) == (6, 2, 4)
    assert one.verdict.exit_code == 1
    assert len(server.bodies) == 12
    right, _ = await served([], ServeOptions(seed=1, num_warmups=0, num_checked=3))
    assert (right.num_checked, right.summary.num_wrong, right.verdict.exit_code) == (3, 0, 0)


async def test_outputs_that_cannot_be_checked_are_a_fault() -> None:
    options = ServeOptions(seed=1, num_warmups=0, num_checked=1)
    one, _ = await served([Behaviour()] * 6 + [Behaviour(status=500)], options)
    assert (one.num_checked, one.summary.completed, one.verdict.exit_code) == (0, 6, 1)
    assert one.verdict.faults[0].startswith("outputs were not checked: HTTP 500")


async def test_warm_ups_come_first_and_share_no_block_with_what_is_measured() -> None:
    one, server = await served([], ServeOptions(seed=1, num_warmups=3))
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert sorted(prompts[3:]) == sorted(request.token_ids for request in FLAGS.load().plan(1).requests)
    assert not {prompt[:16] for prompt in prompts[:3]} & {prompt[:16] for prompt in prompts[3:]}
    assert one.summary.offered == 6


async def test_a_server_that_fails_the_warm_up_is_not_measured() -> None:
    with pytest.raises(RequestError, match="a warm-up request failed: HTTP 500"):
        await served([Behaviour(status=500)], ServeOptions(seed=1, num_warmups=1))


async def test_a_process_that_is_none_is_refused() -> None:
    async with TimedServer() as server:
        with pytest.raises(CannotMeasureError, match="--server-pid 4194305"):
            async with opened(ServerOptions(server.base_url, server_pid=4194305), ignore):
                raise AssertionError


async def test_the_first_ctrl_c_stops_the_run_and_the_second_one_ends_the_process() -> None:
    before = signal.getsignal(signal.SIGINT)
    async with TimedServer() as server:
        async with opened(ServerOptions(server.base_url), ignore) as session:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(session.stop.wait(), 30)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is before


async def test_a_servers_processes_are_measured_and_it_is_no_foreign_load() -> None:
    plan = FLAGS.load().plan(1)
    async with (
        TimedServer() as server,
        opened(ServerOptions(server.base_url, server_pid=os.getpid()), ignore) as session,
    ):
        one = await serve_once(session, ServeOptions(seed=1), plan)
    assert any(name.endswith(f"-{os.getpid()}") for name in one.run.server_cpu_s)
    assert one.run.foreign_cores >= 0


async def test_a_search_finds_what_a_server_of_one_request_at_a_time_bears() -> None:
    """Each takes 0.1 s or more, so that of 64 in half a second few have their first token within 0.8 s."""
    noted: list[Trial] = []
    load = LoadFlags(request_rate="2", input_len="20", output_len="2").load()
    config = SearchConfig(start_rate=16.0, min_rate=1.0, max_rate=128.0, max_probes=3, repeats=1)
    options = ServeOptions(seed=3, slo=Slo(ttft_s=0.8, itl_s=5.0), run=RunOptions(drain_s=0.5), num_warmups=1)
    async with (
        TimedServer(lambda _: Behaviour(first_token_s=0.1), one_at_a_time=True) as server,
        opened(ServerOptions(server.base_url), ignore) as session,
    ):
        asked = Search(config, load, 0.5)
        found, runs = await serve_search(session, options, asked, lambda trial, _: noted.append(trial))
    assert found.trials == tuple(noted)
    assert [trial.goodput for trial in noted] == [one.summary.goodput for one in runs]
    assert found.failing_rate is not None
    assert found.rate is None or found.rate < 64
    sent = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(sent)) == len(sent), "no run sends what another has sent"


async def test_over_grpc_the_servers_own_timings_come_too(tiny_model: Path) -> None:
    plan = LoadFlags(num_prompts=3, input_len="4", output_len="5", vocab_size=90).load().plan(1)
    async with front_door(tiny_model) as door:
        options = ServerOptions("http://127.0.0.1:9", protocol="grpc", address=door.grpc_address)
        async with opened(options, ignore) as session:
            one = await serve_once(session, ServeOptions(seed=1, num_warmups=1), plan)
    assert (one.summary.completed, one.summary.queue.count, one.verdict.exit_code) == (3, 3, 0)
    assert session.model == ""
