"""/v1/completions as the openai client asks for it: each feature, and the answer of the alphabet model."""

import math
from functools import partial
from typing import Any

import pytest

from tests.clients.alphabet_model import BEST_LOGIT, SECOND_LOGIT, token_id
from tests.clients.feature import Feature
from tests.clients.outcomes import Outcome

MODEL = "alphabet"
ALMOST_EVEN = 100.0
"""A temperature at which any token may come."""

_SUM = math.exp(BEST_LOGIT) + math.exp(SECOND_LOGIT)
BEST_LOGPROB, SECOND_LOGPROB = BEST_LOGIT - math.log(_SUM), SECOND_LOGIT - math.log(_SUM)
near = partial(pytest.approx, abs=0.01)


def same_in_all_choices(outcome: Outcome) -> None:
    assert len({choice.text for choice in outcome.choices}) == 1


def differing_choices(outcome: Outcome) -> None:
    assert len({choice.text for choice in outcome.choices}) > 1


def only_top_two(outcome: Outcome) -> None:
    followers = [(ord(b) - ord(a)) % 26 for a, b in zip("c" + outcome.choices[0].text, outcome.choices[0].text)]  # noqa: B905
    assert set(followers) == {1, 2}


def _logprobs(num_top: int, outcome: Outcome) -> None:
    logprobs = outcome.choices[0].logprobs
    assert logprobs["tokens"] == list("def")
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [near(BEST_LOGPROB)] * 3
    top = [("d", "e"), ("e", "f"), ("f", "g")]
    expected = [dict(zip(pair, (near(BEST_LOGPROB), near(SECOND_LOGPROB)), strict=True)) for pair in top]
    if num_top:
        assert logprobs["top_logprobs"] == expected


def _echoed_logprobs(outcome: Outcome) -> None:
    logprobs = outcome.choices[0].logprobs
    assert logprobs["tokens"] == list("abcde")
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"] == [None, *[near(BEST_LOGPROB)] * 4]
    assert logprobs["top_logprobs"][0] is None
    assert all(set(entry) >= {token} for entry, token in zip(logprobs["top_logprobs"][1:], "bcde", strict=True))


def _stopped_logprobs(outcome: Outcome) -> None:
    assert "".join(outcome.choices[0].logprobs["tokens"]) == outcome.choices[0].text


def completion(name: str, prompt: Any = "abc", **rest: Any) -> Feature:
    """`rest`: fields of Feature, then the request's own."""
    expected = {key: rest.pop(key) for key in list(rest) if key in Feature.__dataclass_fields__}
    arguments = {"model": MODEL, "prompt": prompt, "max_tokens": 5, "temperature": 0, **rest}
    return Feature(name, "completions", arguments, **expected)


IDS = [token_id(letter) for letter in "abc"]
LONG = ("length",)

COMPLETION_FEATURES = (
    completion("`prompt`: text", texts=("defgh",), finish_reasons=LONG, num_tokens=(3, 5)),
    completion("`prompt`: list of texts", ["abc", "mno"], texts=("defgh", "pqrst"), num_tokens=(6, 10)),
    completion("`prompt`: token ids", IDS, texts=("defgh",), num_tokens=(3, 5)),
    completion("`prompt`: list of token ids", [IDS, IDS[:1]], texts=("defgh", "bcdef"), num_tokens=(4, 10)),
    completion("an answer that ends by itself", "w", max_tokens=50, texts=("xyz",), finish_reasons=("stop",)),
    completion("`max_tokens` omitted", "k", max_tokens=None, texts=("lmnopqrstuvwxyz",), num_tokens=(1, 16)),
    completion("`max_tokens` beyond the context", max_tokens=10_000, refused=("max_tokens", "invalid_argument")),
    completion("`n`", n=3, texts=("defgh",) * 3, num_tokens=(3, 15), check=same_in_all_choices),
    completion("`n`, sampled", n=3, temperature=ALMOST_EVEN, seed=1, check=differing_choices),
    completion("`best_of`", best_of=2, refused=("best_of", "unsupported")),
    completion("`suffix`", suffix="xyz", refused=("suffix", "unsupported")),
    completion("`echo`", echo=True, texts=("abcdefgh",), num_tokens=(3, 5)),
    completion("`echo` of token ids", IDS, echo=True, texts=("abcdefgh",), num_tokens=(3, 5)),
    completion("`logprobs`", max_tokens=3, logprobs=2, texts=("def",), check=partial(_logprobs, 2)),
    completion("`logprobs`: 0", max_tokens=3, logprobs=0, texts=("def",), check=partial(_logprobs, 0)),
    completion("`echo` with `logprobs`", max_tokens=2, echo=True, logprobs=1, check=_echoed_logprobs),
    completion("`logprobs` with `stop`", stop="fg", logprobs=1, texts=("de",), check=_stopped_logprobs),
    completion("`logprobs` above 20", logprobs=21, refused=("logprobs", "invalid_argument")),
    completion("`stop`: text", stop="fg", texts=("de",), finish_reasons=("stop",)),
    completion("`stop`: list", stop=["zz", "g"], texts=("def",), finish_reasons=("stop",)),
    completion("`seed`", seed=7, n=2, temperature=1, check=differing_choices, max_tokens=20),
    completion("`temperature`: 0", temperature=0, texts=("defgh",)),
    completion("`temperature` out of range", temperature=101, refused=("temperature", "invalid_argument")),
    completion("`top_p`", top_p=0.01, temperature=ALMOST_EVEN, seed=3, extra_body={"top_k": 50}, texts=("defgh",)),
    completion("`presence_penalty`", "0", presence_penalty=1, texts=("01111",)),
    completion("`frequency_penalty`", "0", frequency_penalty=0.4, texts=("00111",)),
    completion("`logit_bias`", logit_bias={str(token_id("q")): 100}, texts=("qqqqq",)),
    completion("`logit_bias`: −100", logit_bias={str(token_id("e")): -100}, texts=("dfghi",)),
    completion("`user`", user="somebody", texts=("defgh",)),
    completion("`extra_body`: `top_k`", temperature=ALMOST_EVEN, seed=5, extra_body={"top_k": 1}, texts=("defgh",)),
    completion(
        "`extra_body`: `min_p`",
        temperature=ALMOST_EVEN,
        seed=5,
        max_tokens=30,
        extra_body={"min_p": 0.95, "ignore_eos": True, "stop_token_ids": [token_id("z"), 2]},
        check=only_top_two,
    ),
    completion("`extra_body`: `repetition_penalty`", "0", extra_body={"repetition_penalty": 1.2}, texts=("11111",)),
    completion("`extra_body`: `min_tokens`", ".", extra_body={"min_tokens": 3}, texts=("...",), num_tokens=(1, 4)),
    completion("`extra_body`: `ignore_eos`", "y", extra_body={"ignore_eos": True}, texts=("zabc",), num_tokens=(1, 5)),
    completion(
        "`extra_body`: `stop_token_ids`",
        extra_body={"stop_token_ids": [token_id("g")]},
        texts=("def",),
        finish_reasons=("stop",),
    ),
    completion("`extra_body`: an unknown field", extra_body={"no_such_field": 1}, texts=("defgh",)),
)
