"""While a model is loaded: file cache makes room, and a bound node that lost its room is an error, not a kill."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from machine_trees import FakeNode, FakeRoot, write_nodes

from hotset.errors import MachineError
from hotset.machine.room import CHECK_BYTES, LoadRoom
from hotset.units import MIB

TWO = [FakeNode(0, "0-3", 4096, "10 40"), FakeNode(1, "4-7", 2048, "40 10", file_cache_mib=512)]


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Ranges of files that the kernel is told to drop from its cache."""
    calls: list[tuple[int, int, int]] = []

    def advise(handle: int, offset: int, num_bytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        calls.append((handle, offset, num_bytes))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return calls


def test_files_stay_cached_while_there_is_room(machine: FakeRoot, dropped, capsys) -> None:
    """The next load is from memory; nothing is said."""
    write_nodes(machine, TWO)
    room = LoadRoom({0: 1000 * MIB, 1: 900 * MIB}, 1900 * MIB, is_bound=True, root=machine.path)
    for part in range(19):
        room.before()
        room.after(5, part * 100 * MIB, 100 * MIB)
    assert (dropped, room.is_releasing, capsys.readouterr().err) == ([], False, "")


def test_what_was_read_is_dropped_where_memory_is_short(machine: FakeRoot, dropped, capsys) -> None:
    """From the beginning of the file on, once each, said once; node 1 has 1,024 MiB free and 512 MiB of cache."""
    write_nodes(machine, TWO)
    room = LoadRoom({1: 1400 * MIB}, 1400 * MIB, is_bound=False, root=machine.path)
    room.after(5, 0, 10)
    room.before()
    room.after(5, 10, CHECK_BYTES)
    room.before()
    room.after(6, 0, 7)
    assert dropped == [(5, 0, 10), (5, 10, CHECK_BYTES), (6, 0, 7)]
    text = capsys.readouterr().err
    assert text.count("note: node 1 has 1.00 GiB free, 1.37 GiB are still to be placed there") == 1


def test_a_bound_node_that_filled_up_is_an_error(machine: FakeRoot, dropped) -> None:
    """MPOL_BIND beyond a node's memory is SIGKILL, so the load ends before it gets there."""
    write_nodes(machine, TWO)
    room = LoadRoom({1: 1500 * MIB}, 1500 * MIB, is_bound=True, root=machine.path)
    room.before()
    room.after(5, 0, 300 * MIB)
    machine.write("/sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 2097152 kB\nNode 1 MemFree: 102400 kB")
    with pytest.raises(
        MachineError, match=r"node 1 has 100\.00 MiB left while loading, 1\.17 GiB are still to be"
    ) as caught:
        room.before()
    assert caught.value.hint == "--numa prefer lets pages go to other nodes"
    LoadRoom({1: 1500 * MIB}, 1500 * MIB, is_bound=False, root=machine.path).before()


def test_the_nodes_are_looked_at_now_and_then(machine: FakeRoot, dropped, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each of a hundred thousand tensors."""
    import hotset.machine.room as room_module

    looks = []
    monkeypatch.setattr(room_module, "read_nodes", lambda root, online: looks.append(root) or ())
    room = LoadRoom({0: MIB}, 2 * CHECK_BYTES, is_bound=True, root=Path("/nowhere"))
    for _ in range(1000):
        room.before()
        room.after(5, 0, CHECK_BYTES // 500)
    assert len(looks) == 2
