"""Memory while a model is loaded: file cache makes room for weights, and nobody else takes it unnoticed.

The file's pages are of no use once the weights are packed. While a node has fewer free pages than are still to be
placed there, the kernel would have to find and drop such pages for every page it gives out; dropping what was read is
cheaper, and spares the file cache of other programs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hotset.errors import MachineError
from hotset.log import note
from hotset.machine.files import ROOT
from hotset.machine.nodes import Node, read_nodes
from hotset.units import MIB, format_bytes

CHECK_BYTES = 256 * MIB
"""Bytes of the file between two looks at the nodes."""


class LoadRoom:
    """Watches the nodes that ``planned`` places bytes on, while ``file_bytes`` of a checkpoint are read.

    ``is_bound``: bytes that do not fit on their node would end the process.
    """

    def __init__(self, planned: Mapping[int, int], file_bytes: int, *, is_bound: bool, root: Path = ROOT) -> None:
        self._planned = planned
        self._file_bytes = max(file_bytes, 1)
        self._is_bound = is_bound
        self._root = root
        self._num_read = 0
        self._next_check = 0
        self._ranges: list[tuple[int, int, int]] = []
        self.is_releasing = False

    def before(self) -> None:
        """Look at the nodes before more is read. MachineError when a bound node lost its room."""
        if self._num_read < self._next_check:
            return
        self._next_check = self._num_read + CHECK_BYTES
        left = 1 - self._num_read / self._file_bytes
        for node in read_nodes(self._root, ()):
            if node.node_id in self._planned:
                self._check(node, int(self._planned[node.node_id] * left))

    def _check(self, node: Node, still: int) -> None:
        if self._is_bound and node.available_bytes < still:
            raise MachineError(
                f"node {node.node_id} has {format_bytes(node.available_bytes)} left while loading, "
                f"{format_bytes(still)} are still to be placed there: another process took it",
                "--numa prefer lets pages go to other nodes",
            )
        if node.free_bytes < still and not self.is_releasing:
            note(
                f"note: node {node.node_id} has {format_bytes(node.free_bytes)} free, {format_bytes(still)} are still "
                "to be placed there: pages of the model's files leave the page cache as they are read"
            )
            self.is_releasing = True

    def after(self, handle: int, offset: int, num_bytes: int) -> None:
        """Bytes of a file were read and are not needed again."""
        self._num_read += num_bytes
        self._ranges.append((handle, offset, num_bytes))
        if self.is_releasing:
            for file, start, count in self._ranges:
                os.posix_fadvise(file, start, count, os.POSIX_FADV_DONTNEED)
            self._ranges.clear()
