"""Sessions: a saved sequence goes on in another engine with the same bits, wherever it ended; bad files are refused."""

import stat
from dataclasses import replace

import numpy as np
import pytest
from engine_fakes import answer, make_engine, prefix_logits
from frontier_fakes import BLOCK, IDENTITY, chain_logits, make_frontier_engine
from hypothesis import given, settings, strategies

from hotset.engine.sampling import Sampling
from hotset.errors import HotsetError, InternalError, MachineError, RequestError
from hotset.kv.identity import Identity
from hotset.kv.session import SessionFile

DRAW = Sampling(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True)


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, 200, length).tolist()


def last_of(engine, prompt, sampling=DRAW):
    return list(engine.generate(prompt, sampling))[-1]


def expected(prompt, sampling=DRAW):
    return answer(prompt, sampling, sampling.max_tokens, chain_logits)[0]


def make_plain(**options):
    """An engine for a model without a frontier."""
    return make_engine(num_blocks=40, codec=None, identity=IDENTITY, **options)[0]


@pytest.mark.parametrize("length", range(2, 3 * BLOCK + 4))
def test_a_session_goes_on_with_the_same_bits_at_every_position(tmp_path, length):
    """Bug class: exact at 128 tokens, different from 129 on: the state of some ring or partial row is not saved.

    The lengths pass every border of the window (8), the compressed rows (4, 8) and the blocks (16).
    """
    path, prompt = tmp_path / "s", prompt_of(length)
    engine, _ = make_frontier_engine()
    saved = engine.save_session(path, prompt)
    other, executor = make_frontier_engine()
    loaded = other.load_session(path)
    assert loaded == saved and loaded.token_ids == tuple(prompt) and loaded.cached_tokens == length - 1
    for more in ([], [7], prompt_of(20, 1)):
        last = last_of(other, [*prompt, *more])
        assert list(last.token_ids) == expected([*prompt, *more])
        # When the prompt ends a block, the first continuation has completed that block.
        assert last.cached_tokens == length - (not more or length % BLOCK > 0) and last.recomputed_tokens == 0
    assert executor.batches[0] == [(length - 1, 1)]
    if length > 2:  # Exactly the rows that were saved: one of them has to be computed again, for its logits.
        assert list(last_of(other, prompt[:-1]).token_ids) == expected(prompt[:-1])


@pytest.mark.parametrize("num_steps", range(1, 24))
def test_a_running_request_is_saved_as_it_stands(tmp_path, num_steps):
    """Bug class: saving disturbs the request, or saves the state of the next token."""
    prompt = prompt_of(150)
    engine, executor = make_frontier_engine(max_sequences=1, max_tokens=50)
    request = engine.submit(prompt, replace(DRAW, max_tokens=40))
    for _ in range(num_steps):
        engine.step()
    before = len(executor.batches)
    saved = engine.save_session(tmp_path / "s", request)
    assert len(executor.batches) == before, "there was nothing to compute"
    assert list(list(request)[-1].token_ids) == expected(prompt, replace(DRAW, max_tokens=40))
    other, executor = make_frontier_engine()
    assert other.load_session(tmp_path / "s") == saved
    assert last_of(other, [*saved.token_ids, 9]).cached_tokens == saved.cached_tokens
    assert list(last_of(other, [*saved.token_ids, 9]).token_ids) == expected([*saved.token_ids, 9])


def test_an_interrupted_request_is_saved_from_its_newest_snapshot(tmp_path):
    """Bug class: the frontier of a step that was never committed is written as that of the position before it."""
    prompt = prompt_of(100)
    engine, executor = make_frontier_engine(max_sequences=1)
    request = engine.submit(prompt, DRAW)
    engine.step()
    executor.fail_with = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    saved = engine.save_session(tmp_path / "s", request)
    assert saved.cached_tokens == 99
    assert list(list(request)[-1].token_ids) == expected(prompt)
    other, _ = make_frontier_engine()
    other.load_session(tmp_path / "s")
    assert list(last_of(other, prompt).token_ids) == expected(prompt)


def test_a_request_that_has_no_rows_yet_is_computed(tmp_path):
    engine = make_plain(max_tokens=8)
    handles = [engine.submit(prompt_of(length, length), DRAW) for length in (30, 3, 20)]
    engine.step()
    assert engine.save_session(tmp_path / "s", handles[2]).cached_tokens == 19
    assert make_plain().load_session(tmp_path / "s").cached_tokens == 19


