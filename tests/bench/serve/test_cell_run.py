"""One cell of a sweep, against a server with set timing, and what becomes of its records."""

import asyncio
from collections.abc import Callable

import pytest

from pdserve_bench.load.generator import Progress
from pdserve_bench.load.mixes import Lengths
from pdserve_bench.load.records import ClientLimits, Outcome, RequestRecord, RunResult, ServerSample, TokenEvent
from pdserve_bench.serve.cell_run import CellOptions, cell_of, measure_cell
from pdserve_bench.serve.cells import Load
from pdserve_bench.serve.options import CannotMeasureError, ServerOptions
from pdserve_bench.serve.session import opened
from tests.support.timed_server import Behaviour, TimedServer

OPTIONS = CellOptions(
    seed=5,
    duration_s=1.0,
    drain_s=20.0,
    prompt=Lengths.fixed(8),
    output=Lengths.fixed(3),
    document_tokens=40,
    document_output_tokens=4,
)


def ignore(_name: str, _progress: Progress) -> None:
    pass


def slow_documents(prompt: list[int]) -> Behaviour:
    return Behaviour(first_token_s=0.1) if len(prompt) == 40 else Behaviour()


async def test_documents_are_always_in_flight_beside_interactive_requests() -> None:
    async with TimedServer(slow_documents) as server, opened(ServerOptions(server.base_url), ignore) as session:
        cell = await measure_cell(session, OPTIONS, Load(2, 20.0))
    assert cell is not None
    documents = [body for body in server.bodies if len(body["prompt"]) == 40]
    assert len({tuple(body["prompt"]) for body in documents}) == len(documents), "every document is fresh"
    assert {body["max_tokens"] for body in documents} == {4}
    assert 2 <= cell.documents_completed <= 20, "two at a time, each 0.1 s or more, for 1 s"
    assert cell.documents_completed <= len(documents) <= cell.documents_completed + 2
    assert cell.completed == cell.offered == len(server.bodies) - len(documents)
    assert (cell.num_failures, cell.unfinished, cell.num_expired) == (0, 0, 0)
    assert (cell.cached_share, cell.peak_block_occupancy, cell.num_allocation_failures) == (0.0, None, None)
    assert cell.load == Load(2, 20.0)


async def test_never_more_documents_than_asked_for() -> None:
    none = CellOptions(**{**_fields(OPTIONS), "duration_s": 0.5})
    async with TimedServer(slow_documents) as server, opened(ServerOptions(server.base_url), ignore) as session:
        await measure_cell(session, none, Load(3, 0.001))
    assert server.peak_in_flight == 3


async def test_documents_that_take_no_time_are_none() -> None:
    async with TimedServer() as server, opened(ServerOptions(server.base_url), ignore) as session:
        with pytest.raises(CannotMeasureError, match="a document takes less than"):
            await measure_cell(session, CellOptions(**{**_fields(OPTIONS), "duration_s": 0.2}), Load(1, 50.0))


async def test_an_interrupted_cell_is_none() -> None:
    begun = asyncio.Event()

    def behave(_prompt: list[int]) -> Behaviour:
        begun.set()
        return Behaviour(end="never")

    async with TimedServer(behave) as server, opened(ServerOptions(server.base_url), ignore) as session:
        cell = asyncio.create_task(measure_cell(session, OPTIONS, Load(1, 20.0)))
        await begun.wait()
        session.stop.set()
        assert await cell is None


def _fields(options: CellOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in CellOptions.__dataclass_fields__}


def record(number: int, outcome: Outcome, error: str = "", *, with_tokens: bool = True) -> RequestRecord:
    return RequestRecord(
        number=number,
        request_class="any",
        tenant="",
        num_prompt_tokens=100,
        max_tokens=3,
        scheduled_s=0.0,
        outcome=outcome,
        sent_s=0.1,
        events=(TokenEvent(0.5, 1), TokenEvent(0.6, 2)) if with_tokens else (),
        num_output_tokens=3,
        num_counted_tokens=3,
        num_cached_tokens=25,
        error=error,
    )


def run(*records: RequestRecord, samples: tuple[ServerSample, ...] = ()) -> RunResult:
    return RunResult("cell", {}, 0.0, 2.0, records, ClientLimits(0, 0, 0, 0, 1), 0.05, {}, samples)


def test_a_cell_counts_what_failed_and_what_expired_in_the_queue() -> None:
    good, left = record(0, Outcome.COMPLETED), record(1, Outcome.UNFINISHED, with_tokens=False)
    http = record(2, Outcome.FAILED, 'HTTP 504: {"error": {"code": "deadline_exceeded"}}', with_tokens=False)
    late = record(3, Outcome.FAILED, "deadline_exceeded: no time is left")
    refused = record(0, Outcome.REJECTED, "HTTP 429: queue_full", with_tokens=False)
    document = record(1, Outcome.COMPLETED)
    cell = cell_of(Load(1, 2.0), run(good, left, http, late), [refused, document])
    assert (cell.offered, cell.completed, cell.unfinished, cell.documents_completed) == (4, 1, 1, 1)
    assert (cell.num_failures, cell.num_expired) == (3, 1)
    assert (cell.ttft_p99_s, cell.cached_share, cell.foreign_cores) == (0.5, 0.25, 0.05)
    assert (cell.prompt_tokens_per_s, cell.output_tokens_per_s) == (150.0, 4.5)


def sample(at_s: float, **values: float) -> ServerSample:
    return ServerSample(at_s, {f'pdserve:{name}{{model="m"}}': value for name, value in values.items()})


@pytest.mark.parametrize(
    ("samples", "occupancy", "failures"),
    [
        ((), None, None),
        ((sample(0, process_cpu_s=1),), None, None),
        ((sample(0, kv_cache_usage_perc=0.2), sample(1, kv_cache_usage_perc=0.7), sample(2)), 0.7, 0.0),
        (
            (
                sample(0, kv_cache_usage_perc=0.2),
                sample(1),
                sample(2, kv_cache_usage_perc=0.1, retries_total=2),
            ),
            0.2,
            2.0,
        ),
        (
            (
                sample(0, kv_cache_usage_perc=0.0, num_preemptions_total=5),
                sample(1, kv_cache_usage_perc=0.0, num_preemptions_total=6),
            ),
            0.0,
            1.0,
        ),
    ],
)
def test_a_cell_shows_what_the_server_says_of_its_blocks(
    samples: tuple[ServerSample, ...], occupancy: float | None, failures: float | None
) -> None:
    cell = cell_of(Load(0, 1.0), run(record(0, Outcome.COMPLETED), samples=samples), [])
    assert (cell.peak_block_occupancy, cell.num_allocation_failures) == (occupancy, failures)


@pytest.mark.parametrize("change", [{"duration_s": 0.0}, {"vocab_size": 3}])
def test_options_that_make_no_cell_are_refused(change: dict[str, object]) -> None:
    make: Callable[..., CellOptions] = CellOptions
    with pytest.raises(ValueError, match=r"--duration 0: expected|a vocabulary of"):
        make(**{**_fields(OPTIONS), **change})
