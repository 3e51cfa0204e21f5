"""Machine profiles: JSON in and out, what is refused, and that presets are whole."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hotset.errors import MachineError, RequestError
from hotset.machine.measured import find_profile
from hotset.machine.presets import preset_names, read_preset
from hotset.machine.profile import Consumer, Memory, Path, Profile, parse_profile

SMALL = Profile(
    "small",
    "a test",
    "nobody",
    (Memory("node0", "ddr", 1 << 30, 0.5, 0), Memory("hbm0", "hbm", 1 << 28, 1.0)),
    (Consumer("cpu0", "cpu", "node0", 4, {"int8": 2e12}, 2e-6), Consumer("gpu0", "gpu", "hbm0", 1, {})),
    (
        Path("cpu0", "node0", 50e9, 40e9, 30e9, 1e-7, 2, (48e9, 51e9), "a test", ((1, 30e9), (2, 50e9), (4, 46e9))),
        Path("gpu0", "hbm0", 900e9),
        Path("gpu0", "node0", 20e9),
    ),
    storage_bytes_per_s=3e9,
    measured="2026-11-30T12:00:00+00:00",
)


def text(content: Any) -> bytes:
    return json.dumps(content).encode()


def test_json_round_trip() -> None:
    """Every field, None and tuples included, and the id with it."""
    back = parse_profile(text(SMALL.to_json()), "a file")
    assert back == SMALL and back.id == SMALL.id
    assert SMALL.to_json()["version"] == 1


def test_the_id_changes_with_any_number() -> None:
    """A plan made with another profile was not told apart from a fresh one."""
    faster = replace(SMALL, paths=(replace(SMALL.paths[0], read_bytes_per_s=50.1e9), *SMALL.paths[1:]))
    later = replace(SMALL, measured="2026-12-01T12:00:00+00:00")
    assert len({SMALL.id, faster.id, later.id}) == 3 and len(SMALL.id) == 12


def test_without_gpus_the_cpus_keep_every_memory() -> None:
    """What runs on CPUs was expected at the speed of the GPU beside them."""
    alone = SMALL.with_consumers(("cpu0",))
    assert (alone.devices, alone.paths, alone.memories) == (SMALL.consumers[:1], SMALL.paths[:1], SMALL.memories)


def test_what_fewer_threads_read() -> None:
    """On the lines between measured teams; where only the saturating number is known, in proportion up to it."""
    path = SMALL.paths[0]
    assert [path.read_by(count) for count in (1, 2, 3, 4, 9)] == [30e9, 50e9, 48e9, 46e9, 46e9]
    published = replace(path, reads=(), threads=32)
    assert [published.read_by(count) for count in (8, 32, 72)] == [12.5e9, 50e9, 50e9]
    assert replace(path, reads=((32, 348e9), (72, 330e9))).read_by(16) == 174e9
    assert replace(path, reads=(), threads=None).read_by(2) is None


def test_a_machine_with_smaller_teams() -> None:
    """Reading by the curve, arithmetic by the threads; no team is larger than what was measured."""
    one, all_cores = SMALL.with_teams({"cpu0": 1}), SMALL.with_teams({"cpu0": 99})
    assert (one.consumer("cpu0").num_cores, one.consumer("cpu0").rates) == (1, {"int8": 0.5e12})
    assert one.path("cpu0", "node0").read_bytes_per_s == 30e9
    assert (all_cores.consumer("cpu0"), all_cores.path("cpu0", "node0").read_bytes_per_s) == (SMALL.consumers[0], 46e9)
    for machine in (one, all_cores):
        assert (machine.consumer("gpu0"), machine.paths[1:]) == (SMALL.consumers[1], SMALL.paths[1:])


def test_the_cpus_of_a_node() -> None:
    """A profile of one memory may name no node, one of several must."""
    unnamed = replace(SMALL, memories=(replace(SMALL.memories[0], node=None), SMALL.memories[1]))
    assert (SMALL.cpu_of(0), SMALL.cpu_of(1), unnamed.cpu_of(7)) == (SMALL.consumers[0], None, SMALL.consumers[0])
    two = read_preset("dual-gh200")
    assert [cpu and cpu.name for cpu in map(two.cpu_of, (0, 1, 2))] == ["cpu0", "cpu1", None]


@pytest.mark.parametrize("reads", [5, [[1]], [[0, 1e9]], [[2, 1e9], [2, 2e9]], [[2.0, 1e9]], [[True, 1e9]], [[1, -1]]])
def test_damaged_curves_are_refused(reads: Any) -> None:
    content = json.loads(text(SMALL.to_json()))
    content["paths"][0]["reads"] = reads
    with pytest.raises(MachineError, match="paths: reads "):
        parse_profile(text(content), "a file")


def test_names_are_looked_up_or_refused() -> None:
    assert SMALL.path("gpu0", "node0").read_bytes_per_s == 20e9
    assert SMALL.memory("node0").usable_bytes == 1 << 29
    assert SMALL.devices == (SMALL.consumers[1],)
    assert SMALL.find_path("cpu0", "hbm0") is None
    with pytest.raises(MachineError, match="nobody measured on small how fast cpu0 reads hbm0") as caught:
        SMALL.path("cpu0", "hbm0")
    assert caught.value.hint is not None and "gpu0 from node0" in caught.value.hint
    with pytest.raises(MachineError, match="small has no memory node7"):
        SMALL.memory("node7")
    with pytest.raises(MachineError, match="small has no cpu7"):
        SMALL.consumer("cpu7")


def changed(where: str, **values: Any) -> bytes:
    content = json.loads(text(SMALL.to_json()))
    target = content
    for part in where.split(".") if where else ():
        target = target[int(part)] if part.isdigit() else target[part]
    target.update(values)
    return text(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed("", version=2), "profile of version 2, expected 1"),
        (changed("", colour="red"), "profile: unknown field 'colour'"),
        (changed("memories.0", colour="red"), "memories: unknown field 'colour'"),
        (changed("memories.0", kind="dram"), "kind is 'dram', expected one of ddr"),
        (changed("memories.0", num_bytes=1.5), "num_bytes is 1.5, expected a number of things"),
        (changed("memories.0", usable=1.5), "usable of node0 is 1.5, expected at most 1"),
        (changed("memories.1", name="node0"), "memory node0 is there twice"),
        (changed("consumers.0", near="node7"), "nobody measured on small how fast cpu0 reads node7"),
        (changed("consumers.0", rates={"int8": "fast"}), "rates int8 is 'fast', expected a number above 0"),
        (changed("consumers.0", num_cores=True), "num_cores is True"),
        (changed("paths.0", read_bytes_per_s=0), "read_bytes_per_s is 0, expected a number above 0"),
        (changed("paths.0", read_bytes_per_s=None), "read_bytes_per_s is None, expected a number above 0"),
        (changed("paths.0", spread=[1.0]), "spread is .*, expected the lowest and the highest"),
        (changed("paths.2", consumer="gpu7"), "small has no gpu7"),
        (changed("", paths={}), "paths is {}, expected a list"),
        (changed("", paths=[]), "a machine without a path"),
        (b"[]", "expected an object"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b'{"version": 1, "version": 1}', "a key appears twice"),
    ],
)
def test_what_is_wrong_is_named(content: bytes, message: str) -> None:
    with pytest.raises(MachineError, match=message):
        parse_profile(content, "a file")


def test_a_missing_field_is_named() -> None:
    content = json.loads(text(SMALL.to_json()))
    del content["consumers"][0]["near"]
    with pytest.raises(MachineError, match=r"consumers: .*'near'"):
        parse_profile(text(content), "a file")


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_whole_and_say_where_each_number_is_from(name: str) -> None:
    """No number without its source; what nobody published is null or not there."""
    preset = read_preset(name)
    assert preset.name == name and preset.source and preset.about and not preset.measured
    for part in (*preset.memories, *preset.consumers, *preset.paths):
        assert part.source, part
    for device in preset.devices:
        assert preset.path(device.name, device.near).read_bytes_per_s > 100e9


def test_preset_names() -> None:
    assert preset_names() == ("dgx-spark", "dual-gh200", "epyc-9004-2s", "gh200", "strix-halo", "xeon-6430-2s")
    with pytest.raises(RequestError, match="no machine is named toaster"):
        find_profile("toaster")
    with pytest.raises(MachineError, match=r"nowhere\.json"):
        find_profile("nowhere.json")
