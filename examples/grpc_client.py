"""The typed gRPC client from ordinary threads: stream, chat, logprobs, leaving early.

python examples/grpc_client.py 127.0.0.1:50051
"""

import math
import sys

from pdserve.client import Client, Delta, Finished, GenerateOptions, Message, PdserveError

ADDRESS = "127.0.0.1:50051"


def show_models(client: Client) -> None:
    for model in client.list_models():
        print(f"{model.info.name}: context of {model.info.context_length} tokens, ready: {model.ready}")


def stream(client: Client) -> None:
    """Print text as it comes, then where the time went."""
    for event in client.generate("Once upon a time", GenerateOptions(max_tokens=24, seed=1)):
        if isinstance(event, Delta):
            print(event.text, end="", flush=True)
        elif isinstance(event, Finished):
            usage, timings = event.usage, event.timings
            print(f"\n{usage.completion_tokens} tokens, {event.finish_reason.value}; TTFT {timings.ttft_s:.3f} s")


def chat(client: Client) -> None:
    """A conversation of two turns: the answer becomes part of the next question."""
    options = GenerateOptions(max_tokens=24, temperature=0.0)
    messages = [Message("user", "Name a colour.")]
    answer = client.complete(messages, options).text
    messages += [Message("assistant", answer), Message("user", "And another one?")]
    print(f"first: {answer!r}; then: {client.complete(messages, options).text!r}")


def logprobs(client: Client) -> None:
    """How likely each token was, the prompt's included."""
    options = GenerateOptions(max_tokens=4, temperature=0.0, logprobs=2, echo=True)
    choice = client.complete("The sky is", options).choices[0]
    if choice.prompt is not None:
        print(f"log P({choice.prompt.text!r}) = {sum(entry.logprob for entry in choice.prompt.logprobs):.2f}")
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        print(f"token {token_id}: {math.exp(entry.logprob):.1%}; best {entry.top}")


def leave_early(client: Client) -> None:
    """Closing the iterator cancels the request: its memory is free again at once."""
    events = client.generate("Count to a thousand:", GenerateOptions(max_tokens=200, ignore_eos=True))
    for event in events:
        if isinstance(event, Delta) and event.first_index >= 3:
            break
    events.close()
    print("left early")


def main() -> int:
    address = sys.argv[1] if len(sys.argv) > 1 else ADDRESS
    with Client(address) as client:
        try:
            for example in (show_models, stream, chat, logprobs, leave_early):
                example(client)
        except PdserveError as error:
            print(f"{error.reason.value}: {error.message}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
