"""`pdserve bench serve` and `bench capacity`: a server that runs already, measured. Flags as `vllm bench serve` has."""

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pdserve.cli import console

if TYPE_CHECKING:
    from pdserve_bench.serve.terminal import Terminal

Protocol = Literal["http", "grpc"]

BaseUrlOption = Annotated[str, typer.Option(help="Of the server's HTTP, without /v1.")]
EndpointOption = Annotated[str, typer.Option(help="Where it takes completions.")]
ModelOption = Annotated[str, typer.Option(help="As the server calls it; default: its first.", show_default=False)]
ProtocolOption = Annotated[Protocol, typer.Option(help="OpenAI's HTTP, or pdserve's gRPC.")]
AddressOption = Annotated[str, typer.Option(help="HOST:PORT of pdserve's gRPC.")]
ApiKeyOption = Annotated[str, typer.Option(envvar="PDSERVE_API_KEY", help="If the server asks for one.")]
ServerPidOption = Annotated[int, typer.Option(min=0, help="Process of a server on this machine: its CPU is measured.")]
VocabOption = Annotated[int, typer.Option(help="Prompts are random token ids below it.")]
SeedOption = Annotated[
    int | None, typer.Option(min=0, help="Of prompts and arrivals; default: a new one each time.", show_default=False)
]
TtftOption = Annotated[float, typer.Option(min=0, help="TTFT that is accepted, in ms.")]
ItlOption = Annotated[float, typer.Option(min=0, help="p99 of ITLs that is accepted, in ms.")]
DrainOption = Annotated[float, typer.Option(min=0, help="Seconds to wait for the last answers.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything there.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots there.")]