def test_of_two_sessions_that_begin_alike_the_longer_one_is_used(tmp_path):
    prompt = prompt_of(3 * BLOCK)
    lengths = (BLOCK + 5, BLOCK + 9)
    for length in lengths:
        make_frontier_engine()[0].save_session(tmp_path / str(length), prompt[:length])
    for order in (lengths, lengths[::-1]):
        engine, _ = make_frontier_engine()
        for length in order:
            engine.load_session(tmp_path / str(length))
        last = last_of(engine, prompt)
        assert list(last.token_ids) == expected(prompt) and last.cached_tokens == BLOCK + 8


def test_a_finished_request_is_saved_by_computing_its_end_again(tmp_path):
    prompt = prompt_of(40)
    engine, executor = make_frontier_engine()
    request = engine.submit(prompt, replace(DRAW, max_tokens=30))
    tokens = [*prompt, *list(request)[-1].token_ids]
    before = len(executor.batches)
    saved = engine.save_session(tmp_path / "s", request)
    assert list(saved.token_ids) == tokens
    # 69 rows; the answer reached the border at 64, and a snapshot was kept there.
    assert [batch for batch in executor.batches[before:]] == [[(64, 5)]]
    other, _ = make_frontier_engine()
    other.load_session(tmp_path / "s")
    assert list(last_of(other, tokens).token_ids) == expected(tokens)
    assert engine.stats().num_used_blocks == engine.stats().num_reserved_blocks == 0


def test_a_session_can_be_branched_and_rewound(tmp_path):
    """Bug class: the first continuation uses the saved state up."""
    prompt = prompt_of(5 * BLOCK + 7)
    engine, _ = make_frontier_engine()
    last_of(engine, prompt[: 2 * BLOCK + 3])
    engine.save_session(tmp_path / "s", prompt)
    other, _ = make_frontier_engine()
    other.load_session(tmp_path / "s")
    for seed in range(3):
        branch = [*prompt, *prompt_of(30, seed)]
        last = last_of(other, branch)
        assert list(last.token_ids) == expected(branch) and last.cached_tokens >= len(prompt) - 1
    # An edit inside the last block resumes at the border before it, one far back at the snapshot that came along.
    for cut, cached in ((5 * BLOCK + 3, 5 * BLOCK), (3 * BLOCK, 2 * BLOCK)):
        edited = [*prompt[:cut], 201, *prompt_of(9)]
        last = last_of(other, edited)
        assert list(last.token_ids) == expected(edited) and last.cached_tokens == cached


def test_a_session_of_a_model_without_a_frontier(tmp_path):
    for length in range(2, 14):
        prompt = prompt_of(length)
        make_plain().save_session(tmp_path / "s", prompt)
        other = make_plain()
        assert other.load_session(tmp_path / "s").cached_tokens == length - 1
        for more in ([], [3, 4, 5]):
            last = last_of(other, [*prompt, *more])
            assert list(last.token_ids) == answer([*prompt, *more], DRAW, DRAW.max_tokens, prefix_logits)[0]
            assert last.cached_tokens >= length - 1


@settings(max_examples=25, deadline=None)
@given(
    length=strategies.integers(2, 150),
    max_tokens=strategies.integers(3, 70),
    num_snapshots=strategies.tuples(strategies.integers(0, 9), strategies.integers(1, 6)),
    before=strategies.lists(strategies.tuples(strategies.integers(1, 149), strategies.booleans()), max_size=3),
)
def test_any_engine_restores_what_any_engine_saved(tmp_path_factory, length, max_tokens, num_snapshots, before):
    """Whatever ran before in either engine, with prompts that begin as the session does or differ."""
    path = tmp_path_factory.mktemp("session") / "s"
    prompt = prompt_of(length)
    engine, _ = make_frontier_engine(max_tokens=max_tokens, num_snapshots=num_snapshots[0])
    other, _ = make_frontier_engine(num_snapshots=num_snapshots[1])
    for one in (engine, other):
        for cut, differs in before:
            last_of(one, [*prompt[:cut], 201] if differs else (prompt[:cut] or [1]))
    saved = engine.save_session(path, prompt)
    assert other.load_session(path) == saved
    other._memory.check_integrity(())
    for more in ([], [5], prompt_of(9, 3)):
        last = last_of(other, [*prompt, *more])
        assert list(last.token_ids) == expected([*prompt, *more])
        # A continuation takes a place for its own snapshot, and that may be the only one.
        assert last.cached_tokens >= length - 1 or (more and num_snapshots[1] < 3)
    engine._memory.check_integrity(())


