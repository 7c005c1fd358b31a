"""A server with the OpenAI API's shape and no model: argv is its port. Token k of an answer is the text "k"."""

import asyncio
import json
import sys


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length"))
    body = await reader.readexactly(length)
    if head.startswith("GET /v1/models "):
        _whole(writer, "200 OK", {"data": [{"id": "fake"}]})
    elif head.startswith("POST /v1/completions "):
        await _complete(writer, json.loads(body))
    else:
        _whole(writer, "404 Not Found", {"error": "no such page"})
    writer.close()


def _whole(writer: asyncio.StreamWriter, status: str, answer: object) -> None:
    text = json.dumps(answer).encode()
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)


async def _complete(writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
    """In chunks that end in the middle of an event."""
    prompt, max_tokens = body["prompt"], body["max_tokens"]
    assert isinstance(prompt, list)
    assert isinstance(max_tokens, int)
    usage = {"prompt_tokens": len(prompt), "completion_tokens": max_tokens}
    events: list[object] = [{"choices": [{"text": str(index)}], "usage": None} for index in range(max_tokens)]
    lines = [f"data: {json.dumps(event)}\n\n" for event in [*events, {"choices": [], "usage": usage}]]
    stream = ("".join(lines) + "data: [DONE]\n\n").encode()
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for begin in range(0, len(stream), 50):
        part = stream[begin : begin + 50]
        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        await writer.drain()
    writer.write(b"0\r\n\r\n")


async def _main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
