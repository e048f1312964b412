"""The allocator's rules one by one: what is shared, cached, evicted, copied."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from cupyattn import BlockAllocator, Copy, OutOfBlocksError


def ids(sequence):
    return sequence.block_ids.tolist()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_one_token_is_always_computed(length):
    """num_cached_tokens is a multiple of the block size below the length."""
    allocator = BlockAllocator(8, 4, prefix_caching=True)
    tokens = list(range(length))
    first, second = allocator.add(tokens), allocator.add(tokens)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == allocator.find(tokens) == (length - 1) // 4 * 4
    assert second.fork().num_cached_tokens == second.num_cached_tokens


def test_states_of_blocks_and_what_lives():
    allocator = BlockAllocator(5, 4, prefix_caching=True)
    first, second = allocator.add(range(9)), allocator.add(range(9))
    held = allocator.allocate()
    assert allocator.sequences == (first, second)
    assert first in allocator and "first" not in allocator
    assert BlockAllocator(5, 4).add([1]) not in allocator
    first.free()
    assert (first.is_freed, second.is_freed) == (True, False)
    assert first not in allocator and allocator.sequences == (second,)
    second.free()
    assert [allocator.state(block) for block in range(5)] == ["cached"] * 2 + ["free"] * 2 + [
        "used"
    ]
    assert held == 4
    for block in (-1, 5, None):
        with pytest.raises(ValueError, match="the pool's blocks are 0 to 4"):
            allocator.state(block)


def test_what_was_found_is_counted():
    allocator = BlockAllocator(5, 4, prefix_caching=True)
    assert (allocator.num_added_tokens, allocator.num_found_tokens) == (0, 0)
    sequences = [allocator.add(range(9)) for _ in range(2)]
    assert (allocator.num_added_tokens, allocator.num_found_tokens) == (18, 8)
    with pytest.raises(OutOfBlocksError):
        allocator.add(range(100))
    for sequence in sequences:
        sequence.free()
    assert (allocator.num_added_tokens, allocator.num_found_tokens) == (18, 8)


def test_a_prompt_in_parts_is_counted_as_it_is_said():
    allocator = BlockAllocator(8, 4, prefix_caching=True)
    allocator.add(range(9), counted=20)
    assert (allocator.num_added_tokens, allocator.num_found_tokens) == (20, 0)
    assert allocator.add(range(9), counted=0).num_cached_tokens == 8
    assert (allocator.num_added_tokens, allocator.num_found_tokens) == (20, 0)
    assert allocator.add(range(12), counted=30).num_cached_tokens == 8
    assert (allocator.num_added_tokens, allocator.num_found_tokens) == (50, 8)
    with pytest.raises(ValueError, match="counted = -1; allowed is 0 or more"):
        allocator.add([1], counted=-1)
    with pytest.raises(TypeError, match=r"counted = 1\.5; it is an integer"):
        allocator.add([1], counted=1.5)


def test_equal_blocks_after_different_prefixes_differ():
    allocator = BlockAllocator(8, 2, prefix_caching=True)
    allocator.add([1, 1, 7, 7])
    other = allocator.add([2, 2, 7, 7, 3])
    assert other.num_cached_tokens == 0


def test_tokens_whose_hashes_agree_are_compared():
    """hash(-1) == hash(-2): the tokens collide in a dict of hashes, and in Python's own."""
    assert hash((-1,)) == hash((-2,))
    allocator = BlockAllocator(8, 1, prefix_caching=True)
    allocator.add([-1, 5])
    assert allocator.find([-2, 5]) == 0
    assert allocator.find([-1, 5]) == 1


def test_without_prefix_caching_nothing_is_found():
    allocator = BlockAllocator(8, 2)
    allocator.add([1, 2, 3, 4]).free()
    assert allocator.find([1, 2, 3, 4]) == 0
    assert allocator.add([1, 2, 3, 4]).num_cached_tokens == 0
    assert (allocator.num_free, allocator.num_cached) == (6, 0)


def test_blocks_filled_by_append_are_shared():
    allocator = BlockAllocator(8, 2, prefix_caching=True)
    first = allocator.add([1])
    for token in (2, 3, 4):
        first.append([token])
    second = allocator.add([1, 2, 3, 4, 5])
    assert ids(second)[:2] == ids(first)
    assert [allocator.ref_count(block) for block in ids(second)] == [2, 2, 1]


