"""The parts of worker and client that take bytes apart, and its handling of files: they meet everything."""

import json
import os
import stat
import struct
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolgym.envs.sandbox.connection import DockerStream
from toolgym.envs.sandbox.inside import files
from toolgym.envs.sandbox.inside.capture import Capture
from toolgym.envs.sandbox.inside.files import FileError
from toolgym.envs.sandbox.inside.frames import FrameError, FrameReader, encode
from toolgym.envs.sandbox.owners import Owner
from toolgym.envs.sandbox.results import Output, RunResult, RunStatus

LIMIT = 1 << 16
quick = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=5
)
messages = st.dictionaries(st.text(max_size=5).filter(lambda key: key != "parts"), values, max_size=4)
frames = st.tuples(messages, st.lists(st.binary(max_size=50), max_size=3))


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """Data cut at some places."""
    ends = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(ends)]


# --- frames ---


@quick
@given(st.lists(frames, max_size=4), st.lists(st.integers(min_value=0), max_size=8))
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    sent: list[tuple[dict[str, object], list[bytes]]], cuts: list[int]
) -> None:
    reader = FrameReader(LIMIT)
    data = b"".join(encode(message, *parts) for message, parts in sent)
    assert [frame for piece in pieces(data, cuts) for frame in reader.feed(piece)] == sent


@quick
@given(frames)
def test_a_frame_is_whole_at_its_last_byte_and_not_before(sent: tuple[dict[str, object], list[bytes]]) -> None:
    reader = FrameReader(LIMIT)
    *first, last = encode(sent[0], *sent[1])
    for byte in first:
        assert reader.feed(bytes([byte])) == []
    assert reader.feed(bytes([last])) == [sent]


@quick
@given(st.binary(max_size=200))
def test_garbage_raises_nothing_but_frame_errors(data: bytes) -> None:
    with_head = struct.pack(">II", len(data) // 2, len(data) - len(data) // 2) + data
    for garbage in (data, with_head):
        try:
            for message, parts in FrameReader(LIMIT).feed(garbage):
                assert isinstance(message, dict)
                assert all(isinstance(part, bytes) for part in parts)
        except FrameError:
            pass


@quick
@given(messages | values, st.binary(max_size=20), values)
def test_parts_that_do_not_add_up_are_an_error(message: object, binary: bytes, lengths: object) -> None:
    body = {**message, "parts": lengths} if isinstance(message, dict) else message
    text = json.dumps(body).encode("ascii")
    data = struct.pack(">II", len(text), len(binary)) + text + binary
    sums = isinstance(lengths, list) and all(type(n) is int and n >= 0 for n in lengths) and sum(lengths) == len(binary)
    if isinstance(message, dict) and sums:
        assert len(FrameReader(LIMIT).feed(data)) == 1
    else:
        with pytest.raises(FrameError):
            FrameReader(LIMIT).feed(data)


@quick
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_a_frame_that_is_too_long_is_refused_by_its_head(text: int, binary: int) -> None:
    reader = FrameReader(LIMIT)
    head = struct.pack(">II", text, binary)
    if text + binary > LIMIT:
        with pytest.raises(FrameError, match=f"at most {LIMIT} are allowed"):
            reader.feed(head)
    elif text + binary:
        assert reader.feed(head) == []
    else:
        with pytest.raises(FrameError, match="no JSON"):
            reader.feed(head)


def test_a_message_nested_too_deep_is_an_error() -> None:
    text = b"[" * 50_000 + b"]" * 50_000
    with pytest.raises(FrameError):
        FrameReader(1 << 20).feed(struct.pack(">II", len(text), 0) + text)


# --- Docker's stream ---


@quick
@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.binary(max_size=40)), max_size=8),
    st.lists(st.integers(min_value=0), max_size=12),
)
def test_dockers_stream_is_taken_apart_however_it_is_cut(parts: list[tuple[int, bytes]], cuts: list[int]) -> None:
    data = b"".join(struct.pack(">BxxxI", stream, len(text)) + text for stream, text in parts)
    taken = DockerStream()
    out = b"".join(taken.feed(piece) for piece in pieces(data, cuts))
    assert out == b"".join(text for stream, text in parts if stream == 1)
    assert taken.trace == b"".join(text for stream, text in parts if stream != 1)[-4_096:]


