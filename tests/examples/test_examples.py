"""Each example runs to its end against a fleet of real processes, and says what it should."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, run_fleet

EXAMPLES = Path(__file__).parents[2] / "examples"


async def test_every_example_runs(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet:
        said = {path.stem: await output_of(path, fleet) for path in sorted(EXAMPLES.glob("*.py"))}
    expected = {
        "grpc_client": (
            "tiny: context of 4096 tokens, ready: True",
            "24 tokens, length",
            "log P('The sky is')",
            "left",
        ),
        "grpc_async_client": ("'7 and 7 make'", "prefill-0 → decode-0", "too late", "invalid_argument, temperature"),
        "openai_client": ("chat: ", "stream: CompletionUsage(", "logprobs: ", "token ids: ", "tools: "),
        "reflection_client": ("pdserve.v1.Inference\n", "Inference/Generate(GenerateRequest)", '"contextLength": 4096'),
    }
    assert said.keys() == expected.keys()
    for name, texts in expected.items():
        for text in texts:
            assert text in said[name]


async def output_of(example: Path, fleet: Fleet) -> str:
    address = fleet.http_url if example.stem == "openai_client" else fleet.grpc_address
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, str(example), address, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    assert (process.returncode, err.decode()) == (0, "")
    return out.decode()


@pytest.mark.parametrize("example", ["grpc_client", "grpc_async_client"])
async def test_where_nobody_answers_that_is_said(example: str) -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / f"{example}.py"), "127.0.0.1:1", stdout=pipe, stderr=pipe
    )
    _, err = await process.communicate()
    assert process.returncode == 1
    assert "UNAVAILABLE" in err.decode()
