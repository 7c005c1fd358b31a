"""A fleet of real processes for fuzzing, small enough that any valid request is quick, and the check that it is unhurt.

`PDSERVE_FUZZ_FACTOR=10` makes every fuzz test ten times as long.
"""

import asyncio
import json
import os
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import pytest

from tests.support.fleet import Fleet, live_workers, run_fleet
from tests.support.tiny_models import write_tiny_llama

CONTEXT = 128
VOCAB = 300
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{# <tool_call></tool_call> #}"
    "{% for message in messages %}{{ message.role + ':' + message.content + '\n' }}{% endfor %}"
)
"""Short, with tools and without a check of anything."""
WAIT_S = 150.0
FACTOR = float(os.environ.get("PDSERVE_FUZZ_FACTOR", "1"))

T = TypeVar("T")


class FuzzFleet:
    """A fleet on an event loop of its own, so that tests with and without one can use it."""

    def __init__(self, fleet: Fleet, loop: asyncio.AbstractEventLoop) -> None:
        self.http_url = fleet.http_url
        self.grpc_address = fleet.grpc_address
        self._fleet = fleet
        self._loop = loop
        self._incarnations = self.call(self._living())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the fleet's loop and wait for it."""
        return _call(self._loop, work)

    def check_unhurt(self) -> None:
        """Every process is the one that was started, nothing runs or waits, no block is missing, and it serves."""
        assert not any(service.exited.done() for service in self._fleet.services)
        self.call(self._fleet.until_idle())
        assert self.call(self._living()) == self._incarnations
        output = self.call(self._fleet.generate([5, 6, 7], max_tokens=3, temperature=0.0, ignore_eos=True))
        assert len(output.token_ids) == 3

    async def _living(self) -> dict[str, int]:
        return {name: worker.worker.incarnation for name, worker in live_workers(await self._fleet.status()).items()}


def _call(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_S)


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzFleet]:
    """One prefill and one decode worker, 16 times a whole context in blocks each."""
    model = write_tiny_llama(tmp_path_factory.mktemp("fuzz") / "tiny", context_length=CONTEXT, vocab_size=VOCAB)
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fuzz-fleet")
    thread.start()

    stack = AsyncExitStack()
    settings = {"coordinator": {"default_max_tokens": 4}, "worker": {"num_blocks": 128}}
    try:
        fleet = _call(loop, stack.enter_async_context(run_fleet(model, **settings)))
        yield FuzzFleet(fleet, loop)
        _call(loop, stack.aclose())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def fuzz_fleet(shared_fleet: FuzzFleet) -> Iterator[FuzzFleet]:
    """Checked to be unhurt after a module's tests."""
    yield shared_fleet
    shared_fleet.check_unhurt()
