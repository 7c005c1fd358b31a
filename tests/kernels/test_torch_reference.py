"""The reference kernels against straightforward dense arithmetic."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_kernels.interface import RaggedBatch
from pdserve_kernels.torch_reference import TorchKernels

KERNELS = TorchKernels()
BLOCK, HEADS, KV_HEADS, DIM, LAYERS = 4, 6, 2, 8, 2


def dense_attention(query, key, value):
    """One sequence: query [n, H, D] at the end of key, value [T, K, D]; fp64."""
    shared = HEADS // KV_HEADS
    key, value = (x.double().repeat_interleave(shared, dim=1) for x in (key, value))
    scores = torch.einsum("nhd,thd->hnt", query.double(), key) * DIM**-0.5
    rows, columns = torch.arange(len(query)) + len(key) - len(query), torch.arange(len(key))
    scores.masked_fill_(columns > rows.unsqueeze(1), float("-inf"))
    return torch.einsum("hnt,thd->nhd", scores.softmax(-1), value).flatten(1)


class Paged:
    """Random sequences in a NaN-filled pool, their pages in random order."""

    def __init__(self, contexts, queries, dtype, seed):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = [min(n, c) for n, c in zip(queries, contexts, strict=True)]
        counts = [-(-c // BLOCK) for c in contexts]
        order = torch.randperm(sum(counts), generator=generator).tolist()
        tables = [tuple(order.pop() for _ in range(n)) for n in counts]
        num_rows = -(-sum(self.lengths) // 4) * 4
        self.batch = RaggedBatch(tuple(self.lengths), tuple(contexts), tuple(tables), num_rows)
        self.pool = torch.full((sum(counts), LAYERS, 2, KV_HEADS, BLOCK, DIM), float("nan"), dtype=dtype)
        self.kv = [torch.randn(2, c, KV_HEADS, DIM, generator=generator).to(dtype) for c in contexts]
        self.query = torch.randn(num_rows, HEADS, DIM, generator=generator) * 3
        for kv, table, length in zip(self.kv, tables, self.lengths, strict=True):
            for position in range(kv.shape[1] - length):
                self.pool[table[position // BLOCK], 1, :, :, position % BLOCK] = kv[:, position]

    def attend(self):
        step = KERNELS.begin(self.batch, self.pool)
        new = [torch.cat([kv[which, -n:] for kv, n in zip(self.kv, self.lengths, strict=True)]) for which in (0, 1)]
        padding = torch.full((self.batch.num_rows - len(new[0]), KV_HEADS, DIM), 7.0, dtype=new[0].dtype)
        step.write_kv(1, *(torch.cat((rows, padding)) for rows in new))
        return step.attend(1, self.query, self.query.shape[-1] ** -0.5, None)

    def expected(self):
        rows, at = [], 0
        for kv, length in zip(self.kv, self.lengths, strict=True):
            rows.append(dense_attention(self.query[at : at + length], kv[0], kv[1]))
            at += length
        return torch.cat(rows)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_paged_attention_equals_dense(sizes, dtype, seed):
    paged = Paged([c for c, _ in sizes], [n for _, n in sizes], dtype, seed)
    out, expected = paged.attend(), paged.expected()
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=1e-5, rtol=1e-5)
    assert out[len(expected) :].count_nonzero() == 0


@pytest.mark.parametrize("queries", [(1, 1, 1), (700, 1, 300), (1, 260, 1)])
def test_paged_attention_over_several_tiles(queries, monkeypatch):
    monkeypatch.setattr("pdserve_kernels.torch_attention.SCORE_BYTES", HEADS * 256 * 4 * 100)
    monkeypatch.setattr("pdserve_kernels.torch_attention.GATHER_BYTES", KV_HEADS * 256 * DIM * 4 * 2)
    paged = Paged([700, 513, 512], queries, torch.float32, 0)
    expected = paged.expected()
    torch.testing.assert_close(paged.attend()[: len(expected)].double(), expected, atol=1e-5, rtol=1e-5)


def test_writing_touches_its_own_slots_only():
    paged = Paged([10, 6], [3, 1], torch.float32, 0)
    before = paged.pool.clone()
    paged.attend()
    changed = (paged.pool != before) & ~(paged.pool.isnan() & before.isnan())
    assert changed[:, 0].count_nonzero() == 0
    assert changed.count_nonzero() == 4 * 2 * KV_HEADS * DIM


def test_rms_norm():
    x, weight = torch.randn(4, 32), torch.randn(32)
    expected = F.rms_norm(x.double(), (32,), weight.double(), 1e-5)
    torch.testing.assert_close(KERNELS.rms_norm(x, weight, 1e-5).double(), expected, atol=1e-6, rtol=1e-6)


def test_rope_turns_pairs_of_halves():
    x, angle = torch.randn(3, 2, 8), torch.rand(3, 4) * 6
    turned = KERNELS.rope(x, angle.cos(), angle.sin())
    as_complex = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(3, 1, 4), angle.unsqueeze(1))
    torch.testing.assert_close(turned, torch.cat((as_complex.real, as_complex.imag), -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul(dtype):
    gate_up = (torch.randn(5, 14) * 20).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    out = KERNELS.silu_mul(gate_up)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), F.silu(gate) * up, atol=1e-5, rtol=1e-2 if dtype.itemsize == 2 else 1e-5)


def test_silu_of_a_value_does_not_depend_on_its_place():
    row = torch.randn(2, 30)
    alone = torch.cat([KERNELS.silu_mul(row[:, [i, i + 15]]) for i in range(15)], dim=1)
    assert torch.equal(KERNELS.silu_mul(row), alone)


def test_extreme_gates_stay_finite():
    gate_up = torch.tensor([[-1e30, -200.0, 200.0, 1e30, 1.0, 1.0, 1.0, 1.0]])
    assert KERNELS.silu_mul(gate_up).tolist() == [[0.0, 0.0, 200.0, pytest.approx(1e30)]]


def test_logits_of_bf16_weights_are_exact_to_fp32():
    x, weight = torch.randn(4, 64), torch.randn(50, 64, dtype=torch.bfloat16)
    logits = KERNELS.logits(weight)(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, atol=1e-5, rtol=1e-5)


def test_linear_takes_a_bias():
    x, weight, bias = torch.randn(4, 6), torch.randn(5, 6), torch.randn(5)
    torch.testing.assert_close(KERNELS.linear(weight, bias)(x), x @ weight.T + bias)