def test_of_dockers_stderr_the_last_is_kept() -> None:
    taken = DockerStream()
    for k in range(10):
        assert taken.feed(struct.pack(">BxxxI", 2, 1_000) + bytes([k]) * 1_000) == b""
    assert len(taken.trace) == 4_096
    assert taken.trace[-1_000:] == bytes([9]) * 1_000


# --- output ---


@quick
@given(st.integers(1, 40), st.lists(st.binary(max_size=60), max_size=8))
def test_head_and_tail_are_kept_whatever_the_pieces(limit: int, parts: list[bytes]) -> None:
    capture, whole = Capture(limit), b"".join(parts)
    for part in parts:
        capture.feed(part)
    head, tail = capture.kept
    assert capture.total == len(whole)
    assert len(head) + len(tail) == min(limit, len(whole))
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert Output(head, tail, capture.total).dropped == max(0, len(whole) - limit)


@quick
@given(st.text(max_size=40), st.integers(1, 60))
def test_text_that_fits_is_told_unchanged_though_it_was_cut_in_mid_character(text: str, limit: int) -> None:
    data = text.encode("utf-8", "surrogatepass")
    capture = Capture(max(limit, len(data)))
    capture.feed(data)
    head, tail = capture.kept
    assert Output(head, tail, capture.total).text == data.decode("utf-8", "replace")


@quick
@given(st.binary(max_size=60), st.binary(max_size=60), st.integers(1, 10**9))
def test_text_of_what_was_cut_is_always_text_and_says_so(head: bytes, tail: bytes, dropped: int) -> None:
    output = Output(head, tail, len(head) + len(tail) + dropped)
    assert f"[... {dropped} bytes dropped ...]" in output.text
    output.text.encode("utf-8")


@quick
@given(st.sampled_from(RunStatus), st.none() | st.integers(0, 255), st.binary(max_size=9), st.binary(max_size=9))
def test_a_result_always_has_words_for_the_model(
    status: RunStatus, exit_code: int | None, out: bytes, err: bytes
) -> None:
    result = RunResult(status, exit_code, None, Output(out, b"", len(out)), Output(err, b"", len(err)))
    assert result.text
    result.text.encode("utf-8")


# --- files ---

names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..")
)
paths = st.lists(names, min_size=1, max_size=4).map("/".join)
contents = st.lists(st.binary(max_size=30), min_size=1, max_size=3)


@pytest.fixture
def workspace(tmp_path: Path) -> str:
    (tmp_path / "workspace").mkdir()
    return str(tmp_path / "workspace")


def inside(root: str) -> set[str]:
    return {entry[0] for entry in files.listing(root, ".")}


@quick
@given(path=paths, data=contents)
def test_what_was_put_is_got_and_listed_and_wiped(workspace: str, path: str, data: list[bytes]) -> None:
    for k, piece in enumerate(data):
        files.put(workspace, path, piece, first=k == 0)
    whole = b"".join(data)
    assert files.get(workspace, path, 0, 1_000) == (len(whole), whole)
    assert files.get(workspace, path, 5, 7) == (len(whole), whole[5:12])
    *folders, _ = path.split("/")
    above = [("/".join(folders[: k + 1]), 0, True) for k in range(len(folders))]
    assert files.listing(workspace, "") == sorted([*above, (path, len(whole), False)])
    assert files.wipe([workspace]) == 0
    assert os.listdir(workspace) == []


@quick
@given(path=st.text(max_size=30))
def test_a_path_leads_into_the_workspace_or_is_refused(workspace: str, path: str) -> None:
    before = sorted(os.listdir(os.path.dirname(workspace)))
    try:
        files.put(workspace, path, b"x", first=True)
    except FileError:
        pass
    else:
        assert files.get(workspace, path, 0, 9) == (1, b"x")
        assert inside(workspace)
    assert sorted(os.listdir(os.path.dirname(workspace))) == before
    files.wipe([workspace])


@pytest.mark.parametrize(
    "path", ["", ".", "/", "..", "a/..", "../a", "/a", "a\0", "\ud800", "a/\ud800", "n" * 256, "missing/../a"]
)
def test_what_is_no_path_is_refused_with_words(workspace: str, path: str) -> None:
    with pytest.raises(FileError):
        files.put(workspace, path, b"x", first=True)
    with pytest.raises(FileError):
        files.get(workspace, path, 0, 1)
    assert os.listdir(workspace) == []


