"""Streaming generation over pdserve's own gRPC API. Measures nothing itself."""

from collections.abc import Mapping
from contextlib import aclosing

from pdserve.client import (
    AsyncClient,
    Delta,
    ErrorReason,
    Finished,
    GenerateOptions,
    PdserveError,
    Timings,
)
from pdserve_bench.load.client import Answer, NoteTokens, RequestError
from pdserve_bench.load.plan import PlannedRequest
from pdserve_bench.load.records import ServerTimings

_NO_ROOM = frozenset({ErrorReason.QUEUE_FULL, ErrorReason.NO_WORKERS, ErrorReason.DRAINING})


class PdserveClient:
    """As `LoadClient`, over one connection a tenant: a pdserve server takes any number of streams on it.

    Args:
        address: host:port.
        api_keys: by tenant; that of "" serves tenants without their own.
    """

    def __init__(self, address: str, *, api_keys: Mapping[str, str] | None = None) -> None:
        self._address = address
        self._keys = dict(api_keys or {})
        self._clients: dict[str, AsyncClient] = {}

    async def send(self, request: PlannedRequest, note: NoteTokens) -> Answer:
        """See `LoadClient`."""
        options = GenerateOptions(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
        token_ids: list[int] = []
        finished: Finished | None = None
        try:
            async with aclosing(self._client(request.tenant).generate(request.token_ids, options)) as events:
                async for event in events:
                    if isinstance(event, Delta) and event.token_ids:
                        token_ids += event.token_ids
                        note(len(event.token_ids))
                    elif isinstance(event, Finished):
                        finished = event
        except PdserveError as error:
            raise RequestError(str(error), rejected=error.reason in _NO_ROOM and not token_ids) from None
        if finished is None:
            raise RequestError("the stream ended before the request was finished")
        return Answer(
            finish_reason=finished.finish_reason.value,
            num_output_tokens=finished.usage.completion_tokens,
            num_cached_tokens=finished.usage.cached_tokens,
            counts_are_exact=True,
            output=" ".join(map(str, token_ids)),
            server=_timings(finished.timings),
        )

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    def _client(self, tenant: str) -> AsyncClient:
        key = self._keys.get(tenant) or self._keys.get("", "")
        if key not in self._clients:
            self._clients[key] = AsyncClient(self._address, key)
        return self._clients[key]


def _timings(timings: Timings) -> ServerTimings:
    return ServerTimings(
        queue_s=timings.queue_s,
        reserve_s=timings.reserve_s,
        prefill_s=timings.prefill_s,
        exposed_transfer_s=timings.exposed_transfer_s,
        decode_s=timings.decode_s,
        ttft_s=timings.ttft_s,
        prefill_worker=timings.prefill_worker,
        decode_worker=timings.decode_worker,
    )
