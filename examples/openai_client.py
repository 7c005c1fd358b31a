"""OpenAI's own client over HTTP: chat, stream, logprobs, token ids as the prompt, tools.

python examples/openai_client.py http://127.0.0.1:8000 --model NAME
"""

import argparse
import sys

from openai import APIStatusError, BadRequestError, OpenAI
from openai.types.chat import ChatCompletionToolParam

TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city, now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def chat(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Name a colour."}], max_completion_tokens=16, temperature=0
    )
    print(f"chat: {answer.choices[0].message.content!r}, {answer.usage}")


def stream(client: OpenAI, model: str) -> None:
    chunks = client.completions.create(
        model=model,
        prompt="Once upon a time",
        max_tokens=24,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"top_k": 40, "min_p": 0.01},  # what OpenAI's API has no name for
    )
    for chunk in chunks:
        print(chunk.choices[0].text if chunk.choices else f"\nstream: {chunk.usage}", end="", flush=True)
    print()


def logprobs(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Yes or no?"}],
        max_completion_tokens=2,
        logprobs=True,
        top_logprobs=2,
    )
    found = answer.choices[0].logprobs
    for entry in (found and found.content) or []:
        best = [(other.token, other.logprob) for other in entry.top_logprobs]
        print(f"logprobs: {entry.token!r} {entry.logprob:.2f}, best {best}")


def token_ids(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=[10, 20, 30], max_tokens=8, temperature=0)
    print(f"token ids: {answer.choices[0].text!r}")


def tools(client: OpenAI, model: str) -> None:
    """Only a model whose chat template knows tools takes them; others refuse by name."""
    try:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "How is the weather in Oslo?"}],
            tools=[TOOL],
            max_completion_tokens=64,
        )
    except BadRequestError as error:
        print(f"tools: {error.message}")
        return
    message = answer.choices[0].message
    calls = [call.function for call in message.tool_calls or () if call.type == "function"]
    print(f"tools: {[(call.name, call.arguments) for call in calls] or message.content}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="with /v1 behind it or without")
    parser.add_argument("--model", help="the first that is served, if not given")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    base_url = given.url.rstrip("/").removesuffix("/v1") + "/v1"
    client = OpenAI(base_url=base_url, api_key="none", max_retries=2)
    try:
        model = given.model or client.models.list().data[0].id
        for example in (chat, stream, logprobs, token_ids, tools):
            example(client, model)
    except APIStatusError as error:
        print(f"{error.code}: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
