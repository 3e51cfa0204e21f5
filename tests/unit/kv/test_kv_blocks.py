"""Block accounts: nothing lost, nothing handed out twice, and the check that would notice."""

import pytest

from hotset.errors import InternalError, RequestError
from hotset.kv.blocks import BlockPool


def test_reservation_is_refused_whole_and_changes_nothing():
    """Bug class: a refused admission keeps part of what it asked for, and capacity leaks away."""
    pool = BlockPool(4)
    assert pool.reserve(3)
    assert not pool.reserve(2)
    assert (pool.num_free, pool.num_reserved, pool.num_available) == (4, 3, 1)


def test_every_block_is_handed_out_once():
    """Bug class: two sequences write one block."""
    pool = BlockPool(5)
    assert pool.reserve(5)
    assert sorted(pool.take() for _ in range(5)) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used, pool.num_cached) == (0, 5, 0)


def test_take_without_reservation_is_our_fault():
    """Bug class: a sequence grows beyond its admission and takes the blocks of another."""
    with pytest.raises(InternalError, match="without a reservation"):
        BlockPool(2).take()


def test_shared_block_is_free_only_after_its_last_release():
    """Bug class: a block is reused while another sequence reads it."""
    pool = BlockPool(2)
    pool.reserve(1)
    block = pool.take()
    pool.retain(block)
    pool.release(block)
    assert pool.num_used == 1
    pool.release(block)
    assert (pool.num_free, pool.num_used) == (2, 0)


def test_kept_block_is_cached_then_given_up_oldest_first():
    """Bug class: eviction takes a block that was just released, or does not tell the tree."""
    pool, forgotten = BlockPool(2), []
    pool.on_evict(forgotten.append)
    pool.reserve(2)
    first, second = pool.take(), pool.take()
    for block in (first, second):
        pool.keep(block)
    pool.release(second)
    pool.release(first)
    assert (pool.num_free, pool.num_cached) == (0, 2)
    pool.reserve(1)
    assert pool.take() == second and forgotten == [second]
    pool.check_integrity([second])


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.append(0),
        lambda pool: pool._free.pop(),
        lambda pool: pool._references.__setitem__(0, 2),
        lambda pool: pool._cached.__setitem__(1, None),
        lambda pool: setattr(pool, "num_reserved", 9),
        lambda pool: pool._is_kept.__setitem__(3, 1),
    ],
    ids=["doubled", "lost", "miscounted", "used and cached", "over-reserved", "free and kept"],
)
def test_check_integrity_notices_damage(damage):
    """Bug class: a check that always passes."""
    pool = BlockPool(4)
    pool.reserve(2)
    held = [pool.take(), pool.take()]
    pool.check_integrity(held)
    damage(pool)
    with pytest.raises(InternalError):
        pool.check_integrity(held)


@pytest.mark.parametrize(
    "misuse",
    [lambda p, b: p.release(b), lambda p, b: p.retain(b), lambda p, b: p.keep(b), lambda p, b: p.unreserve(1)],
    ids=["double release", "share a free block", "keep a free block", "give back unreserved"],
)
def test_misuse_is_refused(misuse):
    """Bug class: a double free corrupts the accounts in silence."""
    pool = BlockPool(2)
    pool.reserve(1)
    block = pool.take()
    pool.release(block)
    with pytest.raises(InternalError):
        misuse(pool, block)


def test_empty_pool_is_refused():
    with pytest.raises(RequestError, match="0 blocks"):
        BlockPool(0)


def test_a_claimed_block_changes_hands_with_its_rows():
    """Bug class: the claimed block is handed out a second time, or still found in the tree."""
    pool, forgotten = BlockPool(2), []
    pool.on_evict(forgotten.append)
    pool.reserve(2)
    block = pool.take()
    pool.keep(block)
    pool.release(block)
    pool.claim(block)
    assert forgotten == [block] and not pool.is_kept(block) and (pool.num_used, pool.num_reserved) == (1, 0)
    pool.check_integrity([block])
    with pytest.raises(InternalError):
        pool.claim(block)
