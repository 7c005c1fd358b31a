"""A gRPC client in a process of its own, to be killed. argv: address. Prints a line for each event of one request."""

import sys

from pdserve.client.client import Client
from pdserve.client.inference import GenerateOptions


def main() -> None:
    with Client(sys.argv[1]) as client:
        for event in client.generate([97, 98], GenerateOptions(max_tokens=50)):
            sys.stdout.write(f"{type(event).__name__}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
