"""What Prometheus can ask of the coordinator. Gauges are read at scrape time: none goes stale on an idle server."""

from collections import Counter as Tally
from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.fleet.values import WorkerLoad
from coordinator.fleet.worker import Worker
from coordinator.generation.generator import GenerationRecord
from coordinator.sequences import SequencePhase, SequenceTimings

_TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
_PHASE_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

_WORKER_GAUGES = (
    ("pdserve:worker_requests_waiting", "Sequences waiting at the worker", "num_waiting"),
    ("pdserve:worker_requests_running", "Sequences running at the worker", "num_running"),
    ("pdserve:worker_requests_transferring", "KV transfers in or out of the worker", "num_transferring"),
    ("pdserve:kv_blocks_free", "KV blocks that hold nothing", "num_free_blocks"),
    ("pdserve:kv_blocks_reserved", "KV blocks promised by the ledger", "num_reserved_blocks"),
    ("pdserve:kv_blocks_cached", "KV blocks kept for prefixes that nobody uses now", "num_cached_blocks"),
    ("pdserve:kv_blocks_usable", "KV blocks in all", "num_usable_blocks"),
)
_WORKER_COUNTERS = (
    ("pdserve:prefix_cache_queries", "Prompt tokens looked up in the worker's prefix index", "prefix_queries"),
    ("pdserve:prefix_cache_hits", "Prompt tokens found in the worker's prefix index", "prefix_hits"),
)
_TRANSPORT_COUNTERS = (
    ("pdserve:kv_transfers_completed", "KV transfers that the worker's peers committed", "num_completed"),
    ("pdserve:kv_transfers_failed", "KV transfers that ended with an error", "num_failed"),
    ("pdserve:kv_transfer_bytes", "Bytes of KV that the worker sent", "num_bytes"),
    ("pdserve:kv_transfer_seconds", "From begin to end of the worker's KV transfers", "seconds"),
)


class LiveState(Protocol):
    """What is read at scrape time."""

    def workers(self) -> list[Worker]: ...

    def num_in_phase(self, model: str, phase: SequencePhase) -> int: ...

    def num_transferring(self, model: str) -> int: ...