def test_links_are_not_followed_but_replaced(workspace: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    os.symlink(outside, f"{workspace}/folder")
    os.symlink(outside / "secret", f"{workspace}/file")
    for path in ("folder/secret", "file"):
        with pytest.raises(FileError):
            files.get(workspace, path, 0, 9)
    for path in ("folder", "folder/secret"):
        with pytest.raises(FileError):
            files.listing(workspace, path)
    with pytest.raises(FileError):
        files.put(workspace, "folder/new", b"x", first=True)
    assert inside(workspace) == {"folder", "file"}
    files.put(workspace, "file", b"mine", first=True)
    assert files.get(workspace, "file", 0, 9) == (4, b"mine")
    assert files.wipe([workspace]) == 0
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"secret": "secret"}


def test_a_pipe_does_not_block(workspace: str) -> None:
    os.mkfifo(f"{workspace}/pipe")
    with pytest.raises(FileError, match="not a plain file"):
        files.get(workspace, "pipe", 0, 1)
    with pytest.raises(FileError):
        files.put(workspace, "pipe", b"x", first=False)
    files.put(workspace, "pipe", b"x", first=True)
    assert stat.S_ISREG(os.stat(f"{workspace}/pipe").st_mode)


def test_what_is_too_much_or_too_deep_to_be_listed_is_refused(workspace: str) -> None:
    for k in range(files.MAX_ENTRIES):
        os.mknod(f"{workspace}/{k}")
    assert len(files.listing(workspace, ".")) == files.MAX_ENTRIES
    os.mknod(f"{workspace}/more")
    with pytest.raises(FileError, match="too much"):
        files.listing(workspace, ".")
    assert files.wipe([workspace]) == 0
    files.put(workspace, "d/" * 300 + "leaf", b"x", first=True)
    with pytest.raises(FileError, match="levels"):
        files.listing(workspace, ".")
    assert files.wipe([workspace]) == 0


@settings(quick, max_examples=30)
@given(
    st.lists(
        st.tuples(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=4), st.sampled_from("dlpf")),
        max_size=12,
    ),
    st.integers(0, 0o777),
)
def test_a_wipe_meets_every_kind_of_entry_under_any_name(
    workspace: str, entries: list[tuple[list[bytes], str]], mode: int
) -> None:
    made = []
    for parts, kind in entries:
        path = b"/".join(part.translate(None, b"/\0").strip(b".") or b"x" for part in parts)
        full = os.fsencode(workspace) + b"/" + path
        try:
            os.makedirs(os.path.dirname(full), exist_ok=True)
            if kind == "d":
                os.mkdir(full)
            elif kind == "l":
                os.symlink("/", full)
            elif kind == "p":
                os.mkfifo(full)
            else:
                os.mknod(full)
        except (FileExistsError, NotADirectoryError):
            continue
        made.append(full)
    files.listing(workspace, ".")
    for full in reversed(made):
        if not os.path.islink(full):
            os.chmod(full, mode)
    assert files.wipe([workspace]) == 0
    assert os.listdir(workspace) == []


def test_a_wipe_of_what_is_deeper_than_there_are_descriptors(workspace: str) -> None:
    here = os.open(workspace, os.O_RDONLY)
    for _ in range(1_500):
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    before = len(os.listdir("/proc/self/fd"))
    assert files.wipe([workspace]) == 0
    assert os.listdir(workspace) == []
    assert len(os.listdir("/proc/self/fd")) == before


# --- owners ---

words = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), max_size=20)


@quick
@given(words, words, st.integers(0, 2**40), st.integers(0, 2**63))
def test_an_owner_comes_back_from_its_label(boot: str, namespace: str, pid: int, started: int) -> None:
    owner = Owner(boot, namespace, pid, started)
    assert Owner.parse(str(owner)) == owner


@quick
@given(st.text(max_size=40) | st.lists(st.text(max_size=5), min_size=4, max_size=4).map("/".join))
def test_a_label_that_names_no_owner_is_none_of_ours(label: str) -> None:
    owner = Owner.parse(label)
    assert owner is None or not owner.known or not owner.alive


def test_this_process_knows_itself_and_that_a_later_one_of_its_number_is_another() -> None:
    me = Owner.me()
    assert (me.known, me.alive) == (True, True)
    assert Owner.parse(str(me)) == me
    assert not Owner(me.boot, me.namespace, me.pid, me.started + 1).alive
    assert not Owner("another boot", me.namespace, me.pid, me.started).known