def test_the_least_recently_used_is_evicted_first_and_ends_before_beginnings():
    allocator = BlockAllocator(6, 1, prefix_caching=True)
    old, new = allocator.add([1, 2, 3]), allocator.add([4, 5, 6])
    old.free()
    new.free()
    assert allocator.find([1, 2, 3, 0]) == 3
    held = [allocator.allocate()]
    assert allocator.find([1, 2, 3, 0]) == 2
    again = allocator.add([1])  # a hit makes nothing: one token is computed in a new block
    assert allocator.find([1, 2, 3, 0]) == 1
    again.free()
    held += [allocator.allocate() for _ in range(2)]
    assert allocator.find([1, 2, 3, 0]) == 0
    assert allocator.find([4, 5, 6, 0]) == 3
    assert (allocator.num_free, allocator.num_used, allocator.num_cached) == (0, 3, 3)


def test_a_hit_is_used_recently():
    allocator = BlockAllocator(4, 1, prefix_caching=True)
    for token in (1, 2, 3):
        allocator.add([token, 0]).free()
    allocator.add([1, 0]).free()
    for _ in range(2):
        allocator.allocate()
    assert [allocator.find([token, 0]) for token in (1, 2, 3)] == [1, 0, 0]


def test_a_cached_prefix_is_not_evicted_for_its_own_end():
    allocator = BlockAllocator(3, 2, prefix_caching=True)
    allocator.add([1, 2, 3, 4]).free()
    sequence = allocator.add([1, 2, 3, 4, 5])
    assert sequence.num_cached_tokens == 4
    with pytest.raises(OutOfBlocksError):
        sequence.append([6, 7])
    sequence.free()
    with pytest.raises(OutOfBlocksError, match=r"4 blocks .* 1 are free or cached besides 2 of"):
        allocator.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])


def test_add_leaves_the_watermark():
    allocator = BlockAllocator(4, 2, watermark=2)
    sequence = allocator.add([1, 2])
    with pytest.raises(OutOfBlocksError, match="beside a watermark of 2"):
        allocator.add([1, 2, 3, 4])
    sequence.append([3, 4, 5, 6, 7])  # which append may take
    assert allocator.num_free == 0


def test_a_tail_that_is_shared_is_copied_once():
    allocator = BlockAllocator(8, 4)
    first = allocator.add([1, 2, 3, 4, 5])
    second, third = first.fork(), first.fork()
    assert second.append([]) == ()
    assert second.append([6]) == (Copy(1, 2),)
    assert second.append([7]) == ()
    assert first.append([8, 9, 10, 11]) == (Copy(1, 3),)
    assert third.append([12]) == ()
    assert [ids(each) for each in (first, second, third)] == [[0, 3, 4], [0, 2], [0, 1]]


def test_a_whole_tail_is_not_copied():
    allocator = BlockAllocator(8, 4)
    first = allocator.add([1, 2, 3, 4])
    assert first.fork().append([5]) == ()


def test_what_is_cut_is_found_no_longer():
    allocator = BlockAllocator(8, 2, prefix_caching=True)
    sequence = allocator.add([1, 2, 3, 4, 5, 6])
    sharer = allocator.add([1, 2, 3, 4, 5, 6, 7])
    sequence.truncate(3)
    assert allocator.find([1, 2, 3, 4, 5, 6, 7]) == 2
    assert sequence.append([4]) == (Copy(1, 4),), "its sharer still reads block 1"
    assert allocator.find([1, 2, 3, 4, 5]) == 4
    sharer.free()
    allocator.check()


def test_a_kept_part_that_nobody_shares_is_written_in_place():
    allocator = BlockAllocator(8, 4, prefix_caching=True)
    sequence = allocator.add([1, 2, 3, 4])
    sequence.truncate(2)
    assert allocator.find([1, 2, 3, 4, 5]) == 0
    assert sequence.append([7, 8]) == ()
    assert allocator.find([1, 2, 7, 8, 5]) == 4
    assert (ids(sequence), sequence.num_cached_tokens) == ([0], 0)


def test_truncate_leaves_whole_cached_blocks_counted():
    allocator = BlockAllocator(8, 2, prefix_caching=True)
    allocator.add([1, 2, 3, 4])
    sequence = allocator.add([1, 2, 3, 4, 5])
    sequence.truncate(3)
    assert (len(sequence), sequence.num_cached_tokens) == (3, 2)


def test_blocks_behind_a_window_return():
    allocator = BlockAllocator(8, 2, prefix_caching=True)
    sequence = allocator.add(range(7))
    assert sequence.evict_before(5) == 2
    assert sequence.evict_before(5) == 0
    assert ids(sequence) == [-1, -1, 2, 3]
    assert (allocator.num_free, allocator.num_cached) == (4, 2)
    assert allocator.find(range(7)) == 6
    assert ids(sequence.fork()) == [-1, -1, 2, 3]
    for length in (1, 2, 3, 4):  # at the ends of blocks too: what the next token sees is gone
        with pytest.raises(ValueError, match=f"length {length}, whose last block is evicted"):
            sequence.truncate(length)
        assert (len(sequence), ids(sequence)) == (7, [-1, -1, 2, 3])
    sequence.truncate(6)
    assert ids(sequence) == [-1, -1, 2]
    sequence.truncate(5)
    sequence.truncate(0)
    assert ids(sequence) == []


