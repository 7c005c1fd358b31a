"""Which resource kept a run from doing more: by its CPU times, samples and requests' waits. Measures nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median

from pdserve_bench.compare.phases import Phase, PhaseTimes, phase_times
from pdserve_bench.compare.samples import late_mean
from pdserve_bench.load.records import Outcome, RunResult

BUSY = 0.8
"""Share of its cores above which a process is called busy."""
FULL = 0.85
"""Share of usable KV blocks that are reserved above which memory is called full."""
CLIENT_BUSY, CLIENT_LAG_S = 0.9, 0.1
"""Of one core, and p99: above either, the load generator did not offer what was planned."""
UNMET = 0.02
"""Share of requests refused, failed or left over above which the offered load was not met."""
WAIT_GROWTH_S = 0.5
"""Rise of the median wait from the first to the last third of arrivals above which a queue is called growing."""


class Resource(StrEnum):
    """NONE: the offered load was served, within the SLO or not. UNKNOWN: it was not, and no resource stands out."""

    PREFILL_POOL = "prefill pool"
    DECODE_POOL = "decode pool"
    COLOCATED_POOL = "colocated pool"
    KV_BLOCKS = "KV blocks"
    COORDINATOR = "coordinator"
    CLIENT = "client"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Limit:
    """`sentence` gives the figures that decided."""

    resource: Resource
    sentence: str


_POOLS = {"prefill": Resource.PREFILL_POOL, "decode": Resource.DECODE_POOL, "colocated": Resource.COLOCATED_POOL}


def limiting_resource(run: RunResult, cores: Mapping[str, float] | None = None) -> Limit:
    """The first that shows itself: client, none, KV blocks, coordinator, then the pools.

    A decode engine is busy whenever anybody decodes, so that its CPU time alone proves nothing: the prefill pool goes
    first if requests wait for it, and the decode pool is named once the prefill pool is not the one.

    Args:
        cores: how many each process may use, by its name as in `server_cpu_s`; 1 where nothing is said.
    """
    evidence = _Evidence(run, phase_times(run.records), cores or {})
    return evidence.client() or evidence.met() or evidence.kv() or evidence.processes() or evidence.unknown()


@dataclass(frozen=True, slots=True)
class _Evidence:
    run: RunResult
    times: Sequence[PhaseTimes]
    cores: Mapping[str, float]

    def client(self) -> Limit | None:
        limits = self.run.limits
        lag_s = max(limits.dispatch_lag_p99_s, limits.loop_lag_p99_s)
        if limits.cores < CLIENT_BUSY and lag_s < CLIENT_LAG_S:
            return None
        figures = f"it used {limits.cores:.2f} cores and sent requests up to {lag_s * 1000:.0f} ms late (p99)"
        return Limit(Resource.CLIENT, f"The load generator was the limit: {figures}.")

    def met(self) -> Limit | None:
        unmet, growth_s = self._unmet(), self._wait_growth_s()
        if unmet > UNMET or growth_s > WAIT_GROWTH_S:
            return None
        return Limit(
            Resource.NONE,
            f"Nothing kept it from serving the load: {1 - unmet:.1%} of requests were completed, and no queue grew.",
        )

    def kv(self) -> Limit | None:
        """Memory is the limit where it is reserved and requests wait for it rather than for a worker."""
        shares = [share for role in ("decode", "colocated") if (share := self._reserved_share(role)) is not None]
        if (
            not shares
            or max(shares) < FULL
            or self._mean_s(Phase.QUEUE, Phase.RESERVE) < self._mean_s(Phase.PREFILL_WAIT)
        ):
            return None
        wait_s = self._mean_s(Phase.QUEUE, Phase.RESERVE)
        return Limit(
            Resource.KV_BLOCKS,
            f"KV blocks were the limit: {max(shares):.0%} of them were reserved and requests waited {wait_s:.2f} s.",
        )

    def processes(self) -> Limit | None:
        busy = {name: share for name in ("coordinator", *_POOLS) if (share := self._busy(name)) is not None}
        if busy.get("coordinator", 0.0) >= BUSY:
            sentence = f"The coordinator was the limit: its process was busy {busy['coordinator']:.0%} of the time."
            return Limit(Resource.COORDINATOR, sentence)
        full = [pool for pool in ("colocated", "prefill", "decode") if busy.get(pool, 0.0) >= BUSY]
        if full[:2] == ["prefill", "decode"] and not self._waits_for_prefill():
            full.remove("prefill")
        if not full:
            return None
        figures = f"its processes were busy {busy[full[0]]:.0%} of their cores' time, and requests were left waiting"
        return Limit(_POOLS[full[0]], f"The {_POOLS[full[0]]} was the limit: {figures}.")

    def unknown(self) -> Limit:
        figures = f"{self._unmet():.1%} of requests did not end well and waits grew by {self._wait_growth_s():.1f} s"
        return Limit(Resource.UNKNOWN, f"The offered load was not met, and no resource stands out: {figures}.")

    def _unmet(self) -> float:
        """Cancelled requests do not count: they ended as planned."""
        bad = (Outcome.REJECTED, Outcome.FAILED, Outcome.UNFINISHED)
        counted = [record.outcome for record in self.run.records if record.outcome is not Outcome.CANCELLED]
        return sum(outcome in bad for outcome in counted) / max(1, len(counted))

    def _wait_growth_s(self) -> float:
        """By order of arrival."""
        waits = [_wait_s(one) for one in sorted(self.times, key=lambda one: one.number)]
        third = len(waits) // 3
        return median(waits[-third:]) - median(waits[:third]) if third else 0.0

    def _waits_for_prefill(self) -> bool:
        """More than others wait for room: by the requests' own times, and by who waits at the workers."""
        at_prefill = late_mean(self.run, "pdserve:worker_requests_waiting", role="prefill") or 0.0
        at_decode = late_mean(self.run, "pdserve:worker_requests_waiting", role="decode") or 0.0
        for_room_s = self._mean_s(Phase.QUEUE, Phase.RESERVE)
        return at_prefill > at_decode or (at_prefill == at_decode and self._mean_s(Phase.PREFILL_WAIT) > for_room_s)

    def _mean_s(self, *phases: Phase) -> float:
        return fmean(sum(one.seconds[phase] for phase in phases) for one in self.times) if self.times else 0.0

    def _reserved_share(self, role: str) -> float | None:
        reserved = late_mean(self.run, "pdserve:kv_blocks_reserved", role=role)
        usable = late_mean(self.run, "pdserve:kv_blocks_usable", role=role)
        return reserved / usable if reserved is not None and usable else None

    def _busy(self, name: str) -> float | None:
        """CPU time ÷ what the cores of all processes of that name had; "MODEL.decode-0" is one of decode's."""
        cpu_s = {
            process: seconds
            for process, seconds in self.run.server_cpu_s.items()
            if process.rpartition(".")[2].startswith(name)
        }
        held_s = self.run.duration_s * sum(self.cores.get(process, 1.0) for process in cpu_s)
        return sum(cpu_s.values()) / held_s if held_s > 0 else None


def _wait_s(one: PhaseTimes) -> float:
    return one.seconds[Phase.QUEUE] + one.seconds[Phase.RESERVE] + one.seconds[Phase.PREFILL_WAIT]
