"""What a model must read and compute at the least, from its config alone. Measures nothing.

A decode step reads every matrix once, the head included, and each sequence's KV; of the embedding only a few rows.
Prefill multiplies every token with every matrix but the head, which only the last row needs; attention's own products
are left out, so that the floor is the matrices' alone.
"""

from dataclasses import dataclass

from pdserve.core.model_files import ModelConfig
from pdserve.core.model_info import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class ModelCosts:
    config: ModelConfig
    dtype: str

    @property
    def weight_bytes(self) -> int:
        """Read by one step, whatever its batch."""
        return DTYPE_BYTES[self.dtype] * (self._layer_parameters + self._head_parameters)

    @property
    def resident_weight_bytes(self) -> int:
        """Of the parameters as the checkpoint has them: an embedding beside a head that is not tied to it."""
        embedding = 0 if self.config.tie_word_embeddings else self._head_parameters
        return self.weight_bytes + DTYPE_BYTES[self.dtype] * embedding

    def kv_bytes(self, num_tokens: int) -> int:
        """Read for one sequence's row that sees `num_tokens` tokens; a layer with a window reads no more than that."""
        config = self.config
        seen = sum(min(num_tokens, attention.window or num_tokens) for attention in config.attention)
        return seen * 2 * config.num_kv_heads * config.head_dim * DTYPE_BYTES[self.dtype]

    def decode_bytes(self, batch: int, context: int) -> int:
        """Read by one decode step."""
        return self.weight_bytes + batch * self.kv_bytes(context)

    def prefill_flops(self, num_tokens: int) -> int:
        """Of one prompt's matrix products."""
        return 2 * (num_tokens * self._layer_parameters + self._head_parameters)

    def layer_matrices(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of one layer: qkv, attention's output, gate and up, down."""
        config = self.config
        query = config.num_heads * config.head_dim
        merged = query + 2 * config.num_kv_heads * config.head_dim
        hidden, wide = config.hidden_size, config.intermediate_size
        return (merged, hidden), (hidden, query), (2 * wide, hidden), (hidden, wide)

    @property
    def _layer_parameters(self) -> int:
        return self.config.num_layers * sum(rows * columns for rows, columns in self.layer_matrices())

    @property
    def _head_parameters(self) -> int:
        return self.config.vocab_size * self.config.hidden_size
