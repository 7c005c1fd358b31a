"""A receiver in a process of its own, for tests that freeze or kill it. Prints its port; ends with its stdin."""

import sys

from kv_transfer.receiver import KvReceiver
from pdserve.serving.settings import TransferSettings
from tests.kv_transfer.support import FINGERPRINT, RECEIVER, CheckingHost, MemoryStore


def main() -> None:
    receiver = KvReceiver(RECEIVER, FINGERPRINT, MemoryStore(16), CheckingHost(16), TransferSettings(), with_shm=True)
    sys.stdout.write(f"{receiver.start('127.0.0.1', 0)}\n")
    sys.stdout.flush()
    sys.stdin.read()
    receiver.close()


if __name__ == "__main__":
    main()