def test_loading_twice_and_beside_running_requests(tmp_path, monkeypatch):
    """Bug class: restoring evicts what it is about to use, or writes blocks that others read."""
    prompt = prompt_of(70)
    engine, _ = make_frontier_engine()
    engine.save_session(tmp_path / "s", prompt)
    other, executor = make_frontier_engine(num_blocks=20, num_snapshots=3)
    running = other.submit([*prompt[:50], 3], replace(DRAW, max_tokens=60))
    next(running)
    written, restore_block = [], executor.restore_block
    monkeypatch.setattr(executor, "restore_block", lambda *args: (written.append(args[0]), restore_block(*args)))
    for num_new in (2, 0):  # three whole blocks are the running request's; the second time all are there
        written.clear()
        assert other.load_session(tmp_path / "s").cached_tokens == 69
        assert len(written) == num_new
        assert list(last_of(other, prompt).token_ids) == expected(prompt)
    assert list(list(running)[-1].token_ids) == expected([*prompt[:50], 3], replace(DRAW, max_tokens=60))


def test_a_session_brings_all_its_snapshots_only_where_they_push_nobody_out(tmp_path):
    engine, _ = make_frontier_engine(num_snapshots=8)
    prompt = prompt_of(300)
    for length in (100, 200, 300):
        last_of(engine, prompt[:length])
    engine.save_session(tmp_path / "s", prompt)
    for num_snapshots, cached in ((16, 96), (4, 0)):
        other, _ = make_frontier_engine(num_snapshots=num_snapshots)
        mine = [prompt_of(40, seed) for seed in (1, 2)]
        for one in mine:
            last_of(other, one, replace(DRAW, max_tokens=1))
        other.load_session(tmp_path / "s")
        for one in mine:
            assert last_of(other, one, replace(DRAW, max_tokens=1)).cached_tokens == 2 * BLOCK
        assert last_of(other, [*prompt[:150], 201]).cached_tokens == cached


def test_the_file_is_private_whole_or_absent(tmp_path, monkeypatch):
    """Bug class: conversations readable by everybody; half a file under the name of a whole one."""
    engine, executor = make_frontier_engine()
    path = tmp_path / "s"
    engine.save_session(path, prompt_of(50))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()

    def broken(block_id, out):
        raise ValueError("boom")

    monkeypatch.setattr(executor, "copy_block", broken)
    with pytest.raises(InternalError, match="boom"):
        engine.save_session(path, prompt_of(60))
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["s"]
    assert engine.stats().num_used_blocks == 0


def cause(engine, path):
    """The error of loading ``path``, after checking that the engine is as it was."""
    before, accounts = engine.stats(), engine._memory.accounts()
    with pytest.raises(HotsetError) as caught:
        engine.load_session(path)
    assert engine.stats() == before and engine._memory.accounts() == accounts
    engine._memory.check_integrity(())
    assert caught.value.hint
    return caught.value


def test_damage_anywhere_is_noticed_and_changes_nothing(tmp_path):
    """Bug class: a flipped bit becomes another answer."""
    path = tmp_path / "s"
    engine, _ = make_frontier_engine()
    engine.save_session(path, prompt_of(50))
    whole = path.read_bytes()
    last_of(engine, prompt_of(40, 1))
    for at in {*range(0, len(whole), 41), *range(60), len(whole) - 1}:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        error = cause(engine, path)
        assert isinstance(error, MachineError) and str(path) in error.message
        assert any(word in error.message for word in ("damaged", "not a session", "of version"))


def test_a_damaged_header_is_not_taken_for_another_model(tmp_path):
    path = tmp_path / "s"
    engine, _ = make_frontier_engine()
    engine.save_session(path, prompt_of(50))
    path.write_bytes(path.read_bytes().replace(b'"weights":"weights"', b'"weights":"weightz"'))
    assert "damaged: the checksum of its header" in cause(engine, path).message


