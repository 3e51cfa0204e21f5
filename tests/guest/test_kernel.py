"""What hotset takes for granted of the kernel, held against this one."""

from __future__ import annotations

import errno
import mmap

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
