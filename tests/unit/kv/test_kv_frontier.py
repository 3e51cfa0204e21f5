"""Frontier slots and snapshots: exact accounts, where steps end, which snapshots stay and which make room."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies
from kv_stores import NumberStore, state_of

from hotset.errors import InternalError, RequestError
from hotset.kv.frontier import SPACING_BLOCKS, FrontierMemory
from hotset.kv.memory import CacheMemory

BLOCK = 4
SPACING = SPACING_BLOCKS * BLOCK


def make(num_blocks=400, num_frontiers=3, num_snapshots=8):
    store = NumberStore(num_blocks, num_frontiers)
    return CacheMemory(num_blocks, BLOCK, store, num_snapshots), store


def tokens_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, 9, length).astype(np.int32)


def advance(store, table, tokens, end):
    """One step of a fake executor."""
    table.cover(end)
    store.frontiers[table.frontier.slot] = state_of(tokens[:end])
    table.commit(end)


def fill(memory, store, tokens, room=1000, num_known=None):
    """Open a table, run its prompt in steps with that much room, and return the table and where its steps ended."""
    num_known = num_known or len(tokens)
    table = memory.open(tokens, num_known, len(tokens))
    assert table is not None
    ends = []
    while table.num_rows < num_known:
        advance(store, table, tokens, table.num_rows + table.limit(min(room, num_known - table.num_rows)))
        ends.append(table.num_rows)
    return table, ends


def snapshot_rows(memory):
    rows = []
    stack = [(memory.tree.root, 0)]
    while stack:
        node, end = stack.pop()
        if node.snapshot is not None:
            rows.append(end)
        stack += [(child, end + BLOCK) for child in node.children.values()]
    return sorted(rows)


def test_a_sequence_needs_a_slot_and_gives_it_back():
    """Bug class: a slot leaks with every cancelled request, until nothing can be admitted."""
    memory, _ = make(num_frontiers=2)
    tokens = tokens_of(20)
    tables = [memory.open(tokens, 20, 20) for _ in range(3)]
    assert tables[2] is None and {table.frontier.slot for table in tables[:2]} == {0, 1}
    memory.check_integrity(tables[:2])
    before = memory.accounts()
    assert memory.open(tokens, 20, 20) is None and memory.accounts() == before
    for table in tables[:2]:
        table.release()
        table.release()
    memory.check_integrity([])
    assert memory.frontiers.num_free_slots == 2


@pytest.mark.parametrize(
    ("length", "room", "ends"),
    [
        (3, 1000, [3]),
        (4, 1000, [4]),
        (5, 1000, [4, 5]),
        (30, 1000, [28, 30]),
        (30, 7, [7, 14, 21, 28, 30]),
        (33, 16, [16, 32, 33]),
        # The spacing is 32: the first step that gets past it ends at its last whole block, not at a crumb.
        (70, 31, [31, 60, 68, 70]),
        (100, 1000, [96, 100]),
        (100, 30, [30, 60, 90, 96, 100]),
        (100, 3, [*range(3, 31, 3), 32, *range(35, 63, 3), 64, *range(67, 95, 3), 96, 99, 100]),
    ],
)
def test_steps_end_where_a_snapshot_is_to_be_taken(length, room, ends):
    """Bug class: a boundary inside a step: the frontier at it is never seen. And: steps of a few tokens."""
    memory, store = make()
    table, seen = fill(memory, store, tokens_of(length), room)
    assert seen == ends
    assert (length - 1) // BLOCK * BLOCK in [0, *snapshot_rows(memory)]
    memory.check_integrity([table])


def test_without_snapshots_no_step_is_cut():
    memory, store = make(num_snapshots=0)
    assert fill(memory, store, tokens_of(100), 30)[1] == [30, 60, 90, 100]


def test_no_gap_is_longer_than_the_spacing_and_a_step():
    memory, store = make(num_snapshots=40)
    for room in (1, 5, 13, 32, 50):
        fill(memory, store, tokens_of(400), room)[0].release()
        rows = snapshot_rows(memory)
        assert max(np.diff([0, *rows])) < SPACING + max(room, BLOCK)
        # Between them only the border of the prompt and the last whole block of all.
        assert len(rows) <= 400 // SPACING + 2
        memory.forget()


def test_the_spacing_grows_so_that_a_prompt_leaves_half_of_the_pool():
    memory, store = make(num_snapshots=8)
    assert [memory.frontiers.spacing(n) for n in (1, 4 * SPACING, 4 * SPACING + 1, 16 * SPACING)] == [
        SPACING, SPACING, 2 * SPACING, 4 * SPACING,
    ]  # fmt: skip
    fill(memory, store, tokens_of(50, 1))[0].release()
    other = snapshot_rows(memory)
    fill(memory, store, tokens_of(1000), 16)[0].release()
    assert set(other) <= set(snapshot_rows(memory)), "a long prompt has pushed out another conversation"


def test_the_newest_snapshot_moves_on_and_stays_at_the_end():
    """Bug class: every block of an answer leaves a snapshot; or the end of an answer leaves none."""
    memory, store = make()
    tokens = tokens_of(31)
    table, _ = fill(memory, store, tokens, num_known=10)
    for end in range(11, 31):
        advance(store, table, tokens, end)
        assert snapshot_rows(memory) == sorted({8, end // BLOCK * BLOCK})
    table.release()
    found = memory.find(tokens, 22)
    assert (found.num_rows, found.num_found) == (8, 20)
    again = memory.open(tokens, 31, 31)
    assert again.num_rows == 28 and store.frontiers[again.frontier.slot] == state_of(tokens[:28])


def test_a_snapshot_that_another_request_resumed_from_does_not_move_on():
    memory, store = make()
    tokens = tokens_of(60)
    first, _ = fill(memory, store, tokens, num_known=10)
    for end in range(11, 25):
        advance(store, first, tokens, end)
    second = memory.open(tokens, 26, 60)
    assert second.num_rows == 24
    for end in range(25, 40):
        advance(store, first, tokens, end)
    assert snapshot_rows(memory) == [8, 24, 36]


def test_a_neighbours_moving_snapshot_stays_where_a_prompt_ends():
    """Bug class: the border of a prompt is not kept, because a neighbour's snapshot stood there and then moved on."""
    memory, store = make()
    tokens = tokens_of(60)
    first, second = memory.open(tokens, 60, 60), memory.open(tokens, 26, 60)
    advance(store, first, tokens, 24)
    assert second.limit(26) == 24
    advance(store, second, tokens, 24)
    advance(store, first, tokens, 28)
    assert snapshot_rows(memory) == [24, 28]


