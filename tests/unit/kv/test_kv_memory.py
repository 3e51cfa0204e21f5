"""Block tables and the prefix tree, against a memory that remembers what was written where."""

import numpy as np
import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from kv_stores import NumberStore, state_of

from hotset.errors import InternalError
from hotset.kv.memory import CacheMemory

BLOCK = 4


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def fill(memory: CacheMemory, prompt: np.ndarray, num_rows: int | None = None):
    """Open a table, write all rows of its prompt, and return it."""
    table = memory.open(prompt, len(prompt), num_rows or len(prompt))
    assert table is not None
    table.cover(len(prompt))
    table.commit(len(prompt))
    return table


def test_a_prompt_sent_again_reuses_all_full_blocks_but_never_its_last_token():
    """Bug class: 0 % hits on an identical request; or 100 %, and no logits to sample from."""
    memory = CacheMemory(8, block_tokens=BLOCK)
    for length in (1, 3, 4, 5, 8, 9, 11):
        prompt = np.arange(length, dtype=np.int32) + 100 * length
        fill(memory, prompt).release()
        table = memory.open(prompt, length, length)
        assert table.num_rows == (length - 1) // BLOCK * BLOCK
        table.release()
        memory.pool.evict_all()


def test_shared_blocks_are_the_same_ids_and_divergence_starts_a_new_branch():
    memory = CacheMemory(8, block_tokens=BLOCK)
    first = fill(memory, tokens(1, 2, 3, 4, 5, 6, 7, 8, 9))
    second = fill(memory, tokens(1, 2, 3, 4, 5, 6, 7, 0, 9))
    assert first.blocks[0] == second.blocks[0]
    assert not set(first.blocks[1:].tolist()) & set(second.blocks[1:].tolist())
    memory.check_integrity([first, second])


def test_a_prefix_is_found_by_what_precedes_it_too():
    """Bug class: a block matched by its own tokens only serves rows that were computed after another prefix."""
    memory = CacheMemory(8, block_tokens=BLOCK)
    fill(memory, tokens(1, 1, 1, 1, 5, 6, 7, 8, 9)).release()
    table = memory.open(tokens(2, 2, 2, 2, 5, 6, 7, 8, 9), 9, 9)
    assert table.num_rows == 0


def test_making_room_does_not_evict_the_prefix_about_to_be_used():
    """Bug class: saving or admitting evicts the very entry the incoming prompt needs."""
    memory = CacheMemory(4, block_tokens=BLOCK)
    wanted = tokens(*range(9))
    fill(memory, wanted).release()  # 2 cached blocks, the oldest ones
    fill(memory, tokens(*range(50, 55))).release()  # 1 cached block
    table = memory.open(wanted, 9, 16)  # needs all 4 blocks, 2 of them shared
    assert table.num_rows == 8
    table.cover(16)
    memory.check_integrity([table])


def test_the_end_of_a_prefix_is_given_up_before_its_beginning_and_old_before_new():
    """Bug class: the root of a long prefix is evicted first, which makes all its blocks unreachable."""
    memory = CacheMemory(4, block_tokens=BLOCK)
    old, new = tokens(*range(9)), tokens(*range(20, 25))
    fill(memory, old).release()
    fill(memory, new).release()
    assert (memory.pool.num_free, memory.pool.num_cached) == (1, 3)
    fill(memory, tokens(*range(40, 48)), 8)  # takes the free block and one cached block
    again = memory.open(old, 9, 9)
    assert again is None  # 2 blocks are in use and 2 cached: one of them could be shared, 2 more are needed
    assert [len(memory.find(prompt, len(prompt) - 1).path) for prompt in (old, new)] == [1, 1]


def test_refused_admission_leaves_everything_as_it_was():
    """Bug class: a refused request leaves references, or the wrong order of eviction, behind."""
    memory = CacheMemory(3, block_tokens=BLOCK)
    fill(memory, tokens(*range(9))).release()
    before = memory.pool.accounts()
    assert memory.open(tokens(*range(9)), 9, 13) is None
    assert memory.pool.accounts() == before
    memory.check_integrity([])
    table = fill(memory, tokens(*range(60, 67)))  # evicts one block: the end of the prefix
    assert len(memory.find(tokens(*range(9)), 9).path) == 1
    memory.check_integrity([table])


def test_two_sequences_that_computed_the_same_block_end_up_sharing_it():
    """Bug class: a duplicate keeps a block nobody can find; or a used block hangs under an unused one."""
    memory = CacheMemory(6, block_tokens=BLOCK)
    prompt = tokens(*range(9))
    first, second = memory.open(prompt, 9, 9), memory.open(prompt, 9, 9)
    for table in (first, second):
        table.cover(9)
    assert memory.pool.num_used == 6
    first.commit(9)
    second.commit(9)
    assert first.blocks[:2].tolist() == second.blocks[:2].tolist()
    assert memory.pool.num_used == 4
    first.release()
    memory.check_integrity([second])


