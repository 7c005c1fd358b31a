"""Quality on a tiny model: the arithmetic, the engine against transformers, and damage that the gate must see."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve_bench.quality import __main__ as command
from pdserve_bench.quality import gate as gate_module
from pdserve_bench.quality.engine_scores import CHUNK_TOKENS, Configuration, score_engine
from pdserve_bench.quality.gate import gate
from pdserve_bench.quality.page import BEGIN, END, quality_tables, write_tables
from pdserve_bench.quality.scores import Measurement, SliceScore, compare
from pdserve_bench.quality.texts import CHECKSUMS, read_text
from pdserve_bench.quality.transformers_scores import score_transformers
from tests.support.mantissa import rounded
from tests.support.tiny_models import write_tiny_llama

FP32, BF16 = Configuration("fp32", "float32"), Configuration("bf16", "bfloat16")
SLICES = {
    "short": torch.randint(3, 300, (50,), generator=torch.Generator().manual_seed(1)).tolist(),
    "long": torch.randint(3, 300, (CHUNK_TOKENS + 90,), generator=torch.Generator().manual_seed(2)).tolist(),
}


def rewrite(source: Path, target: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    """A copy of the checkpoint with other weights."""
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = load_file(source / "model.safetensors")
    save_file({name: change(name, weight) for name, weight in weights.items()}, target / "model.safetensors")


def measurement(label: str, *slices: tuple[str, float, tuple[int, ...]]) -> Measurement:
    return Measurement(label, f"{label}/1", tuple(SliceScore(*given) for given in slices))


REFERENCE = measurement("fp32", ("a", 2.0, (1, 2)), ("b", 6.0, (3, 4, 5, 6)))
OTHER = measurement("bf16", ("a", 2.2, (1, 9)), ("b", 6.3, (3, 4, 5, 6)))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def exact(tiny) -> Measurement:
    return score_engine(tiny, FP32, SLICES)


def test_slices_and_all_of_them_are_compared():
    of_a, of_b, of_all = compare(OTHER, REFERENCE)
    assert (of_a.name, of_a.num_tokens, of_a.agreement) == ("a", 2, 0.5)
    assert (of_a.perplexity, of_a.perplexity_ratio) == pytest.approx((math.exp(1.1), math.exp(0.1)))
    assert (of_b.perplexity_ratio, of_b.agreement) == pytest.approx((math.exp(0.075), 1.0))
    assert (of_all.name, of_all.num_tokens) == ("all", 6)
    assert (of_all.perplexity_ratio, of_all.agreement) == pytest.approx((math.exp(0.5 / 6), 5 / 6))


@pytest.mark.parametrize("wrong", [("c", 6.0, (3, 4, 5, 6)), ("b", 6.0, (3, 4, 5))])
def test_other_slices_cannot_be_compared(wrong):
    with pytest.raises(ValueError, match="b"):
        compare(measurement("bf16", ("a", 2.0, (1, 2)), wrong), REFERENCE)


def test_the_gate_asks_for_all_three():
    ids = tuple(range(1000))
    reference, rival = (
        measurement("fp32", ("a", 1000.0, ids)),
        measurement("rival", ("a", 1000.0, ids[:-22] + 22 * (0,))),
    )
    good = measurement("bf16", ("a", 1004.9, ids[:-22] + 22 * (0,)))
    assert [target.met for target in gate(good, reference, rival)] == [True, True, True]
    worse = measurement("bf16", ("a", 1005.1, ids[:-23] + 23 * (0,)))
    assert [target.met for target in gate(worse, reference, rival)] == [False, True, False]
    bad = measurement("bf16", ("a", 1000.0, ids[:-26] + 26 * (0,)))
    assert [target.met for target in gate(bad, reference, rival)] == [True, False, False]


def test_the_engine_in_fp32_scores_as_transformers_does(tiny, exact):
    for ours in compare(exact, score_transformers(tiny, "float32", SLICES)):
        assert ours.perplexity_ratio == pytest.approx(1.0, abs=1e-4)
        assert ours.agreement == 1.0
    assert [score.num_tokens for score in exact.slices] == [49, CHUNK_TOKENS + 89]


def test_damage_fails_the_gate(tiny, exact, tmp_path):
    """Weights of four mantissa bits, where bf16 has eight: what a wrong format or a lossy kernel would do."""
    rewrite(tiny, tmp_path, lambda name, weight: rounded(weight, 4))
    rival = score_transformers(tiny, "bfloat16", SLICES)
    assert gate(score_engine(tiny, BF16, SLICES), exact, rival)[2].met
    assert [target.met for target in gate(score_engine(tmp_path, BF16, SLICES), exact, rival)][1:] == [False, False]


def test_a_shifted_row_fails_the_gate(exact):
    """Each position judged by its neighbour's logits: an off-by-one in rows."""
    shifted = tuple(SliceScore(s.name, s.nll, (*s.top_ids[1:], s.top_ids[0])) for s in exact.slices)
    assert not gate(Measurement("shifted", "", shifted), exact, exact)[1].met


def test_a_logit_that_is_no_number_is_no_score(tiny, tmp_path):
    rewrite(tiny, tmp_path, lambda name, weight: weight * math.nan if name == "model.norm.weight" else weight)
    with pytest.raises(ValueError, match="no number"):
        score_engine(tmp_path, FP32, SLICES)


def test_the_command_writes_what_it_measured_and_fails_with_the_gate(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "encode_slices", lambda source: {"short": SLICES["short"]})
    monkeypatch.setattr(command, "CONFIGURATIONS", (FP32,))
    written = tmp_path / "result.json"
    command.main(str(tiny), written, write_docs=False)
    document = json.loads(written.read_text())
    assert [row["label"] for row in document["configurations"]] == [
        "pdserve float32",
        "fp32",
        "transformers float32",
        "transformers bfloat16",
    ]
    assert document["configurations"][1]["slices"][0]["num_tokens"] == 49
    assert [target["met"] for target in document["targets"]] == [True] * 3
    monkeypatch.setattr(gate_module, "MIN_AGREEMENT", 1.01)
    with pytest.raises(typer.Exit) as ended:
        command.main(str(tiny), None, write_docs=False)
    assert ended.value.exit_code == 1


def test_every_text_is_the_one_that_was_measured():
    assert all(read_text(name) for name in CHECKSUMS)


def test_a_changed_text_is_refused(monkeypatch):
    monkeypatch.setitem(CHECKSUMS, "prose", CHECKSUMS["code"])
    with pytest.raises(ValueError, match="prose"):
        read_text("prose")


def test_tables_go_between_the_markers(tmp_path):
    page = tmp_path / "quality.md"
    page.write_text(f"# Head\n{BEGIN}old\n{END}tail\n")
    write_tables(page, quality_tables(REFERENCE, [OTHER]))
    text = page.read_text()
    assert text.startswith(f"# Head\n{BEGIN}| configuration |")
    assert text.endswith(f"{END}tail\n")
    assert "| bf16 | `bf16/1` | 4.123 | 1.0869 | 83.33 % |" in text
    assert "| a | 2 | 2.718 | 1.1052 | 50.00 % |" in text
    assert "old" not in text


def test_a_page_without_markers_is_left_alone(tmp_path):
    page = tmp_path / "quality.md"
    page.write_text("# Head\n")
    with pytest.raises(ValueError, match="markers"):
        write_tables(page, "x")
    assert page.read_text() == "# Head\n"
