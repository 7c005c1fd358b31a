"""Compares fleets: all cells of a schedule, in turns, from the store where they are there. Starts no fleet."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from pdserve_bench.compare.comparison import ComparisonResult, Measurement
from pdserve_bench.compare.fresh_prompts import as_sent
from pdserve_bench.compare.measure import CompareOptions, Measurable, Measurer
from pdserve_bench.compare.schedule import Cell, schedule
from pdserve_bench.compare.store import Store
from pdserve_bench.load.plan import LoadPlan
from pdserve_bench.load.records import RunResult
from pdserve_bench.measures.summarise import summarise
from pdserve_bench.measures.summary import Slo

Plans = Mapping[float, Sequence[LoadPlan]]
"""By rate factor: a plan for each repeat, which every fleet gets alike. No two of them from one seed, so that a prefix
cache that is on knows no prompt from before."""


def compare(
    fleets: Sequence[Measurable],
    plans: Plans,
    slo: Slo,
    store: Store,
    note: Callable[[Measurement], None],
    options: CompareOptions | None = None,
) -> ComparisonResult:
    """Every fleet under every plan, in turns, and the baseline twice in each round. Call it outside any event loop.

    Ctrl-C ends it with what was measured until then. One store holds one comparison: what it has already, measured
    under the same conditions, is not measured again.

    Args:
        fleets: all frozen, as they are afterwards.
        note: told of each measurement as it is there, those from the store included.

    Raises:
        ServerError: a fleet is gone, or answers nothing.
        ValueError: no fleet, fleets of one name, an unknown baseline, no or empty plans, or rates with different
            numbers of plans.
    """
    options = options or CompareOptions()
    by_name = {fleet.spec.name: fleet for fleet in fleets}
    baseline = options.baseline or next(iter(by_name), "")
    cells = schedule([fleet.spec.name for fleet in fleets], sorted(plans), _num_repeats(plans), baseline)
    measured: list[Measurement] = []
    with asyncio.Runner() as runner:
        measurer = Measurer(fleets, options, runner)
        try:
            for cell in cells:
                fleet, plan = by_name[cell.fleet], plans[cell.rate_factor][cell.repeat]
                run = _stored(store, measurer, fleet, plan, cell)
                if run.interrupted:
                    break
                wrong = options.find_wrong(as_sent(plan, run.about), run) if options.find_wrong else ()
                measured.append(Measurement(cell, run, summarise(run, slo, wrong=wrong)))
                note(measured[-1])
        except KeyboardInterrupt:
            pass  # what was measured is the result
    return ComparisonResult(
        baseline=baseline,
        slo=slo,
        measured=tuple(measured),
        described={fleet.spec.name: fleet.describe() for fleet in fleets},
        plans={rate: [{**plan.about, "seed": plan.seed} for plan in plans[rate]] for rate in sorted(plans)},
        interrupted=len(measured) < len(cells),
    )


def _stored(store: Store, measurer: Measurer, fleet: Measurable, plan: LoadPlan, cell: Cell) -> RunResult:
    digest = measurer.digest(fleet, plan)
    return store.get_or_run(cell.key, digest, lambda: measurer.measure(fleet, plan, cell))


def _num_repeats(plans: Plans) -> int:
    numbers = {len(of_rate) for of_rate in plans.values()}
    if len(numbers) != 1:
        raise ValueError(f"every rate needs as many plans, one for each repeat; there are {sorted(numbers)}")
    if any(not plan.requests for of_rate in plans.values() for plan in of_rate):
        raise ValueError("a plan without requests")
    return numbers.pop()
