"""What each choice of a request needs to become text, made before anything is queued. Takes no tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.generation.inputs import GenerationInput
from coordinator.generation.served_model import TextModel
from coordinator.generation.validation import CheckedOptions
from coordinator.sequences import SequenceRequest
from coordinator.text.output_text import OutputText, prompt_token_texts
from coordinator.text.prompts import clean_text
from coordinator.text.tool_calls import tool_call_parser


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """`prompt_texts`: of each prompt token, to be echoed; None without `echo`."""

    request: SequenceRequest
    text: OutputText
    prompt_texts: tuple[str, ...] | None


def choice_outputs(
    request: GenerationInput, options: CheckedOptions, sequences: Sequence[SequenceRequest], model: TextModel
) -> list[ChoiceOutput]:
    """One for each of `sequences`, which are numbered prompt by prompt.

    Raises:
        PdserveError: the request's tools cannot be read, as `tool_call_parser`.
    """
    stop = [clean_text(text) for text in options.stop]
    outputs: list[ChoiceOutput] = []
    for index, prompt in enumerate(request.prompts):
        of_prompt = sequences[index * options.num_choices :][: options.num_choices]
        token_ids = of_prompt[0].token_ids
        prompt_texts = prompt_token_texts(model.tokenizer, token_ids) if options.echo else None
        for sequence in of_prompt:
            parser = tool_call_parser(prompt, model)
            text = OutputText(model.tokenizer, token_ids, sequence.sampling, model.eos_token_ids, stop, parser)
            outputs.append(ChoiceOutput(sequence, text, prompt_texts))
    return outputs