def serve(  # noqa: PLR0913 - one parameter is one flag
    context: typer.Context,
    more_goodput: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="METRIC:MS")] = None,
    *,
    base_url: BaseUrlOption = "http://127.0.0.1:8000",
    endpoint: EndpointOption = "/v1/completions",
    model: ModelOption = "",
    protocol: ProtocolOption = "http",
    address: AddressOption = console.DEFAULT_ADDRESS,
    api_key: ApiKeyOption = "",
    server_pid: ServerPidOption = 0,
    dataset_name: Annotated[
        str | None, typer.Option(help="random, trace, or a preset's name.", show_default="random")
    ] = None,
    dataset_path: Annotated[str | None, typer.Option(help="A trace's file.")] = None,
    trace: Annotated[str | None, typer.Option(help="A trace's file, or the name of a sample that ships here.")] = None,
    preset: Annotated[str | None, typer.Option(help="chat, rag, batch-summarise, mixed or burst.")] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Default: 1000 random ones, or the whole trace.")
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds of arrivals; of presets and searches: 60.")] = None,
    input_len: Annotated[
        str | None, typer.Option(help="Tokens of a random prompt, or a range as 64-192.", show_default="1024")
    ] = None,
    output_len: Annotated[
        str | None, typer.Option(help="Tokens of its answer, or a range.", show_default="128")
    ] = None,
    request_rate: Annotated[
        str | None, typer.Option(help="Random prompts a second; inf: all at once.", show_default="inf")
    ] = None,
    burstiness: Annotated[
        float | None, typer.Option(help="Shape of gamma gaps; 1 is Poisson.", show_default="1")
    ] = None,
    ramp_to: Annotated[float | None, typer.Option(help="Requests/s at the end, if they are to change.")] = None,
    rate_factor: Annotated[
        float | None, typer.Option(help="Of a preset's or a trace's rate.", show_default="1")
    ] = None,
    length_factor: Annotated[float | None, typer.Option(help="Of a trace's lengths.", show_default="1")] = None,
    max_input_len: Annotated[
        int | None, typer.Option(min=1, help="The most tokens of a trace's prompt.", show_default="4096")
    ] = None,
    max_output_len: Annotated[
        int | None, typer.Option(min=1, help="The most tokens of a trace's answer.", show_default="512")
    ] = None,
    vocab_size: VocabOption = 32000,
    seed: SeedOption = None,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="The most requests in flight.")] = None,
    drain: DrainOption = 60.0,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before, with prompts of their own.")] = 2,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always so: lengths are exact.")] = True,
    goodput: Annotated[list[str] | None, typer.Option(metavar="METRIC:MS…", help="vLLM's: ttft, tpot, e2el.")] = None,
    percentile_metrics: Annotated[str, typer.Option(help="In the JSON of --save-result.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="In the JSON of --save-result.")] = "50,99",
    save_result: Annotated[bool, typer.Option("--save-result", help="Write vLLM's JSON.")] = False,
    result_dir: Annotated[Path, typer.Option(help="Where to.")] = Path(),
    slo_ttft_ms: TtftOption = 6000.0,
    slo_itl_ms: ItlOption = 100.0,
    check_outputs: Annotated[int, typer.Option(min=0, help="Answers to compare with the idle server's.")] = 0,
    max_failures: Annotated[int, typer.Option(min=0, help="Bad requests with which the exit code still is 0.")] = 0,
    allow_cached: Annotated[bool, typer.Option("--allow-cached", help="Let a prefix cache be measured.")] = False,
    search: Annotated[bool, typer.Option("--search", help="Find the highest rate with good enough goodput.")] = False,
    min_goodput: Annotated[float, typer.Option(help="Of a search: the share of good requests.")] = 0.95,
    repeats: Annotated[int, typer.Option(help="Of a search: runs at a rate, an odd number.")] = 3,
    json_file: JsonOption = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write a row a request.")] = None,
    html_file: HtmlOption = None,
) -> None:
    """Send a load to a server in an open loop, and show latencies, throughput and goodput.

    Exit codes: 1 failed requests above --max-failures, 2 wrong usage, 3 a prefix cache was measured, 130 Ctrl-C.
    """
    need_extra()
    from pdserve_bench.serve import command
    from pdserve_bench.serve.flags import LoadFlags
    from pdserve_bench.serve.options import ServerOptions
    from pdserve_bench.serve.run_flags import RunFlags, new_seed, outputs_of, taken

    seed = new_seed(seed)
    with wrong_usage():
        server = taken(ServerOptions, context.params)
        run, flags = taken(RunFlags, context.params), taken(LoadFlags, context.params)
        load, options = flags.load(), run.options(seed)
        asked, vllm_file = run.asked(load, flags), run.vllm_file(load, burstiness)
        plan = None if asked else load.plan(seed)
    outputs = outputs_of(context.params, seed)
    with failures():
        if asked is not None:
            code = command.serve_searched(server, options, asked, outputs, terminal())
        else:
            assert plan is not None
            code = command.serve(server, options, plan, outputs, vllm_file, terminal())
    raise typer.Exit(code)


def capacity(  # noqa: PLR0913 - one parameter is one flag
    context: typer.Context,
    *,
    base_url: BaseUrlOption = "http://127.0.0.1:8000",
    endpoint: EndpointOption = "/v1/completions",
    model: ModelOption = "",
    protocol: ProtocolOption = "http",
    address: AddressOption = console.DEFAULT_ADDRESS,
    api_key: ApiKeyOption = "",
    server_pid: ServerPidOption = 0,
    rates: Annotated[str, typer.Option(metavar="R,…", help="Interactive requests/s.")] = "0.25,0.5,1,2",
    documents: Annotated[str, typer.Option(metavar="N,…", help="Documents that are always in flight.")] = "0,1,2",
    duration: Annotated[float, typer.Option(help="Seconds of arrivals in each cell.")] = 60.0,
    drain: DrainOption = 60.0,
    input_len: Annotated[str, typer.Option(help="Tokens of an interactive prompt, or a range.")] = "64-192",
    output_len: Annotated[str, typer.Option(help="Tokens of its answer, or a range.")] = "64-128",
    document_len: Annotated[int, typer.Option(min=1, help="Tokens of a document.")] = 1500,
    document_output_len: Annotated[int, typer.Option(min=1, help="Tokens of its answer.")] = 32,
    vocab_size: VocabOption = 32000,
    seed: SeedOption = None,
    slo_ttft_ms: TtftOption = 6000.0,
    slo_itl_ms: ItlOption = 100.0,
    cells: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep cells there, and go on with those that it holds.")
    ] = None,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """Find the highest load that meets every objective at 1.1 times itself: interactive rate × documents at a time.

    Exit codes: 1 no load is safe, 2 wrong usage, 3 a prefix cache was measured, 130 Ctrl-C.
    """
    need_extra()
    from pdserve_bench.serve import command
    from pdserve_bench.serve.capacity import Grid
    from pdserve_bench.serve.cell_run import CellOptions
    from pdserve_bench.serve.cells import Objectives
    from pdserve_bench.serve.flags import lengths, listed
    from pdserve_bench.serve.options import ServerOptions
    from pdserve_bench.serve.run_flags import new_seed, outputs_of, taken

    seed = new_seed(seed)
    with wrong_usage():
        server = taken(ServerOptions, context.params)
        grid = Grid(listed(rates, "--rates", float), listed(documents, "--documents", int))
        options = CellOptions(
            seed=seed,
            duration_s=duration,
            drain_s=drain,
            prompt=lengths(input_len, "--input-len"),
            output=lengths(output_len, "--output-len"),
            document_tokens=document_len,
            document_output_tokens=document_output_len,
            vocab_size=vocab_size,
        )
    objectives = Objectives(slo_ttft_ms / 1e3, slo_itl_ms / 1e3)
    outputs = outputs_of(context.params, seed)
    with failures():
        code = command.capacity(server, grid, objectives, options, cells, outputs, terminal())
    raise typer.Exit(code)


def need_extra() -> None:
    """Ends the command where what the benchmark alone needs is not installed."""
    missing = [name for name in ("aiohttp", "matplotlib") if find_spec(name) is None]
    if missing:
        console.fail(f"{' and '.join(missing)} not installed: pip install 'pdserve[bench]'")


@contextmanager
def wrong_usage() -> Generator[None]:
    """What flags cannot mean, in a line, and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        console.fail(str(error), console.USAGE_ERROR)


@contextmanager
def failures() -> Generator[None]:
    """What a user can meet, in a line."""
    from pdserve_bench.load.client import RequestError
    from pdserve_bench.serve.options import CannotMeasureError

    try:
        yield
    except (RequestError, CannotMeasureError, OSError) as error:
        console.fail(str(error))


def terminal() -> "Terminal":
    """Of the command line's own streams."""
    from pdserve_bench.serve.terminal import Terminal

    return Terminal(console.out, console.err, console.print_whole)
