"""I01 and E09 at the front door: what clients get when a deadline passes, or a worker fails, in any phase."""

import asyncio
from pathlib import Path

import pytest

from pdserve.core.errors import ErrorReason, PdserveError
from tests.support.front_door import APIS, FrontDoor, front_door
from tests.support.scripted_worker import expected_tokens

GATES = ["reserve", "prefill", "transfer", "decode"]
PROMPT = [5, 6, 7]
FAILED = PdserveError(ErrorReason.TRANSFER_FAILED, "as scripted")


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("gate", GATES)
async def test_an_expired_request_is_an_error_and_never_a_short_answer(tiny_model: Path, gate: str, api: str) -> None:
    """I01: 504, DEADLINE_EXCEEDED, or, once the first token is out, an error event without [DONE]."""
    async with front_door(tiny_model) as door:
        door.shut(gate)
        first_token_out = gate in ("transfer", "decode")
        deadline_s = 1.0 if first_token_out else 0.3  # the token must be out by then, whatever the machine does
        answer = await door.ask(api, PROMPT, max_tokens=5, deadline_s=deadline_s)
        assert answer.error == "deadline_exceeded"
        assert answer.finish_reasons == {}
        if api == "http" or (api == "sse" and not first_token_out):
            assert answer.status == 504
        elif api == "sse":
            assert (answer.status, answer.done, bool(answer.text)) == (200, False, True)
        if gate == "reserve":  # the answer to a Reserve is waited for, so that what it granted can be freed
            door.open_gates()
        await door.until_idle()
        computed = door.prefill.num_prefill_tokens
        door.open_gates()
        await door.until_idle()
        assert door.prefill.num_prefill_tokens == computed == (len(PROMPT) if first_token_out else 0)
        contexts = door.prefill.contexts + door.decode.contexts
        assert all(0 < context.deadline_remaining_ms <= 1000 * deadline_s for context in contexts)


@pytest.mark.parametrize("api", APIS)
async def test_a_request_that_expires_in_the_queue_costs_no_prefill(tiny_model: Path, api: str) -> None:
    """I01: another one holds the memory."""
    async with front_door(tiny_model, num_blocks=4) as door:
        door.shut("decode")
        holder = asyncio.create_task(door.ask("grpc", PROMPT, max_tokens=13))
        await door.until(lambda: len(door.decode.decoding) == 1)
        answer = await door.ask(api, [8] * 9, max_tokens=5, deadline_s=0.3)
        assert (answer.error, answer.status) == ("deadline_exceeded", None if api == "grpc" else 504)
        door.open_gates()
        assert (await holder).finish_reasons == {0: "length"}
        await door.until_idle()
        assert door.prefill.num_prefill_tokens == len(PROMPT)
        assert len(door.prefill.submits) == 1


@pytest.mark.parametrize("api", APIS)
async def test_a_failed_transfer_is_tried_again_and_then_503(tiny_model: Path, api: str) -> None:
    """E09: before the client has seen anything."""
    async with front_door(tiny_model) as door:
        good = await door.ask(api, PROMPT, max_tokens=5)
        door.prefill.script.prefill_errors.append(FAILED)
        again = await door.ask(api, PROMPT, max_tokens=5)
        assert (again.text, again.finish_reasons, again.done) == (good.text, {0: "length"}, True)
        assert len(door.prefill.submits) == 3
        door.prefill.script.prefill_errors.extend([FAILED, FAILED])
        failed = await door.ask(api, PROMPT, max_tokens=5)
        assert (failed.error, failed.finish_reasons, failed.done) == ("transfer_failed", {}, False)
        assert failed.status == (None if api == "grpc" else 503)
        await door.until_idle()


@pytest.mark.parametrize("reason", [ErrorReason.TRANSFER_FAILED, ErrorReason.WORKER_LOST, ErrorReason.INTERNAL])
@pytest.mark.parametrize("api", APIS)
async def test_a_failure_in_mid_stream_is_an_error_event_then_the_end(
    tiny_model: Path, api: str, reason: ErrorReason
) -> None:
    """E09: never 200 with finish reason length over text that was cut short."""
    async with front_door(tiny_model) as door:
        door.shut("decode")
        call = asyncio.create_task(door.ask(api, PROMPT, max_tokens=5))
        while 'generation_tokens_total{model="tiny"} 1.0' not in (await door.http.get("/metrics")).text:
            assert not call.done()
        door.decode.script.decode_errors.append(PdserveError(reason, "as scripted"))
        door.open_gates()
        answer = await call
        assert (answer.error, answer.finish_reasons) == (reason.value, {})
        if api == "sse":
            assert (answer.status, answer.done, bool(answer.text)) == (200, False, True)
        elif api == "http":
            assert answer.status == PdserveError(reason, "").codes.http_status
        await door.until_idle()


async def labelled(door: FrontDoor, prompt: list[int], label: str, max_tokens: int) -> tuple[str, str]:
    """The answer's text and the label that came back."""
    body = {"prompt": prompt, "max_tokens": max_tokens}
    response = await door.http.post("/v1/completions", json=body, headers={"X-Request-Id": label})
    return response.json()["choices"][0]["text"], response.headers["X-Request-Id"]


async def test_two_requests_at_once_under_one_request_id_are_two_requests(tiny_model: Path) -> None:
    """Both run, each gets its own text; ending one leaves the other alone."""
    async with front_door(tiny_model) as door:
        prompts = [[5, 6, 7], [8, 9]]
        assert expected_tokens((5, 6, 7), 9) != expected_tokens((8, 9), 9)
        alone = [await labelled(door, prompt, "alone", 9) for prompt in prompts]
        door.shut("decode")
        calls = [asyncio.create_task(labelled(door, prompt, "same", 9)) for prompt in prompts]
        third = asyncio.create_task(labelled(door, [11, 12], "same", 9))
        await door.until(lambda: len(door.decode.decoding) == 3)
        third.cancel()
        await door.until(lambda: len(door.decode.cancels) == 1)
        door.open_gates()
        together = await asyncio.gather(*calls)
        assert [text for text, _ in together] == [text for text, _ in alone]
        assert {label for _, label in together} == {"same"}
        await door.until_idle()


@pytest.mark.parametrize("api", APIS)
async def test_a_prompt_of_the_whole_context_arrives_intact(tiny_model: Path, api: str) -> None:
    """K02: as ids, over every API and on to the workers."""
    async with front_door(tiny_model, num_blocks=1024) as door:
        prompt = [3 + i % 297 for i in range(4094)]
        received: list[tuple[int, ...]] = []
        submit = door.decode._submit_decode
        door.decode._submit_decode = lambda s: (received.append(tuple(s.token_ids)), submit(s))  # type: ignore[method-assign]
        answer = await door.ask(api, prompt, max_tokens=2)
        assert answer.finish_reasons == {0: "length"}
        assert received == [tuple(prompt)]
        assert door.prefill.num_prefill_tokens == 4094
