"""The typed gRPC client in asyncio: many requests at once, deadlines, and errors by their reason.

python examples/grpc_async_client.py 127.0.0.1:50051
"""

import asyncio
import sys
from contextlib import aclosing

from pdserve.client import AsyncClient, Completion, Delta, ErrorReason, GenerateOptions, PdserveError

ADDRESS = "127.0.0.1:50051"
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


async def many_at_once(client: AsyncClient) -> None:
    options = GenerateOptions(max_tokens=16, temperature=0.0)
    prompts = [f"{number} and {number} make" for number in range(8)]
    answers = await asyncio.gather(*(complete_patiently(client, prompt, options) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        timings = answer.choices[0].timings
        print(f"{prompt!r}: {answer.text!r} ({timings.prefill_worker} → {timings.decode_worker})")


async def stream_until(client: AsyncClient, num_tokens: int) -> None:
    """Closing the iterator cancels the request."""
    seen = 0
    async with aclosing(client.generate("A long story:", GenerateOptions(max_tokens=100, ignore_eos=True))) as events:
        async for event in events:
            if isinstance(event, Delta):
                seen += len(event.token_ids)
            if seen >= num_tokens:
                break
    print(f"left after {seen} tokens")


async def too_late(client: AsyncClient) -> None:
    """A deadline holds in every queue and in every phase; what was computed is dropped."""
    try:
        await client.complete("A long story:", GenerateOptions(max_tokens=100, ignore_eos=True, deadline_s=0.001))
    except PdserveError as error:
        if error.reason is not ErrorReason.DEADLINE_EXCEEDED:
            raise
        print(f"too late: {error.message}")


async def refused(client: AsyncClient) -> None:
    """A request that is wrong names the field at fault."""
    try:
        await client.complete("x", GenerateOptions(temperature=-1.0))
    except PdserveError as error:
        print(f"refused: {error.reason.value}, {error.param}: {error.message}")


async def main() -> int:
    address = sys.argv[1] if len(sys.argv) > 1 else ADDRESS
    async with AsyncClient(address) as client:
        try:
            await many_at_once(client)
            await stream_until(client, num_tokens=5)
            await too_late(client)
            await refused(client)
        except PdserveError as error:
            print(f"{error.reason.value}: {error.message}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