@pytest.mark.parametrize("own_rows", [0, 2, 4, 6])
def test_adopt_skips_to_where_another_sequence_got(own_rows):
    """Bug class: eight requests with one system prompt compute it eight times."""
    memory = CacheMemory(8, block_tokens=BLOCK)
    prompt = tokens(*range(14))
    late = memory.open(prompt, 14, 14)
    if own_rows:
        late.cover(own_rows)
        late.commit(own_rows)
    early = fill(memory, prompt)
    assert late.adopt(14) == 12 - own_rows
    assert late.num_rows == 12 and late.blocks.tolist() == early.blocks[:3].tolist()
    memory.check_integrity([late, early])
    late.cover(14)
    assert late.adopt(14) == 0


def test_a_private_table_neither_uses_nor_leaves_cached_blocks():
    memory = CacheMemory(4, block_tokens=BLOCK)
    prompt = tokens(*range(9))
    fill(memory, prompt).release()
    table = memory.open(prompt, 9, 9, reuse=False)
    assert table.num_rows == 0
    table.cover(9)
    table.commit(9)
    table.release()
    assert len(memory.tree) <= 2
    memory.check_integrity([])


def test_tree_check_notices_damage():
    memory = CacheMemory(4, block_tokens=BLOCK)
    table = fill(memory, tokens(*range(9)))
    memory.tree.root.children.clear()
    with pytest.raises(InternalError):
        memory.check_integrity([table])


def test_a_tail_is_given_up_before_the_block_that_it_follows():
    """Bug class: a tail outlives its prefix, and its parent's id is used for other tokens."""
    memory = CacheMemory(4, block_tokens=BLOCK)
    table = fill(memory, tokens(*range(6)))
    parent, tail = table.path()[0], int(table.blocks[1])
    memory.tree.insert_tail(parent, tokens(4, 5).tobytes(), tail)
    table.release()
    memory.pool.reserve(3)
    for _ in range(3):
        memory.pool.take()
    assert memory.tree.root.children and not parent.tails
    memory.pool.retain(parent.block_id)
    with pytest.raises(InternalError, match="before the blocks that follow"):
        memory.tree.insert_tail(parent, b"1234", 3)
        memory.tree._forget(parent.block_id)


class Tables(RuleBasedStateMachine):
    """Random tables over a small pool. ``written`` plays the executor: what the rows of each block hold."""

    tables = Bundle("tables")
    num_frontiers = num_snapshots = 0

    def __init__(self):
        super().__init__()
        self.store = NumberStore(9, self.num_frontiers)
        self.memory = CacheMemory(9, BLOCK, self.store if self.num_frontiers else None, self.num_snapshots)
        self.written = np.full((9, BLOCK), -1, np.int32)
        self.live = []

    @rule(
        target=tables,
        prompt=strategies.lists(strategies.integers(0, 1), min_size=1, max_size=22),
        extra=strategies.integers(0, 9),
        reuse=strategies.booleans(),
    )
    def open(self, prompt, extra, reuse):
        sequence = np.array(prompt + [7] * extra, np.int32)
        before = self.memory.accounts()
        table = self.memory.open(sequence, len(prompt), len(sequence), reuse)
        if table is None:
            assert self.memory.accounts() == before
            return multiple()
        entry = {"table": table, "tokens": sequence, "num_prompt": len(prompt)}
        self.live.append(entry)
        return entry

    @rule(entry=tables, count=strategies.integers(1, 7))
    def write(self, entry, count):
        table = entry["table"]
        count = table.limit(min(count, len(entry["tokens"]) - table.num_rows))
        end = table.num_rows + count
        blocks = table.cover(end)
        for position in range(table.num_rows, end):
            self.written[blocks[position // BLOCK], position % BLOCK] = entry["tokens"][position]
        if self.num_frontiers:
            self.store.frontiers[table.frontier.slot] = state_of(entry["tokens"][:end])
        table.commit(end)

    @rule(entry=tables)
    def adopt(self, entry):
        if entry["table"].num_rows < entry["num_prompt"]:
            entry["table"].adopt(entry["num_prompt"])
            assert entry["table"].num_rows < entry["num_prompt"]

    @rule(entry=consumes(tables))
    def release(self, entry):
        entry["table"].release()
        self.live.remove(entry)

    @rule(entry=consumes(tables))
    def tear(self, entry):
        table = entry["table"]
        table.cover(len(entry["tokens"]))
        if self.num_frontiers:
            self.store.frontiers[table.frontier.slot] = 0
        self.release(entry)

    @rule()
    def evict(self):
        self.memory.pool.evict_all()

    @rule()
    def forget(self):
        self.memory.forget()

    @invariant()
    def accounts_are_whole(self):
        self.memory.check_integrity(entry["table"] for entry in self.live)

    @invariant()
    def every_table_reads_its_own_tokens(self):
        for entry in self.live:
            table = entry["table"]
            seen = self.written[table.blocks].reshape(-1)[: table.num_rows]
            assert seen.tolist() == entry["tokens"][: table.num_rows].tolist()
            if self.num_frontiers and table.num_rows:
                assert self.store.frontiers[table.frontier.slot] == state_of(entry["tokens"][: table.num_rows])


class FrontierTables(Tables):
    """The same for a model with a frontier, few slots and fewer snapshots than blocks."""

    num_frontiers, num_snapshots = 3, 4


TestTables = Tables.TestCase
TestFrontierTables = FrontierTables.TestCase
TestTables.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestFrontierTables.settings = TestTables.settings
