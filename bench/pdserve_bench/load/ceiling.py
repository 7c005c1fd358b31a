"""What the load generator can do at most here: its rate against a server that answers at once, in a process of its own.

The two share the machine's cores, so that the figure is a lower bound.
"""

import asyncio
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from pdserve_bench.load.generator import RunOptions, run_plan
from pdserve_bench.load.openai_http import OpenAiClient
from pdserve_bench.load.plan import LoadPlan, PlannedRequest
from pdserve_bench.load.prompts import FreshPrompts
from pdserve_bench.load.records import Outcome

MIN_TIMES = 5.0
"""A rate that a generator reports of a server should be this many times below its own."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    requests_per_s: float
    tokens_per_s: float


def own_ceiling(
    num_requests: int = 300, prompt_tokens: int = 128, output_tokens: int = 64, concurrency: int = 64
) -> Ceiling:
    """Outside any event loop. Takes some seconds.

    Raises:
        RuntimeError: the server did not start, or a request failed.
    """
    prompts = FreshPrompts(1, 32000)
    requests = (
        PlannedRequest(number, 0.0, prompts.next(prompt_tokens), output_tokens) for number in range(num_requests)
    )
    plan = LoadPlan(tuple(requests), seed=1, about={"what": "own ceiling"})
    with _instant_server() as url:
        return asyncio.run(_measure(url, plan, concurrency))


async def _measure(url: str, plan: LoadPlan, concurrency: int) -> Ceiling:
    client = OpenAiClient(url, "instant")
    try:
        run = await run_plan(plan, client, RunOptions(max_concurrency=concurrency), "own ceiling")
    finally:
        await client.close()
    failed = [record for record in run.records if record.outcome is not Outcome.COMPLETED]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(run.records)} requests to an instant server: {failed[0].error}")
    num_tokens = sum(record.num_counted_tokens for record in run.records)
    return Ceiling(len(run.records) / run.duration_s, num_tokens / run.duration_s)


@contextmanager
def _instant_server() -> Generator[str]:
    """Its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pdserve_bench.load.instant_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"the instant server ended with exit code {process.wait()}")
        yield url
    finally:
        process.communicate()
