"""`pdserve generate`: one prompt, its text as it comes, then where the time went and who did the work."""

import json
import math
import sys
import time
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.table import Table

from pdserve.cli import console
from pdserve.client.inference import (
    Delta,
    Finished,
    GenerateEvent,
    GenerateOptions,
    Message,
    Prompt,
    PromptEcho,
    Started,
    ToolCall,
)


def generate(  # noqa: PLR0913 - one parameter is one flag
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    *,
    address: Annotated[str, typer.Option(help="The coordinator's gRPC address.")] = console.DEFAULT_ADDRESS,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Of the distribution, in (0, 1].")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", min=0, max=2**64 - 1)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the answer; repeatable.")] = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="As a chat message, or as bare text.")] = True,
    tools: Annotated[Path | None, typer.Option(help="JSON file with OpenAI's list of tools, for --chat.")] = None,
    echo: Annotated[bool, typer.Option("--echo", help="With --raw: the prompt first.")] = False,
    model: Annotated[str, typer.Option(help="Where several are served.")] = "",
    api_key: Annotated[str | None, typer.Option(envvar="PDSERVE_API_KEY", help="If the server asks for one.")] = None,
) -> None:
    """Stream a completion to the terminal; show TTFT, ITL and which worker did what."""
    from pdserve.cli.rpc import explained
    from pdserve.client.client import Client

    text = sys.stdin.read() if prompt == "-" else prompt
    options = GenerateOptions(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=stop or (),
        echo=echo,
        tools=() if tools is None else read_tools(tools),
    )
    asked: Prompt = [Message("user", text)] if chat else text
    begun_s = time.monotonic()
    with explained(address), Client(address, api_key or "") as client:
        events = client.generate(asked, options)
        try:
            outcome = stream(events, begun_s)
        except KeyboardInterrupt:
            events.close()
            typer.echo()
            raise typer.Exit(130) from None
    if outcome.finished is None:
        console.fail("the stream ended without a finish")
    console.err.print(report(outcome, outcome.finished))


@dataclass(slots=True)
class Outcome:
    """What one stream brought. `arrivals_s` has one entry an event with tokens, counted from the request."""

    arrivals_s: list[float] = field(default_factory=list[float])
    started: Started | None = None
    finished: Finished | None = None


def read_tools(path: Path) -> list[dict[str, object]]:
    """The list in a JSON file, or exit code 2; what is in it is for the server to check."""
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        console.fail(f"--tools {path}: {error}", console.USAGE_ERROR)
    if not isinstance(found, list):
        console.fail(f"--tools {path}: expected a JSON list", console.USAGE_ERROR)
    return cast("list[dict[str, object]]", found)


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
