"""One load, or a search over rates, against one server: measured, its outputs checked, judged. Prints nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pdserve_bench.load.client import RequestError
from pdserve_bench.load.generator import RunOptions
from pdserve_bench.load.own_limits import warnings
from pdserve_bench.load.plan import LoadPlan
from pdserve_bench.load.prompts import derived_seed
from pdserve_bench.load.records import RunResult
from pdserve_bench.measures.breakdown import by_class
from pdserve_bench.measures.outputs import pick, reference_outputs, wrong_numbers
from pdserve_bench.measures.summarise import summarise, summary_to_json
from pdserve_bench.measures.summary import Slo, Summary
from pdserve_bench.serve.options import Load
from pdserve_bench.serve.search import Found, SearchConfig, Trial, search
from pdserve_bench.serve.session import Session
from pdserve_bench.serve.verdict import HitRate, Tolerance, Verdict, hit_rate, judge

_SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How every run is done and judged. `num_checked`: outputs that are compared with what the idle server answers to
    the same prompts. `seed`: of which of them these are, and of a search's plans."""

    seed: int
    run: RunOptions = field(default_factory=RunOptions)
    slo: Slo = field(default_factory=Slo)
    tolerance: Tolerance = field(default_factory=Tolerance)
    num_warmups: int = 2
    num_checked: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """One run and what is made of it. `limits_told`: in which ways the client was itself the limit."""

    run: RunResult
    summary: Summary
    classes: Mapping[str, Summary]
    cache: HitRate
    verdict: Verdict
    limits_told: tuple[str, ...]
    num_checked: int

    def to_json(self) -> dict[str, object]:
        return {
            "summary": summary_to_json(self.summary),
            "classes": {name: summary_to_json(one) for name, one in self.classes.items()},
            "prefix_cache_hit_rate": {"intended": self.cache.intended, "measured": self.cache.measured},
            "exit_code": self.verdict.exit_code,
            "faults": list(self.verdict.faults),
            "notes": list(self.verdict.notes),
            "client_warnings": list(self.limits_told),
            "num_outputs_checked": self.num_checked,
            "run": self.run.to_json(),
        }


async def serve_once(session: Session, options: ServeOptions, plan: LoadPlan, name: str = "serve") -> Served:
    """Warm up, then run the plan.

    Raises:
        RequestError: a warm-up request failed.
    """
    await session.warm_up(plan, options.num_warmups)
    return await _measured(session, options, plan, name)


@dataclass(frozen=True, slots=True)
class Search:
    """Over the rates of `load`, each run for `duration_s` on prompts of its own."""

    config: SearchConfig
    load: Load
    duration_s: float

    def plan(self, rate: float, repeat: int, seed: int) -> LoadPlan:
        """Raises ValueError: no plan can be made of the load."""
        own_seed = derived_seed(seed, "search", f"{rate:.9g}", repeat) % _SEEDS
        return self.load.at(rate, self.duration_s).plan(own_seed)


async def serve_search(
    session: Session, options: ServeOptions, asked: Search, note: Callable[[Trial, Served], None]
) -> tuple[Found, list[Served]]:
    """The highest rate at which goodput is good enough, and every run that was not interrupted.

    Raises:
        RequestError: a warm-up request failed.
    """
    runs: list[Served] = []
    await session.warm_up(asked.plan(asked.config.start_rate, 0, options.seed), options.num_warmups)

    async def measure(rate: float, repeat: int) -> float | None:
        plan = asked.plan(rate, repeat, options.seed)
        served = await _measured(session, options, plan, f"{rate:.4g} requests/s, run {repeat + 1}")
        if served.run.interrupted:
            return None
        runs.append(served)
        return served.summary.goodput

    return await search(asked.config, measure, lambda trial: note(trial, runs[-1])), runs


async def _measured(session: Session, options: ServeOptions, plan: LoadPlan, name: str) -> Served:
    run = await session.run(plan, options.run, name)
    wrong, num_checked, unchecked = frozenset[int](), 0, ""
    if options.num_checked and not run.interrupted:
        chosen = pick(run.records, options.num_checked, options.seed)
        numbers = {record.number for record in chosen}
        asked = [request for request in plan.requests if request.number in numbers]
        try:
            wrong = wrong_numbers(chosen, await reference_outputs(session.client, asked))
            num_checked = len(chosen)
        except RequestError as error:
            unchecked = f"outputs were not checked: {error}"
    summary = summarise(run, options.slo, wrong=wrong)
    cache = hit_rate(plan, run, summary)
    verdict = judge(summary, cache, options.tolerance, interrupted=run.interrupted)
    if unchecked:
        verdict = replace(verdict, exit_code=verdict.exit_code or 1, faults=(*verdict.faults, unchecked))
    return Served(
        run=run,
        summary=summary,
        classes=by_class(run, options.slo, wrong),
        cache=cache,
        verdict=verdict,
        limits_told=tuple(warnings(run)),
        num_checked=num_checked,
    )
