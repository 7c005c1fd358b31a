"""Measures one load of a capacity sweep: interactive requests in an open loop, and documents in a closed one."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve_bench.load.arrivals import Arrivals
from pdserve_bench.load.client import Answer, LoadClient, NoteTokens
from pdserve_bench.load.generator import RunOptions, run_plan
from pdserve_bench.load.mixes import Lengths, Mix, Stream, make_plan
from pdserve_bench.load.plan import LoadPlan, PlannedRequest
from pdserve_bench.load.presets import MIXED
from pdserve_bench.load.prompts import FreshPrompts, derived_seed
from pdserve_bench.load.records import Outcome, RequestRecord, RunResult
from pdserve_bench.measures.summarise import summarise
from pdserve_bench.measures.summary import Slo
from pdserve_bench.serve.cells import Cell, Load
from pdserve_bench.serve.options import CannotMeasureError
from pdserve_bench.serve.series import rise, values
from pdserve_bench.serve.session import Session

_SHORTEST_DOCUMENT_S = 0.05
"""What takes less needs no measurement as a document."""
_SEEDS = 2**63
_OCCUPANCY = "kv_cache_usage_perc"
_ALLOCATION_FAILURES = ("num_preemptions_total", "retries_total")
"""vLLM's and ours: a sequence had to give up its place for want of blocks, or to be placed again."""
_INTERACTIVE, _DOCUMENT = MIXED.streams


@dataclass(frozen=True, slots=True)
class CellOptions:
    """`prompt` and `output`: of interactive requests. `seed`: of all cells; each draws its own from it."""

    seed: int
    duration_s: float = 60.0
    drain_s: float = 60.0
    prompt: Lengths = _INTERACTIVE.prompt
    output: Lengths = _INTERACTIVE.output
    document_tokens: int = _DOCUMENT.prompt.high
    document_output_tokens: int = _DOCUMENT.output.high
    vocab_size: int = 32000

    def __post_init__(self) -> None:
        """ValueError: no seconds, or too few token ids."""
        if not 0 < self.duration_s < math.inf:
            raise ValueError(f"--duration {self.duration_s:g}: expected seconds above 0")
        FreshPrompts(0, self.vocab_size)


async def measure_cell(session: Session, options: CellOptions, load: Load) -> Cell | None:
    """None: interrupted.

    Raises:
        CannotMeasureError: the documents end too fast to be kept in flight.
    """
    seed = derived_seed(options.seed, "cell", load.name) % _SEEDS
    stream = Stream("interactive", Arrivals("poisson", load.rate), options.prompt, options.output)
    plan = make_plan(Mix("interactive", (stream,)), options.duration_s, seed, options.vocab_size)
    drain, progress = RunOptions(drain_s=options.drain_s), session.progress(load.name)
    async with session.watched() as watch, asyncio.TaskGroup() as tasks:
        interactive = tasks.create_task(run_plan(plan, session.client, drain, load.name, progress, session.stop))
        documents = tasks.create_task(_documents(session, options, load, seed)) if load.num_documents else None
    run = watch.completed(interactive.result())
    beside = documents.result() if documents else None
    if run.interrupted or (beside is not None and beside.interrupted):
        return None
    sent = [] if beside is None else [record for record in beside.records if record.sent_s is not None]
    if beside is not None and len(sent) == len(beside.records):
        raise CannotMeasureError(f"a document takes less than {_SHORTEST_DOCUMENT_S:g} s: use longer ones")
    return cell_of(load, run, sent)


async def _documents(session: Session, options: CellOptions, load: Load, seed: int) -> RunResult:
    """All are there from the begin, but only so many may be in flight; what is not even sent in time does not count."""
    count = load.num_documents * math.ceil(options.duration_s / _SHORTEST_DOCUMENT_S)
    prompt = (0,) * options.document_tokens
    requests = (
        PlannedRequest(number, 0.0, prompt, options.document_output_tokens, "document") for number in range(count)
    )
    fresh = FreshPrompts(derived_seed(seed, "documents"), options.vocab_size)
    limit = RunOptions(max_concurrency=load.num_documents, drain_s=options.duration_s)
    return await run_plan(
        LoadPlan(tuple(requests), seed), _Freshened(session.client, fresh), limit, "documents", None, session.stop
    )


class _Freshened:
    """A client that fills in each prompt's tokens as it is sent: made beforehand, thousands would fill the memory."""

    def __init__(self, client: LoadClient, prompts: FreshPrompts) -> None:
        self._client = client
        self._prompts = prompts

    async def send(self, request: PlannedRequest, note: NoteTokens) -> Answer:
        token_ids = self._prompts.next(len(request.token_ids))
        return await self._client.send(replace(request, token_ids=token_ids), note)

    async def close(self) -> None:
        """The client belongs to another."""


def cell_of(load: Load, run: RunResult, documents: Sequence[RequestRecord]) -> Cell:
    """`run`: of the interactive requests. `documents`: that were sent, of a run that began with it."""
    slo = Slo()
    own, both = summarise(run, slo), summarise(run, slo, records=[*run.records, *documents])
    failed = [one for one in (*run.records, *documents) if one.outcome in (Outcome.FAILED, Outcome.REJECTED)]
    return Cell(
        rate=load.rate,
        num_documents=load.num_documents,
        duration_s=run.duration_s,
        offered=own.offered,
        completed=own.completed,
        num_failures=len(failed),
        unfinished=own.unfinished,
        num_expired=sum(_expired(record) for record in failed),
        documents_completed=both.completed - own.completed,
        ttft_p50_s=own.ttft.median,
        ttft_p99_s=own.ttft.p99,
        itl_p50_s=own.itl.median,
        itl_p99_s=own.itl.p99,
        prompt_tokens_per_s=both.prompt_throughput,
        output_tokens_per_s=both.output_throughput,
        cached_share=both.cached_share,
        peak_block_occupancy=max(values(run.samples, _OCCUPANCY), default=None),
        num_allocation_failures=rise(run.samples, _ALLOCATION_FAILURES, _OCCUPANCY),
        foreign_cores=run.foreign_cores,
    )


def _expired(record: RequestRecord) -> bool:
    """Its deadline passed before a token came, as pdserve's HTTP and gRPC errors say it."""
    return not record.events and "deadline" in record.error.lower()