def test_the_end_of_what_the_tree_knows_becomes_a_place_to_resume():
    memory, store = make()
    shared = tokens_of(26)
    fill(memory, store, np.append(shared, tokens_of(14, 1)))[0].release()
    table, ends = fill(memory, store, np.append(shared, tokens_of(14, 2) + 9))
    assert ends == [24, 36, 40] and (table.num_found, table.num_recomputed) == (24, 24)
    assert memory.open(np.append(shared, 77).astype(np.int32), 27, 27).num_rows == 24


def test_a_tail_shorter_than_a_block_is_not_worth_a_cut():
    """Resuming inside a block: the border after it would save less than a block, so the step goes on to the end."""
    memory, store = make()
    tokens = tokens_of(11)
    table, _ = fill(memory, store, tokens[:6])
    node = memory.tree.insert_tail(table.path()[-1], tokens[4:6].tobytes(), int(table.blocks[1]))
    memory.frontiers.take(node, table.frontier.slot)
    table.release()
    again, ends = fill(memory, store, tokens)
    assert ends == [11] and store.blocks[again.blocks[1]] == store.blocks[node.block_id]
    assert again.blocks[1] != node.block_id, "the tail's own block is written"
    memory.check_integrity([again])


def test_room_is_made_by_what_saves_least_of_the_older_half():
    """Bug class: plain age: a chat of short turns pushes out the snapshots of its long beginning."""
    memory, store = make(num_snapshots=4)
    history = tokens_of(64)
    for turn in range(6):
        fill(memory, store, history)[0].release()
        history = np.append(history, tokens_of(5, turn)).astype(np.int32)
    rows = snapshot_rows(memory)
    assert len(rows) == 4 and rows[0] <= 64 and rows[-1] == (64 + 25 - 1) // BLOCK * BLOCK


