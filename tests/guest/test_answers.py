"""One answer: the same tokens and the same bits as on the host, whichever nodes the threads are on."""

from __future__ import annotations

import pytest
from answers import SYNTH, answer, write_synth
from conftest import MODELS

NAMES = (*sorted(path.name for path in MODELS.iterdir()), SYNTH)


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A model that the host has answered for; the last one is written here by `hotset synth`."""
    name = request.param
    return write_synth(["hotset"], tmp_path_factory.mktemp("synth") / name) if name == SYNTH else MODELS / name


def test_one_thread_gives_the_hosts_answer(guest, host_answers, model) -> None:
    """Bug class: kernels, tables or a random checkpoint that differ between processors of one kernel set."""
    assert answer(model, guest.cpu_nodes[0].cpus[:1]) == host_answers[model.name]


def test_threads_on_any_nodes_give_the_same_answer(guest, host_answers, model) -> None:
    """Bug class: rows or cache blocks that are dealt to nodes in a way that reaches the numbers."""
    first, second = guest.cpu_nodes[0].cpus, guest.cpu_nodes[1].cpus
    for cpus in (second[:1], (first[0], second[0]), first + second):
        assert answer(model, cpus) == host_answers[model.name], cpus
