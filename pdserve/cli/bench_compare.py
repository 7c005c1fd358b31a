"""`pdserve bench compare`: prefill and decode apart against the best colocated fleet, on the same cores, in turns."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli import console
from pdserve.cli.bench_serve import SeedOption, need_extra, terminal, wrong_usage
from pdserve.cli.serve import ConfigOption, ModelOption, SetOption

if TYPE_CHECKING:
    from pdserve_bench.study.options import MixLoad, TraceLoad

_FOLDER = Path("bench-results") / "compare"


def compare(  # noqa: PLR0913 - one parameter is one flag
    *,
    model: ModelOption = None,
    preset: Annotated[str, typer.Option(help="chat, rag, batch-summarise, mixed or burst.")] = "mixed",
    trace: Annotated[str | None, typer.Option(help="A trace's file or a sample's name, in place of a preset.")] = None,
    length_factor: Annotated[float, typer.Option(help="Of a trace's lengths.")] = 1.0,
    rates: Annotated[str, typer.Option(metavar="F,…", help="Factors of the load's own rate.")] = "1,1.75",
    duration: Annotated[float, typer.Option(help="Seconds of arrivals in each run.")] = 30.0,
    pilot_duration: Annotated[float, typer.Option(help="The same, where the colocated fleet is chosen.")] = 15.0,
    repeats: Annotated[int, typer.Option(min=1, help="Of every run.")] = 2,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    prefill_chunks: Annotated[str, typer.Option(metavar="N,…", help="Those that fleets apart try.")] = "128,256,512",
    chunks: Annotated[str, typer.Option(metavar="N,…", help="Those that colocated fleets try.")] = "32,64,128,256,512",
    cores: Annotated[str, typer.Option(metavar="N,…", help="For every fleet and the client; default: all.")] = "",
    num_blocks: Annotated[int, typer.Option(min=2, help="KV blocks of each fleet.")] = 3000,
    slo_ttft_ms: Annotated[float, typer.Option(min=0, help="TTFT that is accepted.")] = 6000.0,
    slo_itl_ms: Annotated[float, typer.Option(min=0, help="p99 of a request's ITLs that is accepted.")] = 100.0,
    check_outputs: Annotated[int, typer.Option(min=0, help="Answers of each run to compare with the engine's.")] = 2,
    peer: Annotated[str, typer.Option(help="Command line of another server, to be measured beside ours.")] = "",
    peer_url: Annotated[str, typer.Option(help="Where it answers.")] = "http://127.0.0.1:8100",
    seed: SeedOption = None,
    folder: Annotated[Path, typer.Option(help="Keeps every run; a study that was broken off goes on.")] = _FOLDER,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Answer whether to disaggregate: measured in turns on equal cores, with the noise, and why.

    Exit codes: 1 something could not be measured, 2 wrong usage, 130 Ctrl-C.
    """
    need_extra()
    from pdserve.core.model_fetch import resolve_model
    from pdserve.core.model_files import open_model_files
    from pdserve_bench.compare.fleet_specs import FleetSpec
    from pdserve_bench.measures.summary import Slo
    from pdserve_bench.peer.client import ServerError
    from pdserve_bench.peer.server import Gone
    from pdserve_bench.serve.flags import listed
    from pdserve_bench.study import command
    from pdserve_bench.study.options import StudyOptions

    settings = console.settings_from({"model.source": model}, assignments or (), config)
    source = resolve_model(settings.model.source, settings.cache_dir.expanduser())
    model_config = open_model_files(source).config
    with wrong_usage():
        chosen = _cores(cores)
        options = StudyOptions(
            folder=folder,
            load=_load(preset, trace, length_factor, model_config.context_length),
            source=source,
            seed=command.kept_seed(folder, seed),
            cores=tuple(chosen),
            vocab_size=model_config.vocab_size,
            rate_factors=tuple(listed(rates, "--rates", float)),
            duration_s=duration,
            pilot_s=pilot_duration,
            num_repeats=repeats,
            num_prefill=prefill,
            num_decode=decode,
            prefill_chunks=tuple(listed(prefill_chunks, "--prefill-chunks", int)),
            chunks=tuple(listed(chunks, "--chunks", int)),
            num_blocks=num_blocks,
            slo=Slo(slo_ttft_ms / 1e3, slo_itl_ms / 1e3),
            num_checked=check_outputs,
            peers=(FleetSpec("peer", peer, peer_url, cores=tuple(chosen)),) if peer else (),
            dtype=settings.model.dtype,
            serve_flags=_serve_flags(source, settings.model.dtype, config, assignments or ()),
        )
        options.plans()
        options.pilot_plan()
    signal.signal(signal.SIGTERM, _exit)
    try:
        code = command.run(options, terminal())
    except (Gone, ServerError, OSError, RuntimeError) as error:
        console.fail(str(error))
    raise typer.Exit(code)


def _cores(text: str) -> tuple[int, ...]:
    """Raises ValueError: there are no such cores."""
    from pdserve.launch.machine import this_machine
    from pdserve_bench.serve.flags import listed

    here = this_machine().cores
    chosen = tuple(listed(text, "--cores", int)) if text else here
    if not set(chosen) <= set(here) or len(set(chosen)) < len(chosen):
        raise ValueError(f"--cores {text}: this machine has {', '.join(map(str, here))}")
    return chosen


def _exit(number: int, _: FrameType | None) -> None:
    """As an exception, so that the fleets are thawed and ended."""
    sys.exit(128 + number)


def _serve_flags(source: Path, dtype: str, config: Path | None, assignments: Sequence[str]) -> tuple[str, ...]:
    """For every `pdserve serve`, before those that make the fleets differ."""
    files = ("--config", str(config)) if config else ()
    sets = [word for assignment in assignments for word in ("--set", assignment)]
    return ("--model", str(source), "--dtype", dtype, *files, *sets)


def _load(preset: str, trace: str | None, length_factor: float, context_length: int) -> "MixLoad | TraceLoad":
    """Raises ValueError: there is no such load, or it does not fit the model."""
    from pdserve_bench.load.presets import check_fits
    from pdserve_bench.load.presets import preset as preset_of
    from pdserve_bench.load.traces import read_trace, trace_path
    from pdserve_bench.study.options import MixLoad, TraceLoad

    if trace is None:
        check_fits(preset_of(preset), context_length)
        return MixLoad(preset_of(preset))
    return TraceLoad(Path(trace).stem, tuple(read_trace(trace_path(trace))), length_factor)
