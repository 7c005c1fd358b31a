"""`pdserve bench …`: measurements of this machine, each figure beside its limit. Measures in processes of their own."""

from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli import bench_compare, bench_serve, console
from pdserve.cli.serve import ConfigOption, DtypeOption, ModelOption, SetOption
from pdserve_bench.engine.plan import PRECISIONS, Precision, Workload, plan_tasks
from pdserve_bench.report import targets_table, write_result

bench_app = typer.Typer(help="Measurements, each beside its limit.", no_args_is_help=True)
bench_app.command()(bench_serve.serve)
bench_app.command()(bench_serve.capacity)
bench_app.command()(bench_compare.compare)

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")]


@bench_app.command("engine")
def engine(  # noqa: PLR0913 - one parameter is one flag
    *,
    model: ModelOption = None,
    batch: Annotated[str, typer.Option(metavar="N,…", help="Sequences in a decode step.")] = "1,8,32",
    context: Annotated[str, typer.Option(metavar="N,…", help="Tokens that each of them sees.")] = "512,2048",
    prefill_tokens: Annotated[str, typer.Option(metavar="N,…", help="Lengths of prompts.")] = "512,2048",
    chunk: Annotated[str, typer.Option(metavar="N,…", help="Prompt tokens in a step.")] = "128,512",
    dtype: Annotated[str, typer.Option(metavar="D,…", help="bfloat16, float32.")] = "bfloat16,float32",
    threads: Annotated[
        str | None, typer.Option(metavar="N,…", help="Compute threads, a core for each.", show_default="1,2")
    ] = None,
    attention: Annotated[str, typer.Option(metavar="P,…", help="Precision of attention's products.")] = "float32",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a decode cell.")] = 20,
    prefills: Annotated[int, typer.Option(min=1, help="Timed prompts of a prefill cell.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Tries of a measurement that others disturb.")] = 3,
    seed: Annotated[int, typer.Option(help="Of token ids and of the order of blocks.")] = 0,
    json_file: JsonOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Time decode steps and prefill, each beside the floor that this machine's bandwidth and GEMM rate set."""
    from pdserve.core.model_fetch import resolve_model
    from pdserve.core.model_files import open_model_files
    from pdserve.launch.machine import this_machine
    from pdserve_bench.engine.document import document, tables
    from pdserve_bench.engine.judge import targets
    from pdserve_bench.engine.run import run_tasks

    settings = console.settings_from({"model.source": model}, assignments or (), config)
    cores = this_machine().cores
    num_threads = numbers(threads, "--threads") if threads else tuple(range(1, 1 + min(2, len(cores))))
    workload = Workload(
        source=resolve_model(settings.model.source, settings.cache_dir.expanduser()),
        model_name=settings.model.name,
        batches=numbers(batch, "--batch"),
        contexts=numbers(context, "--context"),
        prompt_lens=numbers(prefill_tokens, "--prefill-tokens"),
        chunks=numbers(chunk, "--chunk"),
        block_size=settings.worker.block_size,
        num_steps=steps,
        num_prefills=prefills,
        max_tries=repeats,
        seed=seed,
    )
    workload.check(open_model_files(workload.source).config.context_length)
    dtypes, attentions = precisions(dtype, "--dtype"), precisions(attention, "--attention")
    results = run_tasks(plan_tasks(workload, dtypes, num_threads, attentions, cores))
    found = targets(results)
    for table in tables(results):
        console.print_whole(table)
    if found:
        console.print_whole(targets_table(found))
    if json_file is not None:
        write_result(json_file, document(workload, results, found))


@bench_app.command("worker")
def worker(
    *,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    json_file: JsonOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Start a fleet as `serve` would, and show what memory its workers hold and how soon they were ready."""
    from pdserve.launch.machine import this_machine
    from pdserve.serving.logs import configure_logging
    from pdserve_bench.workers import document, measure_workers, workers_table

    flags = {"model.source": model, "model.dtype": dtype, "more_models": ()}
    settings = console.settings_from(flags, assignments or (), config)
    configure_logging(settings.log_level, "launcher")
    figures = measure_workers(settings, this_machine())
    console.print_whole(workers_table(figures))
    console.print_whole(targets_table(figures.targets()))
    if json_file is not None:
        write_result(json_file, document(settings, figures))


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """ "1,8,32"; empty: none. Anything else is wrong usage."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        console.fail(f"{flag} {text}: expected whole numbers above 0 with commas between them", console.USAGE_ERROR)
    return tuple(int(word) for word in words)


def precisions(text: str, flag: str) -> tuple[Precision, ...]:
    """ "bfloat16,float32", either or both. Anything else is wrong usage."""
    words = {word.strip() for word in text.split(",")}
    chosen: list[Precision] = [precision for precision in PRECISIONS if precision in words]
    if len(chosen) < len(words):
        console.fail(f"{flag} {text}: expected {' or '.join(PRECISIONS)}, or both with a comma", console.USAGE_ERROR)
    return tuple(chosen)
