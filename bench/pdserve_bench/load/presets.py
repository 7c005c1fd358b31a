"""Ready mixes, sized for a model of about 135 million parameters on two CPU cores. Measures nothing."""

from collections.abc import Mapping

from pdserve_bench.load.arrivals import Arrivals
from pdserve_bench.load.mixes import Lengths, Mix, Stream

CHAT = Mix(
    name="chat",
    about="People chatting with an assistant: short prompts, one of a few system prompts before each, answers of about "
    "a hundred tokens that take most of the work.",
    streams=(
        Stream(
            "interactive",
            Arrivals("poisson", 0.8),
            prompt=Lengths.lognormal(median=192, p90=384, low=128, high=1024),
            output=Lengths.lognormal(median=96, p90=192, low=16, high=384),
            shared_prefix_tokens=96,
            num_prefixes=4,
        ),
    ),
)

RAG = Mix(
    name="rag",
    about="Questions about retrieved documents: prompts of 1,000 to 2,000 tokens that begin with one of eight contexts "
    "of 768, and short answers. What a prefix cache is worth shows here.",
    streams=(
        Stream(
            "rag",
            Arrivals("poisson", 0.2),
            prompt=Lengths.uniform(1000, 2000),
            output=Lengths.lognormal(median=40, p90=80, low=8, high=128),
            shared_prefix_tokens=768,
            num_prefixes=8,
        ),
    ),
)

BATCH_SUMMARISE = Mix(
    name="batch-summarise",
    about="A job that has documents of 1,500 to 3,000 tokens summarised at a steady pace: nearly all of it is prefill, "
    "and nobody waits for a first token.",
    streams=(
        Stream(
            "batch",
            Arrivals("constant", 0.12),
            prompt=Lengths.uniform(1500, 3000),
            output=Lengths.uniform(50, 100),
        ),
    ),
)

MIXED = Mix(
    name="mixed",
    about="The load that tells whether to disaggregate: documents of 1,500 tokens with short answers arrive over "
    "running streams of people who chat, and each document's prefill may stall them. No prompt shares a prefix.",
    streams=(
        Stream(
            "interactive",
            Arrivals("poisson", 0.8),
            prompt=Lengths.uniform(64, 192),
            output=Lengths.uniform(64, 128),
        ),
        Stream(
            "document",
            Arrivals("poisson", 0.12),
            prompt=Lengths.fixed(1500),
            output=Lengths.fixed(32),
        ),
    ),
)

BURST = Mix(
    name="burst",
    about="Chat without shared prompts whose arrivals come in bursts: gaps between them vary twice as much as with "
    "Poisson arrivals of the same rate, so that queues form at a load that is easy on average.",
    streams=(
        Stream(
            "interactive",
            Arrivals("gamma", 0.8, burstiness=0.25),
            prompt=Lengths.uniform(64, 192),
            output=Lengths.uniform(64, 128),
        ),
    ),
)

PRESETS: Mapping[str, Mix] = {mix.name: mix for mix in (CHAT, RAG, BATCH_SUMMARISE, MIXED, BURST)}


def preset(name: str) -> Mix:
    """Raises: ValueError: there is none of that name."""
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r} (known: {', '.join(PRESETS)})")
    return PRESETS[name]


def check_fits(mix: Mix, context_length: int) -> None:
    """Raises: ValueError: a request of the mix may be longer, with its output, than `context_length` tokens."""
    for stream in mix.streams:
        if stream.longest > context_length:
            raise ValueError(
                f"{mix.name}: class {stream.request_class!r} has requests of up to {stream.prompt.high} + "
                f"{stream.output.high} tokens, more than the context of {context_length}"
            )
