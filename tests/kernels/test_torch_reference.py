"""The reference kernels against straightforward dense arithmetic."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_kernels.interface import RaggedBatch
from pdserve_kernels.torch_reference import TorchKernels

KERNELS = TorchKernels()
BLOCK, HEADS, KV_HEADS, DIM, LAYERS = 4, 6, 2, 8, 2


def dense_attention(query, key, value, window):
    """One sequence: query [n, H, D] at the end of key, value [T, K, D]; fp64."""
    shared = HEADS // KV_HEADS
    key, value = (x.double().repeat_interleave(shared, dim=1) for x in (key, value))
    scores = torch.einsum("nhd,thd->hnt", query.double(), key) * DIM**-0.5
    rows, columns = torch.arange(len(query)) + len(key) - len(query), torch.arange(len(key))
    age = rows.unsqueeze(1) - columns
    scores.masked_fill_((age < 0) | (age >= (window or len(key))), float("-inf"))
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

    def attend(self, window=None):
        step = KERNELS.begin(self.batch, self.pool)
        new = [torch.cat([kv[which, -n:] for kv, n in zip(self.kv, self.lengths, strict=True)]) for which in (0, 1)]
        padding = torch.full((self.batch.num_rows - len(new[0]), KV_HEADS, DIM), 7.0, dtype=new[0].dtype)
        step.write_kv(1, *(torch.cat((rows, padding)) for rows in new))
        return step.attend(1, self.query, self.query.shape[-1] ** -0.5, window)

    def expected(self, window=None):
        rows, at = [], 0
        for kv, length in zip(self.kv, self.lengths, strict=True):
            rows.append(dense_attention(self.query[at : at + length], kv[0], kv[1], window))
            at += length
        return torch.cat(rows)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.one_of(st.none(), st.integers(1, 45)),
    seed=st.integers(0, 1000),
)
def test_paged_attention_equals_dense(sizes, dtype, window, seed):
    paged = Paged([c for c, _ in sizes], [n for _, n in sizes], dtype, seed)
    out, expected = paged.attend(window), paged.expected(window)
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=1e-5, rtol=1e-5)
    assert out[len(expected) :].count_nonzero() == 0


WINDOWS = [None, 1, 3, BLOCK, 100, 256, 257, 512, 600, 699, 700, 10_000]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("queries", [(1, 1, 1), (700, 1, 300), (1, 260, 1)])
def test_paged_attention_over_several_tiles(queries, window, monkeypatch):
    monkeypatch.setattr("pdserve_kernels.tile_plan.SCORE_BYTES", HEADS * 256 * 4 * 100)
    monkeypatch.setattr("pdserve_kernels.tile_plan.GATHER_BYTES", KV_HEADS * 256 * DIM * 4 * 2)
    paged = Paged([700, 513, 512], queries, torch.float32, 0)
    expected = paged.expected(window)
    torch.testing.assert_close(paged.attend(window)[: len(expected)].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
def test_bits_of_a_row_do_not_depend_on_the_rows_it_is_grouped_with(window):
    """All rows of a sequence at once, and each one alone or beside a row of another sequence."""
    paged = Paged([700, 300], [700, 300], torch.bfloat16, 0)
    whole = paged.attend(window)
    tables = paged.batch.block_tables
    for position in (0, 1, 99, 255, 256, 257, 299, 511, 512, 513, 699):
        beside = min(position, 299)
        batch = RaggedBatch((1, 1), (beside + 1, position + 1), tables[::-1], 4)
        rows = torch.tensor([700 + beside, position, 0, 0])
        out = KERNELS.begin(batch, paged.pool).attend(1, paged.query[rows], DIM**-0.5, window)
        assert torch.equal(out[:2], whole[rows[:2]])


@pytest.mark.parametrize("window", [1, 100, 256, 300])
def test_tiles_that_no_row_sees_are_not_read(window):
    paged = Paged([1000, 600], [1, 1], torch.float32, 0)
    out = paged.attend(window)
    tables = [_without_head(t, n - window) for t, n in zip(paged.batch.block_tables, (1000, 600), strict=True)]
    batch = RaggedBatch((1, 1), (1000, 600), tuple(tables), 4)
    assert torch.equal(KERNELS.begin(batch, paged.pool).attend(1, paged.query, DIM**-0.5, window), out)


def _without_head(table, first_seen):
    """The block table with a block that is not there wherever a whole tile of 256 lies before `first_seen`."""
    num_gone = first_seen // 256 * 256 // BLOCK
    return (10**9,) * num_gone + table[num_gone:]


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


GATES = pytest.mark.parametrize(
    ("gated", "activation"),
    [(KERNELS.silu_mul, F.silu), (KERNELS.gelu_tanh_mul, partial(F.gelu, approximate="tanh"))],
    ids=["silu", "gelu_tanh"],
)


@GATES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_activations(gated, activation, dtype):
    gate_up = (torch.randn(50, 14) * 8).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    out = gated(gate_up)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), activation(gate) * up, atol=1e-5, rtol=8e-3 if dtype.itemsize == 2 else 1e-5
    )


@GATES
def test_an_activation_does_not_depend_on_its_place(gated, activation):
    row = torch.randn(2, 2 * 37) * 4
    alone = torch.cat([gated(row[:, [i, i + 37]]) for i in range(37)], dim=1)
    assert torch.equal(gated(row), alone)


@GATES
def test_extreme_gates_stay_finite(gated, activation):
    gate_up = torch.tensor([[-1e30, -200.0, 200.0, 1e30, 1.0, 1.0, 1.0, 1.0]])
    assert gated(gate_up).tolist() == [[0.0, 0.0, 200.0, pytest.approx(1e30)]]


def test_logits_of_bf16_weights_are_exact_to_fp32():
    x, weight = torch.randn(4, 64), torch.randn(50, 64, dtype=torch.bfloat16)
    logits = KERNELS.logits(weight)(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, atol=1e-5, rtol=1e-5)


def test_linear_takes_a_bias():
    x, weight, bias = torch.randn(4, 6), torch.randn(5, 6), torch.randn(5)
    torch.testing.assert_close(KERNELS.linear(weight, bias)(x), x @ weight.T + bias)
