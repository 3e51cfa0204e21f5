"""What hotset takes for granted of the kernel, held against this one."""

from __future__ import annotations

import errno
import mmap
import os
import signal

import pages
from answers import on_cpus

NUM_PAGES = 64


def _anonymous() -> mmap.mmap:
    return mmap.mmap(-1, NUM_PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _touch(region: mmap.mmap) -> None:
    for offset in range(0, len(region), mmap.PAGESIZE):
        region[offset] = 1


def test_first_touch_places_a_page_on_the_node_of_the_cpu(guest) -> None:
    """hotset's threads place their own rows by being the first to write them."""
    for node in guest.cpu_nodes:
        region = _anonymous()
        with on_cpus(node.cpus[:1]):
            _touch(region)
        assert pages.nodes_of(pages.address_of(region), len(region)) == {node.node_id: NUM_PAGES}


def test_a_bound_region_lies_on_its_node_whoever_touches_it(guest) -> None:
    """Placement on a node without CPUs cannot be had by first touch. A node without memory takes no binding at all."""
    for node in guest.nodes:
        region = _anonymous()
        refused = pages.bind(pages.address_of(region), len(region), node.node_id)
        if not node.num_bytes:
            assert refused == errno.EINVAL
            continue
        assert refused == 0
        with on_cpus(guest.cpu_nodes[0].cpus[:1]):
            _touch(region)
        assert pages.nodes_of(pages.address_of(region), len(region)) == {node.node_id: NUM_PAGES}


def test_pinning_moves_pages_out_of_the_memory_of_a_gpu(guest) -> None:
    """It is movable, and what a device uses must not move: bound pages leave it first, and no call fails.

    So what devices read is not planned there, and pages are looked for where they are.
    """
    for node in guest.memory_nodes:
        region = _anonymous()
        address = pages.address_of(region)
        assert pages.bind(address, len(region), node.node_id) == 0
        _touch(region)
        with pages.pinned(address, len(region)):
            where = node.initiator if node.kind == "gpu" else node.node_id
            assert pages.nodes_of(address, len(region)) == {where: NUM_PAGES}


def test_a_move_that_moves_nothing_is_no_error(guest) -> None:
    """Pages that a second process maps as well stay where they are, and mbind says that all went well."""
    here, there = (node.node_id for node in guest.cpu_nodes)
    region = _anonymous()
    address = pages.address_of(region)
    assert pages.bind(address, len(region), here) == 0
    _touch(region)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        assert pages.bind(address, len(region), there, pages.MOVE | pages.STRICT) == 0
        assert pages.nodes_of(address, len(region)) == {here: NUM_PAGES}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
