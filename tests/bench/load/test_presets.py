from dataclasses import replace

import pytest

from pdserve_bench.load.mixes import Mix, make_plan
from pdserve_bench.load.presets import BURST, CHAT, MIXED, PRESETS, RAG, check_fits, preset

CONTEXT_LENGTH = 8192
"""SmolLM2-135M's."""

CORE_PREFILL_RATE, CORE_DECODE_RATE = 600, 200
"""Tokens/s that one core manages at least."""


def test_the_presets_are_those_promised() -> None:
    assert set(PRESETS) == {"chat", "rag", "batch-summarise", "mixed", "burst"}
    assert preset("mixed") is MIXED
    with pytest.raises(ValueError, match=r"'party' \(known: chat, rag"):
        preset("party")


@pytest.mark.parametrize("mix", PRESETS.values(), ids=PRESETS)
def test_a_preset_fits_model_and_machine_and_says_what_it_stands_for(mix: Mix) -> None:
    check_fits(mix, CONTEXT_LENGTH)
    assert len(mix.about) > 40
    assert sum(stream.mean_rate() * stream.prompt.mean for stream in mix.streams) < CORE_PREFILL_RATE
    assert sum(stream.mean_rate() * stream.output.mean for stream in mix.streams) < CORE_DECODE_RATE
    plan = make_plan(mix, 120, 1, 49_152)
    assert {request.request_class for request in plan.requests} == {stream.request_class for stream in mix.streams}
    assert max(len(request.token_ids) + request.max_tokens for request in plan.requests) <= CONTEXT_LENGTH


def test_the_mixed_load_is_long_prompts_over_running_streams() -> None:
    interactive, documents = MIXED.streams
    assert (interactive.mean_rate(), interactive.prompt.mean, interactive.output.mean) == (0.8, 128, 96)
    assert (documents.mean_rate(), documents.prompt.mean, documents.output.mean) == (0.12, 1500, 32)
    assert make_plan(MIXED, 60, 1, 49_152).intended_hit_rate == 0


@pytest.mark.parametrize("mix", [CHAT, RAG])
def test_presets_with_shared_prefixes_intend_hits(mix: Mix) -> None:
    assert make_plan(mix, 600, 1, 49_152).intended_hit_rate > 0.3


def test_shared_prefixes_are_whole_blocks() -> None:
    assert all(stream.shared_prefix_tokens % 16 == 0 for mix in PRESETS.values() for stream in mix.streams)


def test_bursts_are_bursty() -> None:
    (stream,) = BURST.streams
    assert (stream.arrivals.kind, stream.arrivals.burstiness) == ("gamma", 0.25)


def test_a_mix_that_does_not_fit_is_refused() -> None:
    check_fits(MIXED, 1532)
    with pytest.raises(
        ValueError, match=r"mixed: class 'document' .* 1500 \+ 32 tokens, more than the context of 1531"
    ):
        check_fits(MIXED, 1531)
    check_fits(replace(MIXED, streams=MIXED.streams[:1]), 400)
