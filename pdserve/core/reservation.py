"""The arithmetic of KV blocks that coordinator and workers must agree on."""


def blocks_for_tokens(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens' KV: ⌈num_tokens / block_size⌉."""
    return -(-num_tokens // block_size)
