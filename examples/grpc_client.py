"""The typed gRPC client from ordinary threads: stream, chat, logprobs, leaving early.

python examples/grpc_client.py 127.0.0.1:50051 --model NAME
"""

import argparse
import math
import sys
from collections.abc import Sequence

from pdserve.client import Client, Delta, Finished, GenerateOptions, Message, PdserveError, ServedModel


def show_models(models: Sequence[ServedModel]) -> None:
    for model in models:
        print(f"{model.info.name}: context of {model.info.context_length} tokens, ready: {model.ready}")


def stream(client: Client, model: str) -> None:
    """Print text as it comes, then where the time went."""
    for event in client.generate("Once upon a time", GenerateOptions(model, max_tokens=24, seed=1)):
        if isinstance(event, Delta):
            print(event.text, end="", flush=True)
        elif isinstance(event, Finished):
            usage, timings = event.usage, event.timings
            print(f"\n{usage.completion_tokens} tokens, {event.finish_reason.value}; TTFT {timings.ttft_s:.3f} s")


def chat(client: Client, model: str) -> None:
    """A conversation of two turns: the answer becomes part of the next question."""
    options = GenerateOptions(model, max_tokens=24, temperature=0.0)
    messages = [Message("user", "Name a colour.")]
    answer = client.complete(messages, options).text
    messages += [Message("assistant", answer), Message("user", "And another one?")]
    print(f"first: {answer!r}; then: {client.complete(messages, options).text!r}")


def logprobs(client: Client, model: str) -> None:
    """How likely each token was, the prompt's included."""
    options = GenerateOptions(model, max_tokens=4, temperature=0.0, logprobs=2, echo=True)
    choice = client.complete("The sky is", options).choices[0]
    if choice.prompt is not None:
        print(f"log P({choice.prompt.text!r}) = {sum(entry.logprob for entry in choice.prompt.logprobs):.2f}")
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        print(f"token {token_id}: {math.exp(entry.logprob):.1%}; best {entry.top}")


def leave_early(client: Client, model: str) -> None:
    """Closing the iterator cancels the request: its memory is free again at once."""
    events = client.generate("Count to a thousand:", GenerateOptions(model, max_tokens=200, ignore_eos=True))
    for event in events:
        if isinstance(event, Delta) and event.first_index >= 3:
            break
    events.close()
    print("left early")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051")
    parser.add_argument("--model", help="the first that is served, if not given")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    with Client(given.address) as client:
        try:
            models = client.list_models()
            show_models(models)
            for example in (stream, chat, logprobs, leave_early):
                example(client, given.model or models[0].info.name)
        except PdserveError as error:
            print(f"{error.reason.value}: {error.message}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
