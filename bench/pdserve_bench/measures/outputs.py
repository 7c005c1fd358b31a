"""Whether servers answered rightly: a sample of outputs against those of an idle server. Measures no time."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest

from pdserve_bench.load.client import LoadClient, RequestError
from pdserve_bench.load.plan import PlannedRequest
from pdserve_bench.load.records import RequestRecord
from pdserve_bench.measures.summarise import completed_of


def pick(records: Sequence[RequestRecord], count: int, seed: int) -> list[RequestRecord]:
    """Up to `count` completed requests by rising number, as evenly from all classes as these allow.

    Raises:
        ValueError: `count` is negative.
    """
    if count < 0:
        raise ValueError(f"cannot pick {count} requests")
    classes: dict[str, list[RequestRecord]] = {}
    for record in completed_of(records):
        classes.setdefault(record.request_class, []).append(record)
    rng = random.Random(seed)
    shuffled = [rng.sample(classes[name], len(classes[name])) for name in sorted(classes)]
    in_turn = [record for record in chain.from_iterable(zip_longest(*shuffled)) if record is not None]
    return sorted(in_turn[:count], key=lambda record: record.number)


async def reference_outputs(client: LoadClient, requests: Sequence[PlannedRequest]) -> dict[int, str]:
    """Outputs by request number, asked for one after the other; the server must be idle but for them.

    Raises:
        RequestError: one failed or came without tokens, so that there is no reference.
    """
    return {request.number: await _reference(client, request) for request in requests}


async def _reference(client: LoadClient, request: PlannedRequest) -> str:
    counts: list[int] = []
    answer = await client.send(replace(request, cancel_after_tokens=None), counts.append)
    if sum(counts) == 0:
        raise RequestError(f"the reference answer to request {request.number} has no tokens")
    return answer.output


def wrong_numbers(records: Sequence[RequestRecord], reference: Mapping[int, str]) -> frozenset[int]:
    """Of the completed requests that `reference` knows, those whose output is not exactly the one there."""
    return frozenset(
        record.number
        for record in completed_of(records)
        if record.number in reference and record.output != reference[record.number]
    )


def first_difference(output: str, reference: str) -> int | None:
    """The first character where they part, the end of the shorter one included; None if they are equal."""
    if output == reference:
        return None
    pairs = enumerate(zip(output, reference, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(output), len(reference)))
