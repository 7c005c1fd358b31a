"""D01 and D03 at the front door: real HTTP and gRPC, scripted workers that can be stopped in any phase."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from coordinator.fleet.values import Role
from coordinator.sequences import SequenceStream
from pdserve.core.errors import PdserveError
from tests.support.front_door import APIS, FrontDoor, front_door
from tests.support.scheduling_rig import Rig, read_all, scheduling_rig
from tests.support.scripted_worker import ScriptedWorker

GATES = {"queued": "reserve", "prefill": "prefill", "transfer": "transfer", "decode": "decode"}
LONG: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}


async def until_phase(door: FrontDoor, phase: str, n: int) -> None:
    """All `n` sequences are at the phase's gate, or, where the first waits for its memory, behind it."""
    prefill, decode = door.prefill, door.decode
    conditions = {
        "queued": lambda: decode.num_asked == 1,
        "prefill": lambda: len(prefill.prefilling) == n,
        "transfer": lambda: len(prefill.prefilling) == prefill.num_sent == n,
        "decode": lambda: len(decode.decoding) == n and prefill.num_sent == 2 * n,
    }
    await door.until(conditions[phase])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("phase", list(GATES))
async def test_a_client_that_hangs_up_frees_every_choice_and_gets_no_more_tokens(
    tiny_model: Path, phase: str, api: str, n: int
) -> None:
    """D01: in each phase, over each API, for one choice and three."""
    async with front_door(tiny_model) as door:
        door.shut(GATES[phase])
        call = asyncio.create_task(door.ask(api, [5, 6, 7], n=n, **LONG))
        await until_phase(door, phase, n)
        sent = door.prefill.num_sent + door.decode.num_sent
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        status = await door.until_status(lambda s: s.requests_by_outcome.get("cancelled", 0) > 0)
        if phase == "queued":
            door.open_gates()
        await door.until_idle()
        door.open_gates()
        assert dict(status.requests_by_outcome) == {"cancelled": 1}
        assert door.prefill.num_sent + door.decode.num_sent == sent
        assert len(set(door.decode.cancels)) == len(door.decode.cancels) == (1 if phase == "queued" else n)
        assert bool(door.prefill.submits) == (phase != "queued")
        after = await door.ask(api, [5, 6, 7], max_tokens=3)
        assert (after.finish_reasons, after.done) == ({0: "length"}, True)


async def test_a_thousand_normal_completions_abort_nothing(tiny_model: Path) -> None:
    """D01: the fix for hang-ups must not send an abort after every good answer."""
    async with front_door(tiny_model, max_queued_requests=1000) as door:

        async def client(number: int) -> None:
            for i in range(50):
                answer = await door.ask(APIS[(number + i) % 3], [5, number, i], max_tokens=1 + i % 4)
                assert (answer.finish_reasons, answer.done, answer.error) == ({0: "length"}, True, None)

        await asyncio.gather(*(client(number) for number in range(20)))
        status = await door.until_idle()
        assert dict(status.requests_by_outcome) == {"length": 1000}
        assert door.prefill.cancels == []
        assert door.decode.cancels == []


async def cancel_a_thousand(rig: Rig) -> None:
    """Up to 40 at a time, each ended after another number of turns of the event loop: on all kinds of awaits."""
    rng = random.Random(0)
    waiting: list[SequenceStream] = []
    calls: list[asyncio.Task[object]] = []
    for i in range(1000):
        waiting.append(rig.submit((5, i % 50), 30))
        calls.append(asyncio.create_task(read_all(waiting[-1])))
        for _ in range(rng.randrange(13)):
            await asyncio.sleep(0)
        if len(waiting) == 40 or rng.random() < 0.5:
            waiting.pop(rng.randrange(len(waiting))).cancel()
    for stream in waiting:
        stream.cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(outcome, PdserveError) for outcome in outcomes) > 500
    await rig.until_idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_after_a_thousand_cancels_a_restarted_worker_gets_its_share_and_no_more(role: str) -> None:
    """D03: a count that leaks at one worker in a thousand cancels would send everything to the one that restarted."""
    async with scheduling_rig(max_queued_requests=1000) as rig:
        for i in range(3):
            await rig.add(f"p{i}", "prefill", 64)
            await rig.add(f"d{i}", "decode", 64)
        await cancel_a_thousand(rig)
        assert not any(rig.in_flight().values())
        name = f"{role[0]}0"
        old: ScriptedWorker = rig.workers[name]
        assert any(kind == role for kind, _ in old.submits)
        await old.kill()
        await rig.until(lambda: rig.state(old) is None)
        await rig.add(name, role, 64)
        chosen: list[str] = []
        for batch in range(10):
            ends = await asyncio.gather(*(read_all(rig.submit((5, batch, i), 4)) for i in range(30)))
            chosen += [getattr(end.timings, f"{role}_worker") for _, end in ends]
        assert len(chosen) == 300
        assert chosen.count(name) <= 0.4 * 300
        await rig.until_idle()
        assert not any(rig.in_flight().values())
        assert {name for name, _ in rig.in_flight()} == {"p0", "p1", "p2", "d0", "d1", "d2"}


async def test_a_prefill_worker_is_free_while_its_sequences_decode() -> None:
    """D03: its count drops when the transfer is acknowledged, so new prompts see it as idle."""
    async with scheduling_rig() as rig:
        prefill = await rig.add("p0", "prefill")
        decode = await rig.add("d0", "decode")
        decode.script.decode.clear()
        streams = [rig.submit((5, i), 9) for i in range(8)]
        await rig.until(lambda: len(decode.decoding) == 8)
        await rig.until(lambda: rig.in_flight() == {("p0", Role.PREFILL): 0, ("d0", Role.DECODE): 8})
        (view,) = [view for view in rig.fleet.views("tiny") if view.key.worker_id == "p0"]
        assert (view.queued_prefill_tokens, view.num_in_flight, view.prefill_room) == (0, 0, 256)
        decode.script.decode.set()
        assert [len(tokens) for tokens, _ in await asyncio.gather(*map(read_all, streams))] == [9] * 8
        assert not prefill.cancels
