"""What a study sends: plans of their own for every rate and repeat."""

from pathlib import Path

import pytest

from pdserve_bench.load.presets import preset
from pdserve_bench.load.traces import read_trace, trace_path
from pdserve_bench.study.command import kept_seed
from pdserve_bench.study.options import MixLoad, StudyOptions, TraceLoad


def options(tmp_path: Path, **changes: object) -> StudyOptions:
    values = {
        "folder": tmp_path,
        "load": MixLoad(preset("mixed")),
        "source": tmp_path,
        "seed": 7,
        "cores": (0, 1),
        "vocab_size": 49152,
        **changes,
    }
    return StudyOptions(**values)  # type: ignore[arg-type]


def test_every_run_has_prompts_of_its_own(tmp_path: Path) -> None:
    one = options(tmp_path, num_repeats=3)
    plans = [*(plan for plans in one.plans().values() for plan in plans), one.pilot_plan()]
    prompts = [request.token_ids for plan in plans for request in plan.requests]
    assert len(plans) == 2 * 3 + 1
    assert len({prompt[:16] for prompt in prompts}) == len(prompts)


def test_a_seed_says_all(tmp_path: Path) -> None:
    assert options(tmp_path).plans() == options(tmp_path).plans()
    assert options(tmp_path).plans() != options(tmp_path, seed=8).plans()


def test_a_higher_rate_sends_more(tmp_path: Path) -> None:
    plans = options(tmp_path, duration_s=200.0).plans()
    assert len(plans[1.75][0].requests) > 1.3 * len(plans[1.0][0].requests)


def test_a_trace_is_scaled(tmp_path: Path) -> None:
    name = "azure-conv-sample"
    load = TraceLoad(name, tuple(read_trace(trace_path(name))), length_factor=0.25, max_prompt_tokens=300)
    plan = options(tmp_path, load=load, rate_factors=(0.5,)).plans()[0.5][0]
    assert 0 < max(len(request.token_ids) for request in plan.requests) <= 300
    assert plan.about["trace"] == name
    assert plan.span_s < 30


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cores": (0,)}, "need a core each; there are 1"),
        ({"num_repeats": 0}, "repeats"),
        ({"rate_factors": ()}, "rate factors"),
        ({"duration_s": 0.0}, "duration"),
        ({"prefill_chunks": ()}, "at least one of each"),
        ({"chunks": (0,)}, "all above 0"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        options(tmp_path, **changes)


def test_a_load_that_sends_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sends nothing within"):
        options(tmp_path, rate_factors=(1e-9,)).plans()


def test_a_folder_keeps_its_seed(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert kept_seed(folder, 5) == 5
    assert kept_seed(folder, None) == 5
    with pytest.raises(ValueError, match="a study with seed 5"):
        kept_seed(folder, 6)


def test_a_new_folder_gets_a_new_seed(tmp_path: Path) -> None:
    assert kept_seed(tmp_path / "one", None) != kept_seed(tmp_path / "other", None)
