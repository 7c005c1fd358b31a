"""`pdserve generate`: one prompt, its text as it comes, then where the time went and who did the work."""

import math
import sys
import time
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.table import Table

from pdserve.cli import console
from pdserve.v1 import common_pb2
from pdserve.v1 import inference_pb2 as pb

_FINISH_PREFIX = "FINISH_REASON_"


def generate(  # noqa: PLR0913 - one parameter is one flag
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    *,
    address: Annotated[str, typer.Option(help="The coordinator's gRPC address.")] = console.DEFAULT_ADDRESS,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", min=0, max=2**64 - 1)] = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="As a chat message, or as bare text.")] = True,
    model: Annotated[str, typer.Option(help="Where several are served.")] = "",
    api_key: Annotated[str | None, typer.Option(envvar="PDSERVE_API_KEY", help="If the server asks for one.")] = None,
) -> None:
    """Stream a completion to the terminal; show TTFT, ITL and which worker did what."""
    from pdserve.cli.rpc import connected
    from pdserve.v1 import inference_pb2_grpc

    sampling = pb.SamplingOptions(max_tokens=max_tokens, temperature=temperature, seed=seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    request = build_request(text, model, sampling, chat)
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    begun_s = time.monotonic()
    with connected(address) as channel:
        events = inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=metadata)
        try:
            outcome = stream(events, begun_s)
        except KeyboardInterrupt:
            events.cancel()
            typer.echo()
            raise typer.Exit(130) from None
    if outcome.finished is None:
        console.fail("the stream ended without a finish")
    console.err.print(report(outcome))


@dataclass(slots=True)
class Outcome:
    """What one stream brought. `arrivals_s` has one entry a message with tokens, counted from the request."""

    arrivals_s: list[float] = field(default_factory=list[float])
    started: pb.GenerateResponse.Started | None = None
    finished: pb.GenerateResponse.Finished | None = None


def build_request(text: str, model: str, sampling: pb.SamplingOptions, chat: bool) -> pb.GenerateRequest:
    if not chat:
        return pb.GenerateRequest(model=model, text=text, sampling=sampling)
    messages = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=text)])
    return pb.GenerateRequest(model=model, chat=messages, sampling=sampling)


def stream(events: Iterable[pb.GenerateResponse], begun_s: float) -> Outcome:
    """Print text as it comes."""
    outcome = Outcome()
    for event in events:
        match event.WhichOneof("event"):
            case "started":
                outcome.started = event.started
            case "delta":
                if event.delta.token_ids:
                    outcome.arrivals_s.append(time.monotonic() - begun_s)
                typer.echo(printable(event.delta.text), nl=False)
            case "finished":
                outcome.finished = event.finished
            case None:
                pass
    typer.echo()
    return outcome


def printable(text: str) -> str:
    """Without control characters that would steer a terminal."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank; `values` must not be empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def report(outcome: Outcome) -> Table:
    """Latencies as seen here, and phases and workers as the coordinator saw them."""
    table = Table(show_header=False, box=None, style="dim", padding=(0, 1))
    finished = outcome.finished or pb.GenerateResponse.Finished()
    usage, timings = finished.usage, finished.timings
    reason = common_pb2.FinishReason.Name(finished.finish_reason).removeprefix(_FINISH_PREFIX).lower()
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    table.add_row("tokens", f"{usage.prompt_tokens} prompt{cached}, {usage.completion_tokens} output ({reason})")
    if outcome.arrivals_s:
        phases = (("queue", timings.queue_us), ("reserve", timings.reserve_us), ("prefill", timings.prefill_us))
        parts = ", ".join(f"{name} {us / 1000:.1f}" for name, us in phases)
        table.add_row("TTFT", f"{outcome.arrivals_s[0] * 1000:.1f} ms ({parts})")
    gaps_ms = [
        (after - before) * 1000 for before, after in zip(outcome.arrivals_s, outcome.arrivals_s[1:], strict=False)
    ]
    if gaps_ms:
        p50, p99 = percentile(gaps_ms, 50), percentile(gaps_ms, 99)
        transfer = f"exposed transfer {timings.exposed_transfer_us / 1000:.1f} ms"
        table.add_row("ITL", f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {max(gaps_ms):.1f} ms; {transfer}")
    table.add_row("prefill", timings.prefill_worker or "none")
    table.add_row("decode", timings.decode_worker or "none")
    if outcome.started is not None:
        table.add_row("seed", str(outcome.started.seed))
    return table
