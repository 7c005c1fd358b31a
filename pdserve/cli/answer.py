"""A streamed answer in the terminal: its text as it comes, then where the time went and who did the work."""

import math
import time
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import typer
from rich.table import Table

from pdserve.client.inference import Delta, Finished, GenerateEvent, PromptEcho, Started, ToolCall


@dataclass(slots=True)
class Outcome:
    """What one stream brought. `arrivals_s` has one entry an event with tokens, counted from the request."""

    arrivals_s: list[float] = field(default_factory=list[float])
    started: Started | None = None
    finished: Finished | None = None


def stream(events: Iterable[GenerateEvent], begun_s: float) -> Outcome:
    """Print text as it comes, then the tool calls, one a line."""
    outcome = Outcome()
    calls: list[ToolCall] = []
    for event in events:
        match event:
            case Started():
                outcome.started = event
            case PromptEcho():
                typer.echo(printable(event.text), nl=False)
            case Delta():
                if event.token_ids:
                    outcome.arrivals_s.append(time.monotonic() - begun_s)
                typer.echo(printable(event.text), nl=False)
                calls += event.tool_calls
            case Finished():
                outcome.finished = event
    typer.echo()
    for call in calls:
        typer.echo(printable(f"{call.name}({call.arguments})"))
    return outcome


def printable(text: str) -> str:
    """Without control characters that would steer a terminal."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank; `values` must not be empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def report(outcome: Outcome, finished: Finished) -> Table:
    """Latencies as seen here, and phases and workers as the coordinator saw them."""
    table = Table(show_header=False, box=None, style="dim", padding=(0, 1))
    usage, timings = finished.usage, finished.timings
    reason = finished.finish_reason.value
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    table.add_row("tokens", f"{usage.prompt_tokens} prompt{cached}, {usage.completion_tokens} output ({reason})")
    if outcome.arrivals_s:
        phases = (("queue", timings.queue_s), ("reserve", timings.reserve_s), ("prefill", timings.prefill_s))
        parts = ", ".join(f"{name} {seconds * 1000:.1f}" for name, seconds in phases)
        table.add_row("TTFT", f"{outcome.arrivals_s[0] * 1000:.1f} ms ({parts})")
    gaps_ms = [
        (after - before) * 1000 for before, after in zip(outcome.arrivals_s, outcome.arrivals_s[1:], strict=False)
    ]
    if gaps_ms:
        p50, p99 = percentile(gaps_ms, 50), percentile(gaps_ms, 99)
        transfer = f"exposed transfer {timings.exposed_transfer_s * 1000:.1f} ms"
        table.add_row("ITL", f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {max(gaps_ms):.1f} ms; {transfer}")
    table.add_row("prefill", timings.prefill_worker or "none")
    table.add_row("decode", timings.decode_worker or "none")
    if outcome.started is not None:
        table.add_row("seed", str(outcome.started.seed))
    return table