def test_a_file_of_another_length_is_noticed(tmp_path):
    path = tmp_path / "s"
    engine, _ = make_frontier_engine()
    engine.save_session(path, prompt_of(50))
    whole = path.read_bytes()
    for length in {0, 1, 15, 16, 55, 56, 57, 200, len(whole) - 33, len(whole) - 1}:
        path.write_bytes(whole[:length])
        error = cause(engine, path)
        assert "damaged" in error.message or (length == 0 and "not a session" in error.message)
    path.write_bytes(whole + b"x")
    assert f"has {len(whole) + 1:,} bytes, expected {len(whole):,}" in cause(engine, path).message


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(IDENTITY, model="bigger", weights="x"), "a session of fake, this engine runs bigger"),
        (replace(IDENTITY, weights="x"), "of fake with other weights"),
        (
            replace(IDENTITY, cache=("rows of another kind",)),
            "another format (rows), this engine keeps rows of another",
        ),
        (replace(IDENTITY, kernels="neon"), "computed with numpy kernels, this engine uses neon"),
        (replace(IDENTITY, program="x"), "another version of this model's program"),
    ],
)
def test_a_session_of_another_engine_is_refused_with_the_difference(tmp_path, other, words):
    """Bug class: rows of one model are served to another."""
    path = tmp_path / "s"
    make_frontier_engine()[0].save_session(path, prompt_of(50))
    engine, _ = make_frontier_engine(identity=other)
    error = cause(engine, path)
    assert isinstance(error, RequestError) and words in error.message


def test_a_session_that_does_not_fit_is_refused_with_a_setting_that_does(tmp_path):
    path = tmp_path / "s"
    make_frontier_engine()[0].save_session(path, prompt_of(100))
    error = cause(make_frontier_engine(max_context=100)[0], path)
    assert "holds 100 tokens, this engine takes prompts of at most 99" in error.message and "context=101" in error.hint
    assert "keeps none" in cause(make_frontier_engine(num_snapshots=0)[0], path).message
    engine, _ = make_frontier_engine(num_blocks=9)
    running = engine.submit(prompt_of(20), replace(DRAW, max_tokens=60))
    next(running)
    before = engine._memory.accounts()
    with pytest.raises(RequestError, match="6 more cache blocks, running requests leave 4 of 9"):
        engine.load_session(path)
    assert engine._memory.accounts() == before
    running.cancel()
    assert engine.load_session(path).cached_tokens == 99


def test_a_version_of_tomorrow_is_named(tmp_path):
    path = tmp_path / "s"
    engine, _ = make_frontier_engine()
    engine.save_session(path, prompt_of(50))
    whole = path.read_bytes()
    path.write_bytes(whole[:16] + b"\7\0\0\0" + whole[20:])
    assert "version 7, this hotset" in cause(engine, path).message


def test_what_cannot_be_saved_or_read_is_said(tmp_path):
    engine, _ = make_frontier_engine()
    for what, words in (([5], "a session of 1 tokens"), ([1] * 700, "of 700 tokens"), ([999, 1], "vocabulary")):
        with pytest.raises(RequestError, match=words):
            engine.save_session(tmp_path / "s", what)
    with pytest.raises(MachineError, match=r"cannot write .*nowhere.*No such file"):
        engine.save_session(tmp_path / "nowhere" / "s", [1, 2, 3])
    with pytest.raises(MachineError, match="cannot write"):
        engine.save_session(tmp_path, [1, 2, 3])
    assert not list(tmp_path.iterdir())
    with pytest.raises(MachineError, match=r"cannot read .*No such file"):
        engine.load_session(tmp_path / "s")
    with pytest.raises(MachineError, match="is not a regular file"):
        engine.load_session(tmp_path)
    other, _ = make_frontier_engine()
    foreign = other.submit([1, 2, 3], DRAW)
    next(foreign)
    with pytest.raises(RequestError, match="another engine"):
        engine.save_session(tmp_path / "s", foreign)
    nameless, _ = make_frontier_engine(identity=None)
    for ask in (lambda: nameless.save_session(tmp_path / "s", [1, 2]), lambda: nameless.load_session(tmp_path / "s")):
        with pytest.raises(RequestError, match="not told which model"):
            ask()
    engine.close()
    with pytest.raises(RequestError, match="closed"):
        engine.save_session(tmp_path / "s", [1, 2, 3])


def test_a_file_that_changes_while_it_is_loaded_is_noticed(tmp_path, monkeypatch):
    """Bug class: what was verified is not what is read into the cache."""
    path = tmp_path / "s"
    engine, _ = make_frontier_engine(identity=replace(IDENTITY, program="long" * 9999))
    engine.save_session(path, prompt_of(50))
    verify = SessionFile.verify

    def verify_then_change(session):
        verify(session)
        with path.open("r+b") as file:
            file.seek(-40, 2)
            file.write(b"changed")

    engine.clear_cache()
    monkeypatch.setattr(SessionFile, "verify", verify_then_change)
    before = engine._memory.accounts()
    with pytest.raises(MachineError, match="checksum"):
        engine.load_session(path)
    assert engine._memory.accounts() == before


def test_identity_is_plain_data():
    """The header is written from it and compared with it."""
    assert Identity(**vars(IDENTITY)) == IDENTITY
