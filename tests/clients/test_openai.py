"""The openai package against a fleet of real processes: docs/conformance.md, row by row."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from tests.clients.alphabet_model import write_alphabet_model
from tests.clients.behaviours import BEHAVIOURS, Context
from tests.clients.chat_features import CHAT_FEATURES
from tests.clients.completion_features import COMPLETION_FEATURES
from tests.clients.feature import Feature
from tests.clients.outcomes import ask
from tests.clients.page import MARKER, PAGE, generated
from tests.clients.sides import AsyncSide, Side, SyncSide
from tests.support.fleet import Fleet, run_fleet

KEY = "key-1"
SIDES = {"sync": SyncSide, "async": AsyncSide}
FEATURES = [
    pytest.param(feature, id=f"{feature.endpoint}: {feature.name}")
    for feature in (*COMPLETION_FEATURES, *CHAT_FEATURES)
]
ANSWERED_CHATS = [pytest.param(feature, id=feature.name) for feature in CHAT_FEATURES if feature.refused is None]
WAYS = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_alphabet_model(tmp_path_factory.mktemp("clients") / "alphabet")


@pytest.fixture(scope="module")
def tokenizer(alphabet: Path) -> Any:
    return AutoTokenizer.from_pretrained(alphabet)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(alphabet: Path) -> AsyncIterator[Fleet]:
    coordinator = {"api_keys": {KEY: "tenant"}, "max_queued_requests": 8}
    async with run_fleet(alphabet, coordinator=coordinator) as fleet:
        yield fleet


@pytest_asyncio.fixture(params=SIDES, loop_scope="module")
async def context(request: pytest.FixtureRequest, fleet: Fleet) -> AsyncIterator[Context]:
    async with AsyncExitStack() as stack:

        def connect(base_url: str = f"{fleet.http_url}/v1", api_key: str = KEY) -> Side:
            side: Side = SIDES[request.param](base_url, api_key)
            stack.push_async_callback(side.close)
            return side

        yield Context(connect(), fleet, connect)


@WAYS
@pytest.mark.parametrize("feature", FEATURES)
async def test_a_feature(context: Context, feature: Feature, streamed: bool) -> None:
    feature.verify(await ask(context.side, feature.endpoint, streamed, feature.arguments))


@pytest.mark.parametrize("feature", ANSWERED_CHATS)
async def test_prompts_are_as_long_as_transformers_makes_them(fleet: Fleet, tokenizer: Any, feature: Feature) -> None:
    side = AsyncSide(f"{fleet.http_url}/v1", KEY)
    arguments = feature.arguments
    tools = None if arguments.get("tool_choice") == "none" else arguments.get("tools")
    messages = [_plain(message) for message in arguments["messages"]]
    options = {"add_generation_prompt": True, **arguments.get("extra_body", {})}
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    try:
        outcome = await ask(side, feature.endpoint, False, arguments)
    finally:
        await side.close()
    assert outcome.prompt_tokens == len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", BEHAVIOURS)
async def test_the_client_itself(context: Context, name: str) -> None:
    await BEHAVIOURS[name](context)


async def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text().partition(MARKER)[0] == generated(), "run python -m tests.clients.page"


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """As templates expect it: content is text, a call's arguments are an object."""
    content = message["content"] or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    return {**message, "content": content, **({"tool_calls": calls} if calls else {})}
