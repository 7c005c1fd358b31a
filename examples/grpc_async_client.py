"""The typed gRPC client in asyncio: many requests at once, deadlines, and errors by their reason.

python examples/grpc_async_client.py 127.0.0.1:50051 --model NAME
"""

import argparse
import asyncio
import sys
from contextlib import aclosing

from pdserve.client import AsyncClient, Completion, Delta, ErrorReason, GenerateOptions, PdserveError

NUM_ATTEMPTS = 4


async def complete_patiently(client: AsyncClient, prompt: str, options: GenerateOptions) -> Completion:
    """Ask again where that may help: `retryable` tells, and a busy server says after how long."""
    for attempt in range(1, NUM_ATTEMPTS + 1):
        try:
            return await client.complete(prompt, options)
        except PdserveError as error:
            if not error.retryable or attempt == NUM_ATTEMPTS:
                raise
            await asyncio.sleep(error.retry_after_s or 0.25 * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


async def many_at_once(client: AsyncClient, model: str) -> None:
    options = GenerateOptions(model, max_tokens=16, temperature=0.0)
    prompts = [f"{number} and {number} make" for number in range(8)]
    answers = await asyncio.gather(*(complete_patiently(client, prompt, options) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        timings = answer.choices[0].timings
        print(f"{prompt!r}: {answer.text!r} ({timings.prefill_worker} → {timings.decode_worker})")


async def stream_until(client: AsyncClient, model: str, num_tokens: int) -> None:
    """Closing the iterator cancels the request."""
    seen = 0
    options = GenerateOptions(model, max_tokens=100, ignore_eos=True)
    async with aclosing(client.generate("A long story:", options)) as events:
        async for event in events:
            if isinstance(event, Delta):
                seen += len(event.token_ids)
            if seen >= num_tokens:
                break
    print(f"left after {seen} tokens")


async def too_late(client: AsyncClient, model: str) -> None:
    """A deadline holds in every queue and in every phase; what was computed is dropped."""
    options = GenerateOptions(model, max_tokens=100, ignore_eos=True, deadline_s=0.001)
    try:
        await client.complete("A long story:", options)
    except PdserveError as error:
        if error.reason is not ErrorReason.DEADLINE_EXCEEDED:
            raise
        print(f"too late: {error.message}")


async def refused(client: AsyncClient, model: str) -> None:
    """A request that is wrong names the field at fault."""
    try:
        await client.complete("x", GenerateOptions(model, temperature=-1.0))
    except PdserveError as error:
        print(f"refused: {error.reason.value}, {error.param}: {error.message}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051")
    parser.add_argument("--model", help="the first that is served, if not given")
    return parser.parse_args()


async def main() -> int:
    given = arguments()
    async with AsyncClient(given.address) as client:
        try:
            model = given.model or (await client.list_models())[0].info.name
            await many_at_once(client, model)
            await stream_until(client, model, num_tokens=5)
            await too_late(client, model)
            await refused(client, model)
        except PdserveError as error:
            print(f"{error.reason.value}: {error.message}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