def test_a_lost_prefix_that_is_computed_again_is_whole_again():
    """A later block waits in the index for the earlier ones that a window has evicted."""
    allocator = BlockAllocator(4, 1, prefix_caching=True)
    sequence = allocator.add([1, 2, 3])
    sequence.evict_before(2)
    held = [allocator.allocate() for _ in range(3)]
    assert allocator.find([1, 2, 3, 4]) == 0
    for block in held:
        allocator.free(block)
    again = allocator.add([1, 2])
    assert again.num_cached_tokens == 0
    assert allocator.find([1, 2, 3, 4]) == 3


def test_swapping_moves_blocks():
    allocator = BlockAllocator(4, 2, num_host_blocks=2, prefix_caching=True)
    sequence = allocator.add([1, 2, 3])
    assert sequence.swap_out() == (Copy(0, 0), Copy(1, 1))
    assert sequence.is_swapped
    assert (len(sequence), allocator.num_used, allocator.num_free_host) == (3, 0, 0)
    with pytest.raises(OutOfBlocksError, match="of 2 host blocks 0 are free"):
        allocator.add([5]).swap_out()
    held = [allocator.allocate() for _ in range(2)]
    with pytest.raises(OutOfBlocksError, match="2 blocks are needed"):
        sequence.swap_in()
    allocator.free(held[0])
    assert [source for source, _ in sequence.swap_in()] == [0, 1]
    assert (sequence.is_swapped, allocator.num_free_host) == (False, 2)
    assert allocator.find([1, 2, 3]) == 2, "found again, though its block was evicted meanwhile"


def test_a_swapped_sequence_can_be_freed():
    allocator = BlockAllocator(4, 2, num_host_blocks=2)
    sequence = allocator.add([1, 2, 3])
    sequence.swap_out()
    sequence.free()
    assert (allocator.num_free, allocator.num_free_host) == (4, 2)


def test_an_empty_sequence():
    allocator = BlockAllocator(2, 4, prefix_caching=True)
    sequence = allocator.add([])
    assert (len(sequence), ids(sequence), allocator.num_used) == (0, [], 0)
    assert sequence.append([1]) == ()
    assert ids(sequence) == [0]


def test_arrays_of_tokens():
    allocator = BlockAllocator(4, 2, prefix_caching=True)
    allocator.add(np.array([1, 2, 3], np.int32))
    assert allocator.add(np.array([1, 2, 3], np.uint8)).num_cached_tokens == 2
    assert allocator.add(array("q", [1, 2, 3])).num_cached_tokens == 2


def test_block_ids_fill_a_row_of_a_table():
    table = np.full((1, 4), -1, np.int32)
    sequence = BlockAllocator(8, 2).add(range(5))
    row = sequence.block_ids
    table[0, : len(row)] = row
    assert table.tolist() == [[0, 1, 2, -1]]
    row[0] = 9
    assert ids(sequence) == [0, 1, 2], "what is given out is a copy"


def test_blocks_of_any_use():
    allocator = BlockAllocator(2, 4)
    first, second = allocator.allocate(), allocator.allocate()
    assert {first, second} == {0, 1}
    assert allocator.ref_count(first) == 1
    with pytest.raises(OutOfBlocksError):
        allocator.allocate()
    allocator.free(np.int64(first))
    assert type(allocator.allocate()) is int
    allocator.check()


def test_unused_slots_are_counted_once():
    allocator = BlockAllocator(8, 4, prefix_caching=True)
    sequence = allocator.add(range(6))
    assert allocator.num_unused_slots == 2
    other = sequence.fork()
    assert allocator.num_unused_slots == 2
    other.append([9, 9])
    assert allocator.num_unused_slots == 2
    sequence.truncate(2)  # its first block is full for the other
    assert allocator.num_unused_slots == 0


def test_it_says_what_it_is():
    allocator = BlockAllocator(4, 2, num_host_blocks=2)
    sequence = allocator.add([1, 2, 3])
    assert repr(allocator) == "<BlockAllocator of 4 blocks of 2 tokens: 2 free, 2 used, 0 cached>"
    assert repr(sequence) == "<Sequence of 3 tokens in 2 blocks>"
    sequence.swap_out()
    assert repr(sequence) == "<Sequence of 3 tokens in 2 blocks, swapped out>"
