"""F01 and F03: what is in a block's key, and that it is the same everywhere."""

import os
import struct
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.block_keys import COMMON_GROUP, KeyChain, PrefixGroup, PrefixScope, xxh3_128
from pdserve.core.model_info import KvLayout

LAYOUT = KvLayout("bfloat16", block_size=4, num_layers=2, num_kv_heads=3, head_dim=64)
SCOPE = PrefixScope("0123abcd", LAYOUT, "torch-1")
GOLDEN = ["f5fb89920e15fe936173cc3b6a2ed94a", "355627834f3d2d0a8c9f446bdcbddb2b"]
BLOCK_SIZES = st.integers(1, 8)
TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def digests(token_ids: list[int], scope: PrefixScope = SCOPE, group: PrefixGroup = COMMON_GROUP) -> list[str]:
    chain = scope.key_chain(group)
    chain.extend(token_ids, len(token_ids) // scope.kv_layout.block_size)
    return [key.digest.hex() for key in chain.keys]


def test_golden_values() -> None:
    """A change of these makes every cache that outlives a process, and every worker of another version, worthless."""
    assert digests(list(range(9)), SCOPE, PrefixGroup("lora-é", "salt")) == GOLDEN


def test_a_key_is_the_digest_of_the_key_before_it_and_the_ids() -> None:
    chain = SCOPE.key_chain(PrefixGroup())
    chain.extend([1, 2, 3, 4, 5, 6, 7, 2**31], 2)
    first, second = chain.keys
    assert first.digest == xxh3_128(xxh3_128(SCOPE.root(PrefixGroup())) + struct.pack("<4I", 1, 2, 3, 4))
    assert second.token_bytes == struct.pack("<4I", 5, 6, 7, 2**31)
    assert second.digest == xxh3_128(first.digest + second.token_bytes)


@pytest.mark.parametrize("seed", ["1", "2"])
def test_keys_do_not_depend_on_the_process(seed: str) -> None:
    program = "from tests.core.test_block_keys import digests; print(*digests(list(range(40))))"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.split() == digests(list(range(40)))


def test_everything_that_changes_a_blocks_content_changes_its_key() -> None:
    others = [
        replace(SCOPE, model_fingerprint="0123abce"),
        replace(SCOPE, kernel_numerics="torch-2"),
        *(replace(SCOPE, kv_layout=replace(LAYOUT, **changed)) for changed in changed_layouts()),
    ]
    groups = [PrefixGroup(cache_salt="X"), PrefixGroup(adapter="X"), PrefixGroup("X", "X")]
    keys = [digests([1, 2, 3, 4], scope)[0] for scope in (SCOPE, *others) if scope.kv_layout.block_size == 4]
    keys += [digests([1, 2, 3, 4], SCOPE, group)[0] for group in groups]
    assert len(set(keys)) == len(keys)
    roots = [scope.root(PrefixGroup()) for scope in (SCOPE, *others)] + [SCOPE.root(group) for group in groups]
    assert len(set(roots)) == len(roots) == 3 + len(fields(KvLayout)) + 3


def changed_layouts() -> list[dict[str, object]]:
    values = {f.name: getattr(LAYOUT, f.name) for f in fields(LAYOUT)}
    return [{name: value + 1 if isinstance(value, int) else value + "x"} for name, value in values.items()]


@given(st.tuples(*[st.text(max_size=3)] * 4), st.tuples(*[st.text(max_size=3)] * 4))
def test_two_roots_are_equal_only_if_all_is_equal(
    first: tuple[str, str, str, str], second: tuple[str, str, str, str]
) -> None:
    def root(fingerprint: str, numerics: str, adapter: str, salt: str) -> bytes:
        return PrefixScope(fingerprint, LAYOUT, numerics).root(PrefixGroup(adapter, salt))

    assert (root(*first) == root(*second)) == (first == second)
    moved = (first[0] + first[1], "", first[2] + first[3], "")
    assert (root(*first) == root(*moved)) == (first == moved)


@given(BLOCK_SIZES, TOKEN_IDS, st.lists(st.integers(0, 40)))
def test_growing_bit_by_bit_gives_the_same_keys(block_size: int, token_ids: list[int], stops: list[int]) -> None:
    num_full = len(token_ids) // block_size
    whole, grown = KeyChain(b"root", block_size), KeyChain(b"root", block_size)
    whole.extend(token_ids, num_full)
    for stop in [*sorted(min(stop, num_full) for stop in stops), num_full]:
        grown.extend(token_ids[: stop * block_size], stop)
        assert grown.keys == whole.keys[:stop]
    with pytest.raises(ValueError, match="blocks of"):
        whole.extend(token_ids, num_full + 1)


@given(BLOCK_SIZES, TOKEN_IDS, TOKEN_IDS)
def test_keys_are_equal_for_as_long_as_the_tokens_are(block_size: int, first: list[int], second: list[int]) -> None:
    chains = []
    for token_ids in (first, second):
        chain = KeyChain(b"root", block_size)
        chain.extend(token_ids, len(token_ids) // block_size)
        chains.append(chain)
    for index, (one, other) in enumerate(zip(chains[0].keys, chains[1].keys, strict=False)):
        end = (index + 1) * block_size
        assert (one.digest == other.digest) == (first[:end] == second[:end])
