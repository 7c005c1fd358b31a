"""Each example runs to its end against a fleet of real processes, and says what it should."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.fleet import DISAGGREGATED, Fleet, run_fleet

EXAMPLES = Path(__file__).parents[2] / "examples"


async def test_every_example_runs_where_several_models_are_served(tiny_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(tiny_model)
    async with run_fleet(tiny_model, DISAGGREGATED, [other]) as fleet:
        said = {path.stem: await output_of(path, fleet) for path in sorted(EXAMPLES.glob("*.py"))}
        for path in sorted(EXAMPLES.glob("*.py")):
            code, err = await failure_of(path, address_of(path, fleet), "--model", "absent")
            assert code == 1
            assert "'absent'" in err
            assert "Traceback" not in err
    expected = {
        "grpc_client": (
            "tiny: context of 4096 tokens, ready: True",
            "24 tokens, length",
            "log P('The sky is')",
            "left",
        ),
        "grpc_async_client": (
            "'7 and 7 make'",
            "tiny.prefill-0 → tiny.decode-0",
            "too late",
            "invalid_argument, temperature",
        ),
        "openai_client": ("chat: ", "stream: CompletionUsage(", "logprobs: ", "token ids: ", "tools: "),
        "reflection_client": ("pdserve.v1.Inference\n", "Inference/Generate(GenerateRequest)", '"contextLength": 4096'),
    }
    assert said.keys() == expected.keys()
    for name, texts in expected.items():
        for text in texts:
            assert text in said[name]


def address_of(example: Path, fleet: Fleet) -> str:
    return f"{fleet.http_url}/v1" if example.stem == "openai_client" else fleet.grpc_address


async def output_of(example: Path, fleet: Fleet) -> str:
    code, out, err = await run(example, address_of(example, fleet))
    assert (code, err) == (0, "")
    return out


async def failure_of(example: Path, *arguments: str) -> tuple[int | None, str]:
    code, _, err = await run(example, *arguments)
    return code, err


async def run(example: Path, *arguments: str) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, str(example), *arguments, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("example", ["grpc_client", "grpc_async_client", "reflection_client"])
async def test_where_nobody_answers_that_is_said(example: str) -> None:
    code, err = await failure_of(EXAMPLES / f"{example}.py", "127.0.0.1:1")
    assert code == 1
    assert "UNAVAILABLE" in err
    assert "Traceback" not in err
