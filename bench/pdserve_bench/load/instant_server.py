"""A server without a model that answers at once, as OpenAI's API would: `python -m pdserve_bench.load.instant_server`.

stdout: one line, its URL. It ends with its stdin. What a client attains against it is the client's own limit.
"""

import asyncio
import json
import sys

from aiohttp import web


async def _complete(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    num_prompt, num_tokens = len(body["prompt"]), int(body["max_tokens"])
    for number in range(1, num_tokens + 1):
        reason = "length" if number == num_tokens else None
        choice = {"index": 0, "text": "x", "finish_reason": reason}
        usage = {"prompt_tokens": num_prompt, "completion_tokens": number}
        await response.write(f"data: {json.dumps({'choices': [choice], 'usage': usage})}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def _serve() -> None:
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/completions", _complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    sys.stdout.write(f"http://{host}:{port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(_serve())