def test_a_block_that_is_given_up_takes_its_snapshot_along():
    """Bug class: a snapshot of a forgotten node keeps its place for ever, or is served for other tokens."""
    memory, store = make(num_blocks=8)
    fill(memory, store, tokens_of(21))[0].release()
    assert memory.frontiers.num_used == 1
    other = tokens_of(32, 1)
    table, _ = fill(memory, store, other, room=4)
    memory.check_integrity([table])
    assert snapshot_rows(memory) == [28, 32]


def test_forgetting_gives_up_the_snapshots_of_live_tables_too():
    """Bug class: after a failed step, what it may have spoiled is served because a neighbour still holds the blocks."""
    memory, store = make()
    table, _ = fill(memory, store, tokens_of(30))
    memory.forget()
    assert memory.frontiers.num_used == 0 and memory.find(tokens_of(30), 29).num_rows == 0
    memory.check_integrity([table])
    table.release()
    memory.check_integrity([])


def test_a_copy_that_fails_loses_no_place(monkeypatch):
    memory, store = make(num_snapshots=1)
    tokens = tokens_of(9)
    table = memory.open(tokens, 9, 9)
    monkeypatch.setattr(store, "copy_frontier", lambda slot, out: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        advance(store, table, tokens, 8)
    table.release()
    memory.check_integrity([])


def test_only_a_table_that_can_take_the_frontier_over_adopts():
    """Bug class: adopting blocks of a neighbour and keeping one's own window."""
    memory, store = make()
    tokens = tokens_of(40)
    late = memory.open(tokens, 40, 40)
    early = memory.open(tokens, 40, 40)
    advance(store, early, tokens, 14)  # three whole blocks, and no step ended at one
    assert late.adopt(40) == 0 and late.num_found == 12
    advance(store, late, tokens, 6)
    assert late.num_recomputed == 6
    advance(store, early, tokens, 24)
    assert late.adopt(40) == 18 and late.num_rows == 24
    assert store.frontiers[late.frontier.slot] == state_of(tokens[:24])
    memory.check_integrity([late, early])


def test_a_step_that_is_not_committed_tears_the_frontier():
    memory, store = make()
    tokens = tokens_of(20)
    table, _ = fill(memory, store, tokens, num_known=10)
    assert not table.is_torn
    table.cover(12)
    assert table.is_torn
    table.release()
    memory.check_integrity([])
    plain = CacheMemory(8, BLOCK).open(tokens, 10, 20)
    plain.cover(12)
    assert not plain.is_torn


def test_a_private_table_takes_no_snapshot():
    memory, store = make()
    tokens = tokens_of(50)
    table = memory.open(tokens, 50, 50, reuse=False)
    for end in (*range(4, 50, 4), 50):
        assert table.limit(50 - table.num_rows) == 50 - table.num_rows
        advance(store, table, tokens, end)
    assert memory.frontiers.num_used == 0


@pytest.mark.parametrize("num_snapshots", [-1, 3])
def test_snapshots_for_a_model_without_a_frontier_are_refused(num_snapshots):
    with pytest.raises(RequestError, match=f"num_snapshots is {num_snapshots}"):
        FrontierMemory(None, num_snapshots, BLOCK)


@pytest.mark.parametrize(
    "damage",
    [
        lambda memory, table: memory.frontiers._slots.pop(),
        lambda memory, table: memory.frontiers._slots.append(table.frontier.slot),
        lambda memory, table: memory.frontiers._free.pop(),
        lambda memory, table: memory.frontiers._free.append(table.path()[1].snapshot.index),
        lambda memory, table: memory.frontiers._order.popitem(),
        lambda memory, table: setattr(table.path()[1], "snapshot", None),
        lambda memory, table: setattr(table.path()[0], "snapshot", table.path()[1].snapshot),
    ],
    ids=["slot lost", "slot used and free", "place lost", "place used twice", "unlisted", "unhung", "hung twice"],
)
def test_check_integrity_notices_damage(damage):
    """Bug class: a check that always passes."""
    memory, store = make()
    table, _ = fill(memory, store, tokens_of(10))
    memory.check_integrity([table])
    damage(memory, table)
    with pytest.raises(InternalError):
        memory.check_integrity([table])


def test_misuse_is_refused():
    memory, store = make(num_snapshots=1)
    table, _ = fill(memory, store, tokens_of(10))
    node = table.path()[1]
    with pytest.raises(InternalError, match="slot 0 was given back"):
        memory.frontiers.release(0)
        memory.frontiers.release(0)
    with pytest.raises(InternalError, match="no snapshot"):
        memory.frontiers.restore(table.path()[0], 0)
    with pytest.raises(InternalError, match="a snapshot already"):
        memory.frontiers.attach(node, 0)
    memory.frontiers.drop(node.snapshot)
    memory.frontiers.reserve()
    with pytest.raises(InternalError, match="no place"):
        memory.frontiers.reserve()


@settings(max_examples=100, deadline=None)
@given(
    length=strategies.integers(1, 300),
    rooms=strategies.lists(strategies.integers(1, 90), min_size=1, max_size=8),
    num_snapshots=strategies.integers(0, 12),
)
def test_any_rooms_end_and_leave_snapshots_of_the_right_state(length, rooms, num_snapshots):
    """Bug class: a step of no tokens, for ever; a snapshot of another position."""
    memory, store = make(num_snapshots=num_snapshots)
    tokens = tokens_of(length)
    table = memory.open(tokens, length, length)
    turn = 0
    while table.num_rows < length:
        count = table.limit(min(rooms[turn % len(rooms)], length - table.num_rows))
        assert count >= 1
        advance(store, table, tokens, table.num_rows + count)
        turn += 1
    table.release()
    memory.check_integrity([])
    for cut in range(1, length + 1):
        again = memory.open(tokens, cut, cut)
        assert again.num_rows < cut
        if again.num_rows:
            assert store.frontiers[again.frontier.slot] == state_of(tokens[: again.num_rows])
        again.release()


@pytest.mark.parametrize("num_blocks", [3, 4])
def test_a_tail_is_copied_while_there_is_room_and_taken_over_when_there_is_none(num_blocks):
    """Bug class: a restored session that fills the cache can never be continued, because its copy has no room."""
    memory, store = make(num_blocks=num_blocks)
    tokens = tokens_of(12)
    table, _ = fill(memory, store, tokens[:10])
    node = memory.tree.insert_tail(table.path()[-1], tokens[8:10].tobytes(), int(table.blocks[2]))
    memory.frontiers.take(node, table.frontier.slot)
    store.blocks[node.block_id] = 77
    table.release()
    again = memory.open(tokens, 12, 12)
    assert again.num_rows == 10 and store.blocks[again.blocks[2]] == 77
    assert store.frontiers[again.frontier.slot] == state_of(tokens[:10])
    memory.check_integrity([again])
    advance(store, again, tokens, 12)
    again.release()
    memory.check_integrity([])
    assert (memory.find(tokens, 10).tail is node) == (num_blocks == 4)
