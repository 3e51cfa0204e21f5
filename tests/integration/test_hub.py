"""``hotset pull ORG/REPO`` against a hub that the test starts itself on the loopback interface."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import ARCHITECTURE, GGML_F32, Tensor, entry, gguf_bytes, key, safetensors_bytes
from hub_server import Hub, Repo, commit_id, serve

from hotset.checkpoint import download, open_checkpoint
from hotset.checkpoint import hub as hub_module
from hotset.checkpoint.hub import Pulled, pull
from hotset.checkpoint.resolve import resolve_model
from hotset.checkpoint.store import stored_models
from hotset.config import Settings
from hotset.errors import CheckpointError, HotsetError, MachineError, RequestError

CHUNK = 4096
NUM_WEIGHTS = 8192
WEIGHTS = np.arange(NUM_WEIGHTS, dtype="<f4").tobytes()
MODEL = safetensors_bytes({"w": entry("F32", [NUM_WEIGHTS], 0, len(WEIGHTS))}, WEIGHTS)
CONFIG = b'{"model_type": "llama"}'


def gguf_model(value: float) -> bytes:
    return gguf_bytes((ARCHITECTURE,), (Tensor("w", (64,), GGML_F32, 0),), data=np.full(64, value, "<f4").tobytes())


PLAIN = {
    "model.safetensors": MODEL,
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "encoding/encode.py": b"raise SystemExit('never run')",
    "modeling_llama.py": b"raise SystemExit('never run')",
    "pytorch_model.bin": b"a pickle",
    "README.md": b"hello",
}


class Recorder:
    """Keeps what a pull tells."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.total_bytes = 0
        self.done_bytes = 0

    def say(self, text: str) -> None:
        self.lines.append(text)

    def start(self, total_bytes: int, done_bytes: int) -> None:
        self.total_bytes, self.done_bytes = total_bytes, done_bytes

    def advance(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes


@pytest.fixture(autouse=True)
def quick_and_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No token of the user, no waiting between attempts, and small pieces, so that small files can be cut."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(download, "_RETRY_WAIT_S", 0)
    monkeypatch.setattr(download, "_CHUNK_BYTES", CHUNK)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve(Hub({"org/plain": Repo({"main": PLAIN})})) as hub:
        yield hub


@pytest.fixture
def settings(hub: Hub, tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", hf_endpoint=hub.address)


def names(pulled: Pulled) -> set[str]:
    return {path.relative_to(pulled.folder).as_posix() for path in pulled.folder.rglob("*") if path.is_file()}


def test_pull_keeps_what_a_model_needs_and_nothing_else(hub: Hub, settings: Settings) -> None:
    """Weights, JSON, templates and encoding sources (as text) come; pickles and model code do not."""
    progress = Recorder()
    pulled = pull("org/plain", progress, settings=settings)
    kept = {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "encoding/encode.py"}
    assert names(pulled) == {*kept, "hotset.json"}
    assert not any(path.is_symlink() for path in pulled.folder.rglob("*"))
    assert pulled.folder == settings.models_dir / "org" / "plain"
    assert pulled.record.format == "safetensors F32" and pulled.record.commit == commit_id("main")
    assert progress.done_bytes == progress.total_bytes == sum(len(PLAIN[name]) for name in kept)
    assert open_checkpoint(resolve_model("org/plain", settings)).array("w")[-1] == NUM_WEIGHTS - 1
    assert [record.name for _, record in stored_models(settings.models_dir)] == ["org/plain"]


def test_second_pull_asks_nobody(hub: Hub, settings: Settings) -> None:
    """A complete model is recognised without a request; --force fetches it again."""
    pull("org/plain", Recorder(), settings=settings)
    num_requests = len(hub.requests)
    again = pull("org/plain", Recorder(), settings=settings)
    assert again.was_here and len(hub.requests) == num_requests
    assert not pull("org/plain", Recorder(), settings=settings, force=True).was_here
    assert hub.ranges("model.safetensors") == [None, None]


def test_dropped_connection_goes_on_within_one_pull(hub: Hub, settings: Settings) -> None:
    """A line that breaks twice: the rest is asked for by range, and nothing is fetched twice."""
    hub.cuts["model.safetensors"] = [3 * CHUNK, 2 * CHUNK]
    progress = Recorder()
    pulled = pull("org/plain", progress, settings=settings)
    assert hub.ranges("model.safetensors") == [None, f"bytes={3 * CHUNK}-", f"bytes={5 * CHUNK}-"]
    assert (pulled.folder / "model.safetensors").read_bytes() == MODEL
    assert progress.done_bytes == progress.total_bytes


def test_interrupted_pull_goes_on_in_the_next_one(hub: Hub, settings: Settings) -> None:
    """huggingface_hub throws a partial file away when a process ends; hotset keeps it. Nothing is usable before."""
    hub.cuts["model.safetensors"] = [3 * CHUNK] + [0] * 6
    with pytest.raises(MachineError, match=r"fetching model\.safetensors of org/plain") as caught:
        pull("org/plain", Recorder(), settings=settings)
    assert caught.value.hint == "what has arrived is kept: run the same command again to go on"
    with pytest.raises(RequestError, match="org/plain is neither a file nor a fetched model"):
        resolve_model("org/plain", settings)
    assert list(stored_models(settings.models_dir)) == []

    hub.cuts.clear()
    hub.requests.clear()
    progress = Recorder()
    pulled = pull("org/plain", progress, settings=settings)
    assert hub.ranges("model.safetensors") == [f"bytes={3 * CHUNK}-"]
    assert (pulled.folder / "model.safetensors").read_bytes() == MODEL
    assert progress.done_bytes == progress.total_bytes


def test_hub_that_ignores_ranges(hub: Hub, settings: Settings) -> None:
    """The whole file arrives again: it must not be appended to what is there, nor counted twice."""
    hub.cuts["model.safetensors"] = [3 * CHUNK] + [0] * 6
    with pytest.raises(MachineError):
        pull("org/plain", Recorder(), settings=settings)
    hub.cuts.clear()
    hub.ignores_ranges = True
    progress = Recorder()
    pulled = pull("org/plain", progress, settings=settings)
    assert (pulled.folder / "model.safetensors").read_bytes() == MODEL
    assert progress.done_bytes == progress.total_bytes


@pytest.mark.parametrize("path", ["model.safetensors", "config.json"])
def test_wrong_checksum(hub: Hub, settings: Settings, path: str) -> None:
    """A file of the right length and wrong content is refused and removed, large (SHA-256) or small (git id)."""
    content = PLAIN[path]
    hub.forged[path] = [content[:-1] + bytes([content[-1] ^ 1])]
    with pytest.raises(MachineError, match=rf"{path} arrived with the (SHA-256|git id) \w+, the hub says \w+"):
        pull("org/plain", Recorder(), settings=settings)
    assert not (settings.models_dir / "org").exists()
    assert (pull("org/plain", Recorder(), settings=settings).folder / path).read_bytes() == content


def test_answers_that_are_too_short_or_too_long(hub: Hub, settings: Settings) -> None:
    """The size is known beforehand: the rest of a short answer is asked for, a long one is an error."""
    hub.forged["model.safetensors"] = [MODEL + b"12345678"]
    with pytest.raises(MachineError, match=rf"the hub sends more than the {len(MODEL)} bytes that it announced"):
        pull("org/plain", Recorder(), settings=settings)
    assert not (settings.models_dir / "org").exists()
    hub.forged["model.safetensors"] = [MODEL[:-8]]
    assert (pull("org/plain", Recorder(), settings=settings).folder / "model.safetensors").read_bytes() == MODEL


def test_server_errors(hub: Hub, settings: Settings) -> None:
    """A hub in trouble for a moment is asked again; one that stays in trouble is an error with its status."""
    hub.trouble = 2
    assert not pull("org/plain", Recorder(), settings=settings).was_here
    hub.trouble = 1000
    with pytest.raises(MachineError, match=r"503") as caught:
        pull("org/plain", Recorder(), settings=settings, force=True)
    assert "\n" not in caught.value.message


def test_not_found(hub: Hub, settings: Settings) -> None:
    """404 for a repository and for a revision of one that is there."""
    for name, message in (
        ("org/absent", r"looking up org/absent at .*: not found on the hub, or not open to you \(status 404\)"),
        ("org/plain@v9", r"org/plain has no such revision"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            pull(name, Recorder(), settings=settings)
        assert "\n" not in caught.value.message and caught.value.hint


def test_access(hub: Hub, settings: Settings) -> None:
    """401 without or with a wrong token says so; the right token works and never leaves for another host."""
    hub.token = "hf_right"
    for token in (None, "hf_wrong"):
        wrong = Settings(home=settings.home, hf_endpoint=hub.address, hf_token=token)
        with pytest.raises(RequestError, match=r"not open to you \(status 401\)") as caught:
            pull("org/plain", Recorder(), settings=wrong)
        assert "HF_TOKEN" in (caught.value.hint or "")
    with serve(Hub(hub.repos)) as cdn:
        hub.cdn = cdn.address
        right = Settings(home=settings.home, hf_endpoint=hub.address, hf_token="hf_right")
        pulled = pull("org/plain", Recorder(), settings=right)
        assert (pulled.folder / "model.safetensors").read_bytes() == MODEL
        assert cdn.ranges("model.safetensors") == [None]
        assert {authorization for *_, authorization in cdn.requests} == {None}
    assert "hf_right" not in repr(right)


def test_no_hub_there(tmp_path: Path) -> None:
    """A closed port, and servers whose answers are not those of a hub, are one line each."""
    with serve(Hub()) as gone:
        address = gone.address
    doing = r"looking up org/plain at http://127\.0\.0\.1:\d+"
    with pytest.raises(MachineError, match=doing) as caught:
        pull("org/plain", Recorder(), settings=Settings(home=tmp_path, hf_endpoint=address))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>log in first</html>", ""),
        (b"[]", "the answer is not one of a Hugging Face hub"),
        (b"{}", "the answer is not one of a Hugging Face hub"),
        (b'{"id": "org/plain"}', "the answer names no commit"),
        (b'{"id": "org/plain", "sha": "../../x", "siblings": []}', "the answer names no commit"),
        (b'{"id": "org/plain", "sha": "%s", "siblings": [1]}' % (b"a" * 40), "the answer is not one of"),
    ],
)
def test_server_that_is_no_hub(hub: Hub, settings: Settings, body: bytes, message: str) -> None:
    """HF_ENDPOINT may point to anything: a login page, a proxy, another API."""
    hub.info_body = body
    with pytest.raises(MachineError, match=rf"looking up org/plain at http://127\.0\.0\.1:\d+: {message}") as caught:
        pull("org/plain", Recorder(), settings=settings)
    assert "\n" not in caught.value.message


SHARDED = {
    "model-00001-of-00002.safetensors": safetensors_bytes({"a": entry("F32", [2], 0, 8)}, b"\0" * 8),
    "model-00002-of-00002.safetensors": safetensors_bytes({"b": entry("F32", [2], 0, 8)}, b"\0" * 8),
    "consolidated.safetensors": b"the same weights once more",
    "config.json": CONFIG,
    "model.safetensors.index.json": json.dumps(
        {
            "metadata": {},
            "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
        }
    ).encode(),
}


def test_sharded_model_takes_only_what_its_index_names(hub: Hub, settings: Settings) -> None:
    """Some repositories hold the weights twice; only one copy is fetched."""
    hub.repos["org/sharded"] = Repo({"main": SHARDED})
    pulled = pull("org/sharded", Recorder(), settings=settings)
    assert names(pulled) == {*SHARDED, "hotset.json"} - {"consolidated.safetensors"}
    assert set(open_checkpoint(pulled.path).tensors) == {"a", "b"}


def test_repository_without_a_shard_that_the_index_names(hub: Hub, settings: Settings) -> None:
    """An incomplete repository is refused before gigabytes are fetched."""
    files = {path: content for path, content in SHARDED.items() if "00002-of" not in path}
    hub.repos["org/sharded"] = Repo({"main": files})
    with pytest.raises(CheckpointError, match=r"it has no file model-00002-of-00002\.safetensors"):
        pull("org/sharded", Recorder(), settings=settings)
    assert hub.ranges("model-00001-of-00002.safetensors") == []


def split_model() -> dict[str, bytes]:
    shards = {}
    for number in (0, 1):
        keys = (*((ARCHITECTURE,) if number == 0 else ()), key("split.no", 2, bytes([number, 0])))
        keys = (*keys, key("split.count", 2, b"\2\0"))
        tensor = Tensor(f"t{number}", (8,), GGML_F32, 0)
        shards[f"Q8/big-{number + 1:05d}-of-00002.gguf"] = gguf_bytes(keys, (tensor,), data=b"\0" * 32)
    return shards


def test_gguf_repository_with_a_choice(hub: Hub, settings: Settings) -> None:
    """Several models: none is guessed; one is picked with --file; a second one joins the first, which stays."""
    files = {"a-Q4_0.gguf": gguf_model(1), "a-F32.gguf": gguf_model(2), "config.json": CONFIG, **split_model()}
    hub.repos["org/many"] = Repo({"main": files})
    with pytest.raises(RequestError, match=r"has 3 GGUF models: Q8/big-00001-of-00002\.gguf, a-F32\.gguf") as caught:
        pull("org/many", Recorder(), settings=settings)
    assert caught.value.hint == "pick one: --file Q8/big-00001-of-00002.gguf"
    with pytest.raises(RequestError, match=r"has no GGUF file b\.gguf"):
        pull("org/many", Recorder(), file="b.gguf", settings=settings)

    first = pull("org/many", Recorder(), file="a-F32.gguf", settings=settings)
    assert names(first) == {"a-F32.gguf", "hotset.json"}
    assert resolve_model("org/many", settings) == first.path == first.folder / "a-F32.gguf"

    second = pull("org/many", Recorder(), file="Q8/big-00002-of-00002.gguf", settings=settings)
    assert names(second) == {"a-F32.gguf", *split_model(), "hotset.json"}
    assert hub.ranges("a-F32.gguf") == [None]
    assert set(open_checkpoint(second.path).tensors) == {"t0", "t1"}
    assert pull("org/many", Recorder(), file="Q8/big-00002-of-00002.gguf", settings=settings).path == second.path
    with pytest.raises(RequestError, match="org/many holds 2 models") as caught:
        resolve_model("org/many", settings)
    assert caught.value.hint == "give one: org/many/a-F32.gguf"
    assert open_checkpoint(resolve_model("org/many/a-F32.gguf", settings)).array("w")[0] == 2
    with pytest.raises(RequestError, match=r"a-Q4_0\.gguf of org/many is not on this machine") as caught:
        resolve_model("org/many/a-Q4_0.gguf", settings)
    assert caught.value.hint == "hotset pull org/many --file a-Q4_0.gguf"


def test_other_revision_replaces_the_model_as_a_whole(hub: Hub, settings: Settings) -> None:
    """Files of two commits never mix; until the new one is complete the old one stays usable."""
    new = safetensors_bytes({"w": entry("F32", [1], 0, 4)}, b"\0" * 4)
    hub.repos["org/plain"].revisions["v2"] = {"model.safetensors": new, "config.json": CONFIG}
    pull("org/plain", Recorder(), settings=settings)
    with pytest.raises(RequestError, match=r"org/plain is here at main \(\w{12}\), not at v2"):
        resolve_model("org/plain@v2", settings)
    hub.forged["model.safetensors"] = [b"\0" * len(new)]
    with pytest.raises(MachineError):
        pull("org/plain@v2", Recorder(), settings=settings)
    assert open_checkpoint(resolve_model("org/plain", settings)).tensors["w"].shape == (NUM_WEIGHTS,)
    pulled = pull("org/plain", Recorder(), revision="v2", settings=settings)
    assert names(pulled) == {"model.safetensors", "config.json", "hotset.json"}
    assert resolve_model(f"org/plain@{commit_id('v2')}", settings) == pulled.folder
    assert [path.name for path in (settings.models_dir / ".partial").iterdir() if path.is_dir()] == []


def test_unfinished_files_of_another_commit_are_removed(hub: Hub, settings: Settings) -> None:
    """Half of a model that nobody will finish is gigabytes; half of the one that is asked for is kept."""
    hub.repos["org/plain"].revisions["v2"] = {**PLAIN, "config.json": b"{}"}
    partial = settings.models_dir / ".partial"
    for name in ("org/plain@v2", "org/plain"):
        hub.cuts["model.safetensors"] = [CHUNK] + [0] * 6
        with pytest.raises(MachineError):
            pull(name, Recorder(), settings=settings)
    assert [path.name for path in partial.iterdir() if path.is_dir()] == [f"org--plain--{commit_id('main')}"]


def test_damaged_copy_is_noticed_and_mended(hub: Hub, settings: Settings) -> None:
    """A file that was cut or removed after the pull is named; the next pull fetches that file and no other."""
    pulled = pull("org/plain", Recorder(), settings=settings)
    (pulled.folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing or was changed since it was fetched"):
        resolve_model("org/plain", settings)
    hub.requests.clear()
    mended = pull("org/plain", Recorder(), settings=settings)
    assert not mended.was_here and (mended.folder / "model.safetensors").read_bytes() == MODEL
    assert hub.ranges("config.json") == [] and hub.ranges("model.safetensors") == [None]


def test_repositories_that_cannot_be_used(hub: Hub, settings: Settings) -> None:
    """Only pickles, nothing at all, safetensors that do not open: each refused with the reason."""
    hub.repos["org/pickle"] = Repo({"main": {"pytorch_model.bin": b"x", "config.json": CONFIG}})
    hub.repos["org/empty"] = Repo({"main": {"README.md": b"x"}})
    hub.repos["org/broken"] = Repo({"main": {"model.safetensors": MODEL[:-4], "config.json": CONFIG}})
    hub.repos["org/noconfig"] = Repo({"main": {"model.safetensors": MODEL}})
    cases: list[tuple[str, type[HotsetError], str]] = [
        ("org/pickle", RequestError, "only as Python pickles, which can run code"),
        ("org/empty", RequestError, "no safetensors and no GGUF files"),
        ("org/broken", CheckpointError, "tensor w covers data bytes"),
        ("org/noconfig", CheckpointError, r"no config\.json"),
    ]
    for name, kind, message in cases:
        with pytest.raises(kind, match=message):
            pull(name, Recorder(), settings=settings)
        assert not (settings.models_dir / name).exists()


@pytest.mark.parametrize(
    "path", ["../evil.json", "a/../../evil.json", "/etc/evil.json", "a\\..\\evil.json", "a//b.json"]
)
def test_hub_with_path_tricks(hub: Hub, settings: Settings, path: str) -> None:
    """A hostile hub must not write outside the model's folder."""
    hub.repos["org/evil"] = Repo({"main": {**PLAIN, path: b"{}"}})
    with pytest.raises(MachineError, match="org/evil lists a file with an unsafe name"):
        pull("org/evil", Recorder(), settings=settings)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/../b",
        "/a/b",
        "a\\b/c",
        "a/b/c",
        "org/",
        "/",
        "org/re po",
        "org/x@",
        "org/x@../y",
        "org/x@a/../b",
        ".hid/x",
        "a/..",
    ],
)
def test_names_with_path_tricks(hub: Hub, settings: Settings, name: str) -> None:
    """A name never leads out of the store, and no request is made for it."""
    with pytest.raises(RequestError, match="is not the name of a model"):
        pull(name, Recorder(), settings=settings)
    assert hub.requests == []


def test_conflicting_wishes(hub: Hub, settings: Settings) -> None:
    """Two revisions, or the other kind of model over what is here: refused, not silently decided."""
    with pytest.raises(RequestError, match="two revisions: v1 in the name and v2 in --revision"):
        pull("org/plain@v1", Recorder(), revision="v2", settings=settings)
    files = {**PLAIN, "m.gguf": gguf_model(1)}
    hub.repos["org/both"] = Repo({"main": files})
    pull("org/both", Recorder(), settings=settings)
    with pytest.raises(RequestError, match="org/both is here as safetensors, and this asks for GGUF"):
        pull("org/both", Recorder(), file="m.gguf", settings=settings)
    pulled = pull("org/both", Recorder(), file="m.gguf", force=True, settings=settings)
    assert names(pulled) == {"m.gguf", "hotset.json"}


def test_two_pulls_of_one_model_at_a_time(hub: Hub, settings: Settings) -> None:
    """The second one says so, instead of writing into the files of the first."""
    with (
        hub_module._locked_partial(settings.models_dir, "org--plain"),
        pytest.raises(MachineError, match="another hotset is fetching org/plain right now"),
    ):
        pull("org/plain", Recorder(), settings=settings)


def test_disk_too_small(hub: Hub, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with both numbers before the first byte of weights."""
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("hotset.checkpoint.store.shutil.disk_usage", lambda path: usage)
    with pytest.raises(MachineError, match=r"32\.\d+ KiB to fetch, 100 B free in"):
        pull("org/plain", Recorder(), settings=settings)
    assert hub.ranges("model.safetensors") == []


def test_files_too_large_for_plain_http(hub: Hub, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the hub's limit huggingface_hub itself fetches the file; checksum and result are the same."""
    monkeypatch.setattr("hotset.checkpoint.download.MAX_HTTP_BYTES", 1000)
    pulled = pull("org/plain", Recorder(), settings=settings)
    assert (pulled.folder / "model.safetensors").read_bytes() == MODEL
    assert "hotset.json" in names(pulled) and not (pulled.folder / ".cache").exists()
    assert ("HEAD", f"/org/plain/resolve/{commit_id('main')}/model.safetensors") in [r[:2] for r in hub.requests]
