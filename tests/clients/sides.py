"""The synchronous and the asynchronous openai client, used in one way so that each test is written once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from operator import attrgetter
from typing import Any

import openai


class AsyncSide:
    """`call` takes a method's dotted name, such as "chat.completions.create"."""

    name = "async"

    def __init__(self, base_url: str, api_key: str, timeout_s: float = 60.0) -> None:
        self.client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=timeout_s, max_retries=0)

    async def call(self, method: str, **arguments: Any) -> Any:
        return await attrgetter(method)(self.client)(**arguments)

    async def items(self, stream: Any) -> list[Any]:
        return [item async for item in stream]

    async def read(self, method: Any) -> Any:
        """Call a method of an answer that reads from the connection."""
        return await method()

    def entered(self, method: str, **arguments: Any) -> AbstractAsyncContextManager[Any]:
        return attrgetter(method)(self.client)(**arguments)

    async def close(self) -> None:
        await self.client.close()


class SyncSide:
    """The same calls, each in a thread of its own."""

    name = "sync"

    def __init__(self, base_url: str, api_key: str, timeout_s: float = 60.0) -> None:
        self.client = openai.OpenAI(base_url=base_url, api_key=api_key, timeout=timeout_s, max_retries=0)

    async def call(self, method: str, **arguments: Any) -> Any:
        return await asyncio.to_thread(attrgetter(method)(self.client), **arguments)

    async def items(self, stream: Any) -> list[Any]:
        return await asyncio.to_thread(list, stream)

    async def read(self, method: Any) -> Any:
        return await asyncio.to_thread(method)

    @asynccontextmanager
    async def entered(self, method: str, **arguments: Any) -> AsyncIterator[Any]:
        manager: AbstractContextManager[Any] = await self.call(method, **arguments)
        entered = await asyncio.to_thread(manager.__enter__)
        try:
            yield entered
        finally:
            await asyncio.to_thread(manager.__exit__, None, None, None)

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)


Side = AsyncSide | SyncSide
