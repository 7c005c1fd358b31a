"""Whatever clients send over gRPC, they get tokens or a typed refusal, and the fleet is unhurt."""

import asyncio
from collections import Counter

import grpc
import grpc.aio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pdserve.client.channels import MAX_MESSAGE_BYTES, aio_channel
from pdserve.client.errors import ERROR_METADATA_KEY, grpc_status
from pdserve.client.wire import error_from_proto
from pdserve.core.errors import ErrorReason
from pdserve.v1 import common_pb2
from pdserve.v1 import inference_pb2 as pb
from tests.fuzz.conftest import FACTOR, FuzzFleet
from tests.fuzz.grpc_requests import GENERATE, Case, cases

IN_FLIGHT = 12
NUM_ROUNDS = round(100 * FACTOR)
CLIENT_TIMEOUT_S = 60.0
LEAVING = Case(GENERATE, pb.GenerateRequest(text="a", n=3).SerializeToString(), num_messages=2)
"""In every round, since few of the random cases get as far as a client that hangs up."""
TYPED = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}


def test_any_request_gets_tokens_or_a_typed_refusal(fuzz_fleet: FuzzFleet) -> None:
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=NUM_ROUNDS,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # to shrink a round of cases takes minutes, and tells little more
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(st.lists(cases(), min_size=IN_FLIGHT, max_size=IN_FLIGHT))
    def fuzz(sent: list[Case]) -> None:
        outcomes.update(fuzz_fleet.call(_ask_all(fuzz_fleet.grpc_address, [*sent, LEAVING])))

    fuzz()
    assert outcomes.total() >= NUM_ROUNDS * IN_FLIGHT
    for status in ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "CANCELLED", "DEADLINE_EXCEEDED"):
        assert outcomes[status], f"no case ended as {status}"


async def _ask_all(address: str, sent: list[Case]) -> list[str]:
    async with aio_channel(address) as channel:
        return await asyncio.gather(*(_ask(channel, case) for case in sent))


async def _ask(channel: grpc.aio.Channel, case: Case) -> str:
    """The status that a case ended with, once all that came before is found in order."""
    call = channel.unary_stream(case.method)(case.raw, timeout=case.timeout_s or CLIENT_TIMEOUT_S)
    messages: list[bytes] = []
    try:
        async for message in call:
            messages.append(message)
            if len(messages) == case.num_messages:
                call.cancel()
                return "CANCELLED"
    except grpc.aio.AioRpcError as error:
        _check_error(case, error)
        return error.code().name
    if case.method == GENERATE:
        _check_stream([pb.GenerateResponse.FromString(message) for message in messages])
    return "OK"


def _check_error(case: Case, error: grpc.aio.AioRpcError) -> None:
    """Ours carry their reason; gRPC itself speaks of two things, both the client's doing."""
    status = error.code().name
    assert status in TYPED, f"{case}: {error}"
    if status == "DEADLINE_EXCEEDED" and case.timeout_s is not None:
        return  # by the client's own clock, whatever was on its way
    raw = dict(error.trailing_metadata() or ()).get(ERROR_METADATA_KEY)
    if raw is None:
        assert status == "RESOURCE_EXHAUSTED", f"{case}: {error}"
        assert len(case.raw) > MAX_MESSAGE_BYTES
        return
    assert isinstance(raw, bytes)
    found = error_from_proto(common_pb2.ErrorInfo.FromString(raw))
    assert grpc_status(found).name == status, f"{case}: {error}"
    assert found.reason is not ErrorReason.INTERNAL
    assert found.message


def _check_stream(events: list[pb.GenerateResponse]) -> None:
    """Started, then each choice's tokens by index, each once, then its end."""
    assert [event.WhichOneof("event") == "started" for event in events] == [True] + [False] * (len(events) - 1)
    next_index: Counter[int] = Counter()
    finished: set[int] = set()
    for event in events[1:]:
        choice = event.delta.choice if event.HasField("delta") else event.finished.choice
        assert choice not in finished
        if event.HasField("finished"):
            assert event.finished.usage.completion_tokens == next_index[choice]
            finished.add(choice)
        else:
            assert event.delta.is_prompt or event.delta.first_index == next_index[choice]
            next_index[choice] += len(event.delta.token_ids)
    assert finished == set(range(max(len(finished), 1)))