class Metrics:
    """One registry per coordinator. Labels take few values: models served, roles, live workers, reasons."""

    def __init__(self, models: frozenset[str], max_deadline_s: float) -> None:
        self.registry = CollectorRegistry()
        self.outcomes: Tally[str] = Tally()
        self._models = models
        self._last_bucket_s = max_deadline_s
        self._requests = self._counter("requests", "Requests over, by finish or error reason", "outcome")
        self._sequences = self._counter("sequences", "Sequences over, by finish or error reason", "outcome")
        self._rejections = self._counter("rejections", "Sequences refused at admission", "reason")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of sequences whose prefill ended")
        self._generation_tokens = self._counter("generation_tokens", "Output tokens delivered")
        self._retries = self._counter("retries", "Sequences placed again after a worker failed")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token")
        self._itl = self._histogram("inter_token_latency_seconds", "Between two tokens", _TOKEN_BUCKETS_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end, of sequences that did not fail")
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to the sequence's turn")
        self._reserve = self._histogram("request_reserve_time_seconds", "Waiting for KV blocks to be reserved")
        self._prefill = self._histogram("request_prefill_time_seconds", "Reservation to first token")
        self._transfer = self._histogram("exposed_transfer_seconds", "End of prefill to the join at decode")
        self._decode = self._histogram("request_decode_time_seconds", "First token to end")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pdserve:{name}", text, ("model", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets_s: tuple[float, ...] = _PHASE_BUCKETS_S) -> Histogram:
        below = tuple(bound for bound in buckets_s if bound < self._last_bucket_s)
        return Histogram(
            f"pdserve:{name}", text, ("model",), registry=self.registry, buckets=(*below, self._last_bucket_s)
        )

    def watch(self, state: LiveState) -> None:
        """Export the gauges of `state` from now on."""
        self.registry.register(_LiveCollector(state, self._models))

    def rejected(self, model: str, reason: str, num_sequences: int) -> None:
        """A model that is not served shares one label, so that clients cannot create series."""
        self._rejections.labels(model if model in self._models else "", reason).inc(num_sequences)

    def retried(self, model: str) -> None:
        self._retries.labels(model).inc()

    def first_token(self, model: str, timings: SequenceTimings, num_prompt_tokens: int) -> None:
        self._prompt_tokens.labels(model).inc(num_prompt_tokens)
        self._ttft.labels(model).observe(timings.ttft_s)
        self._queue.labels(model).observe(timings.queue_s)
        self._reserve.labels(model).observe(timings.reserve_s)
        self._prefill.labels(model).observe(timings.prefill_s)

    def tokens(self, model: str, num_tokens: int, since_last_s: float | None) -> None:
        """`num_tokens` were delivered at once; None: the first ones of their sequence."""
        self._generation_tokens.labels(model).inc(num_tokens)
        if since_last_s is not None:
            for _ in range(num_tokens):
                self._itl.labels(model).observe(since_last_s / num_tokens)

    def generation_ended(self, record: GenerationRecord) -> None:
        """A client's request is over; its outcome knows of stop strings, a sequence's does not."""
        self.outcomes[record.outcome] += 1
        self._requests.labels(record.model, record.outcome).inc()

    def finished(self, model: str, outcome: str, timings: SequenceTimings, e2e_s: float) -> None:
        """A sequence ended with a finish reason."""
        self._sequences.labels(model, outcome).inc()
        self._e2e.labels(model).observe(e2e_s)
        self._decode.labels(model).observe(timings.decode_s)
        if timings.decode_worker:
            self._transfer.labels(model).observe(timings.exposed_transfer_s)

    def failed(self, model: str, outcome: str) -> None:
        """A sequence ended with an error, or was cancelled."""
        self._sequences.labels(model, outcome).inc()


class _LiveCollector(Collector):
    def __init__(self, state: LiveState, models: frozenset[str]) -> None:
        self._state = state
        self._models = sorted(models)

    def collect(self) -> Iterator[Metric]:
        yield from self._of_models()
        yield from self._of_workers()
        yield from self._of_transports()

    def _of_models(self) -> Iterator[GaugeMetricFamily]:
        waiting = GaugeMetricFamily("pdserve:num_requests_waiting", "Sequences queued here", labels=("model",))
        running = GaugeMetricFamily("pdserve:num_requests_running", "Sequences in prefill or decode", labels=("model",))
        moving = GaugeMetricFamily(
            "pdserve:num_requests_transferring",
            "Sequences whose first token is out but not their KV",
            labels=("model",),
        )
        for model in self._models:
            count = {phase: self._state.num_in_phase(model, phase) for phase in SequencePhase}
            waiting.add_metric((model,), count[SequencePhase.QUEUED] + count[SequencePhase.RESERVING])
            running.add_metric((model,), count[SequencePhase.PREFILL] + count[SequencePhase.DECODE])
            moving.add_metric((model,), self._state.num_transferring(model))
        yield from (waiting, running, moving)

    def _of_workers(self) -> Iterator[Metric]:
        labels = ("model", "role", "worker")
        reported: list[tuple[GaugeMetricFamily | CounterMetricFamily, str]] = [
            *((GaugeMetricFamily(name, text, labels=labels), field) for name, text, field in _WORKER_GAUGES),
            *((CounterMetricFamily(name, text, labels=labels), field) for name, text, field in _WORKER_COUNTERS),
        ]
        usage = GaugeMetricFamily("pdserve:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", labels=labels)
        held = GaugeMetricFamily("pdserve:worker_in_flight", "Sequences that this coordinator has there", labels=labels)
        for worker in self._state.workers():
            info = worker.info
            values = (info.model_name, info.pool_name, info.key.worker_id)
            held.add_metric(values, sum(worker.num_in_flight(role) for role in info.roles))
            if worker.load is not None:
                for family, field in reported:
                    family.add_metric(values, getattr(worker.load, field))
                usage.add_metric(values, _usage(worker.load))
        yield from (family for family, _ in reported)
        yield from (usage, held)

    def _of_transports(self) -> Iterator[Metric]:
        labels = ("model", "role", "worker", "transport")
        sent = [(CounterMetricFamily(name, text, labels=labels), field) for name, text, field in _TRANSPORT_COUNTERS]
        for worker in self._state.workers():
            info = worker.info
            for transport, totals in worker.load.transports.items() if worker.load is not None else ():
                for family, field in sent:
                    values = (info.model_name, info.pool_name, info.key.worker_id, transport)
                    family.add_metric(values, getattr(totals, field))
        yield from (family for family, _ in sent)


def _usage(load: WorkerLoad) -> float:
    if not load.num_usable_blocks:
        return 0.0
    return 1.0 - (load.num_free_blocks + load.num_cached_blocks) / load.num_usable_blocks
