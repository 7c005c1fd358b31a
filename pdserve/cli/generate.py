"""`pdserve generate`: one prompt, from flags to the request."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, cast

import typer

from pdserve.cli import console
from pdserve.core.errors import PdserveError


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
    from pdserve.cli.answer import report, stream
    from pdserve.cli.rpc import explained
    from pdserve.client import Client, GenerateOptions, Message

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
    asked = [Message("user", text)] if chat else text
    begun_s = time.monotonic()
    with explained(address), Client(address, api_key or "") as client:
        events = client.generate(asked, options)
        try:
            outcome = stream(events, begun_s)
        except KeyboardInterrupt:
            events.close()
            typer.echo()
            raise typer.Exit(130) from None
        except PdserveError as error:
            if "chat template" not in error.message:
                raise
            console.fail(f"{console.explain(error)} (here: --raw)")
    if outcome.finished is None:
        console.fail("the stream ended without a finish")
    console.err.print(report(outcome, outcome.finished))


def read_tools(path: Path) -> list[dict[str, object]]:
    """The list in a JSON file, or exit code 2; what is in it is for the server to check."""
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        console.fail(f"--tools {path}: {error}", console.USAGE_ERROR)
    if not isinstance(found, list):
        console.fail(f"--tools {path}: expected a JSON list", console.USAGE_ERROR)
    return cast("list[dict[str, object]]", found)
