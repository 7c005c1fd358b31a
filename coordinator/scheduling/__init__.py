"""When a sequence runs, and where: admission, queue, reservation, placement, retry, release. Sees no text."""
