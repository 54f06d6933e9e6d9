"""Which generation of a state counts, which checkpoint is whole and whose it is, what is pruned."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.storage.checkpoint_files import read_shard_sizes
from runner.storage.checkpoint_layouts import Layout, recognize_layout
from runner.storage.checkpoints import choose, examine, newest, prune, went_back


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "weights").write_text("x")
    return folder


def safetensors(path: Path, *, cut: int = 0, **entry: object) -> Path:
    head = json.dumps(
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}}
    ).encode()
    whole = len(head).to_bytes(8, "little") + head + bytes(8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(whole[: len(whole) - cut])
    return path


def archive(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"never read")
        file.writestr("archive/data/0", bytes(64))
    return path


def transformers(folder: Path, step: int, *, processes: int = 1, best: str | None = None) -> Path:
    path = folder / f"checkpoint-{step}"
    safetensors(path / "model.safetensors")
    ranks = (
        ["rng_state.pth"]
        if processes == 1
        else [f"rng_state_{rank}.pth" for rank in range(processes)]
    )
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", *ranks):
        archive(path / name)
    (path / "trainer_state.json").write_text(
        json.dumps({"global_step": step, "best_model_checkpoint": best})
    )
    return path


def accelerate(path: Path, *, processes: int = 1) -> Path:
    safetensors(path / "model.safetensors")
    for name in ("optimizer.bin", *(f"random_states_{rank}.pkl" for rank in range(processes))):
        archive(path / name)
    return path


def test_the_newest_checkpoint_is_the_one_with_the_greatest_number(tmp_path: Path) -> None:
    assert newest(made(tmp_path, "step-9", "step-10", "other"), "step-*").name == "step-10"


def test_a_broken_newest_is_passed_over_and_said_so(tmp_path: Path) -> None:
    folder = made(tmp_path, "step-1", "step-2", "step-3")
    (folder / "step-3" / "weights").unlink()
    safetensors(folder / "step-2" / "model.safetensors", cut=1)
    found = newest(folder, "step-*")
    assert found.name == "step-1" and found.step == 1
    assert [name for name, _ in found.passed] == ["step-3", "step-2"]
    assert found.words.startswith(
        "resumes from step-1; skipped step-3: is empty; skipped step-2: model.safetensors has "
    )
    assert examine(safetensors(tmp_path / "good.safetensors")).ok


def test_when_every_checkpoint_is_broken_it_is_said_loudly(tmp_path: Path) -> None:
    folder = made(tmp_path, *(f"step-{step}" for step in range(5)))
    for path in folder.glob("*/weights"):
        path.unlink()
    found = newest(folder, "step-*")
    assert (
        found.name is None
        and found.words.startswith("NO USABLE CHECKPOINT, starting over: skipped step-4")
        and found.words.endswith("and 2 more")
    )
    assert newest(tmp_path / "none", "step-*").words == ""


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "training_args.bin",
        "trainer_state.json",
    ],
)
def test_a_checkpoint_of_transformers_needs_each_of_its_files(name: str, tmp_path: Path) -> None:
    path = transformers(tmp_path, 10)
    assert (
        examine(path, thorough=True).ok
        and examine(path).step == 10
        and examine(path).processes == 1
    )
    (path / name).unlink()
    assert name in examine(path).why or (
        name == "model.safetensors" and "its weights" in examine(path).why
    )


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"]
)
def test_a_state_of_accelerate_needs_each_of_its_files(name: str, tmp_path: Path) -> None:
    path = accelerate(tmp_path / "step_7", processes=3)
    assert (examine(path).kind, examine(path).step, examine(path).processes, examine(path).ok) == (
        "accelerate",
        7,
        3,
        True,
    )
    (path / name).unlink()
    assert not examine(path).ok


def test_a_trainer_killed_right_after_its_weights_left_no_checkpoint(tmp_path: Path) -> None:
    safetensors(tmp_path / "checkpoint-5" / "model.safetensors")
    assert "trainer_state.json" in examine(tmp_path / "checkpoint-5").why


def test_one_made_by_another_number_of_processes_is_not_taken(tmp_path: Path) -> None:
    transformers(tmp_path, 5)
    transformers(tmp_path, 10, processes=2)
    assert newest(tmp_path, "checkpoint-*", processes=2).name == "checkpoint-10"
    one = newest(tmp_path, "checkpoint-*", processes=1)
    assert one.name == "checkpoint-5" and "by 2 processes, but this run has 1 process" in one.words
    assert not newest(tmp_path, "checkpoint-*", processes=4).name
    # The file of rank 0 with a number: there were others, whose files are not there.
    (tmp_path / "checkpoint-10" / "rng_state_1.pth").unlink()
    assert "rank 1" in examine(tmp_path / "checkpoint-10").why


def test_shards_are_counted_by_their_names_and_by_their_index(tmp_path: Path) -> None:
    parts = [f"model-0000{part}-of-00003.safetensors" for part in (1, 2, 3)]
    for part in parts:
        safetensors(tmp_path / "step-1" / part)
    index = tmp_path / "step-1" / "model.safetensors.index.json"
    assert "index.json" in examine(tmp_path / "step-1").why
    index.write_text(json.dumps({"weight_map": dict(zip("abc", parts, strict=True))}))
    assert examine(tmp_path / "step-1").ok
    (tmp_path / "step-1" / parts[2]).unlink()
    assert parts[2] in examine(tmp_path / "step-1").why
    index.write_text(
        json.dumps({"weight_map": {"a": parts[0], "b": "../../elsewhere.safetensors"}})
    )
    assert not examine(tmp_path / "step-1").ok


def test_sharded_optimizers_name_their_ranks() -> None:
    zero = [f"global_step4/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(3)]
    rest = [
        "global_step4/mp_rank_00_model_states.pt",
        "latest",
        "trainer_state.json",
        "training_args.bin",
        "scheduler.pt",
    ]
    ranks = [f"rng_state_{rank}.pth" for rank in range(3)]
    assert recognize_layout([*zero, *rest, *ranks]) == recognize_layout(
        [*zero, *rest, *ranks], folder="checkpoint-4"
    )
    assert (
        recognize_layout([*zero, *rest, *ranks]).processes,
        recognize_layout([*zero, *rest, *ranks]).missing,
    ) == (3, ())
    assert "rank 1" in "".join(recognize_layout([zero[0], zero[2], *rest, *ranks]).missing)
    lone = [
        "pytorch_model/mp_rank_00_model_states.pt",
        "pytorch_model/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "random_states_0.pkl",
        "latest",
    ]
    assert recognize_layout(lone) == Layout("accelerate", 1)
    assert recognize_layout(lone[:3]).missing == ("latest",)
    assert recognize_layout([*lone[:2]]).kind == "deepspeed"
    fsdp = [
        f"{folder}/__{rank}_0.distcp"
        for folder in ("pytorch_model_fsdp_0", "optimizer_0")
        for rank in range(2)
    ]
    assert recognize_layout(fsdp).processes == 2
    assert recognize_layout(fsdp).missing == (
        "optimizer_0/.metadata",
        "pytorch_model_fsdp_0/.metadata",
    )


def test_the_file_latest_of_deepspeed_has_to_name_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-4"
    for name in ("global_step4/mp_rank_00_model_states.pt", "rng_state.pth", "training_args.bin"):
        archive(path / name)
    (path / "trainer_state.json").write_text('{"global_step": 4}')
    (path / "latest").write_text("global_step4")
    assert examine(path).ok
    for text in ("global_st", ""):
        (path / "latest").write_text(text)
        assert "its file `latest` names" in examine(path).why
    (path / "latest").unlink()
    (path / "latest").symlink_to("global_step4")
    assert "cannot be read" in examine(path).why


@pytest.mark.parametrize(
    "name",
    [
        "tmp-checkpoint-3",
        "x.incomplete",
        "a/b.part",
        ".state.unfinished",
        "checkpoint-is-incomplete.txt",
    ],
)
def test_what_is_still_being_written_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    made(tmp_path, "step-1")
    (tmp_path / "step-1" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "step-1" / name).write_text("x")
    assert "incomplete" in examine(tmp_path / "step-1").why


def test_in_a_layout_of_its_own_the_newest_has_to_have_what_the_one_before_it_has(
    tmp_path: Path,
) -> None:
    for step in (1, 2, 3):
        safetensors(tmp_path / f"step-{step}" / f"weights-{step}.safetensors")
        (tmp_path / f"step-{step}" / "optimizer").write_text("x")
    assert newest(tmp_path, "step-*").name == "step-3"
    (tmp_path / "step-3" / "optimizer").unlink()
    assert (
        newest(tmp_path, "step-*").name == "step-2"
        and "it has no optimizer, unlike step-2" in newest(tmp_path, "step-*").words
    )
    # Once a newer one follows it is not the last thing that a killed trainer did.
    safetensors(tmp_path / "step-4" / "weights-4.safetensors")
    assert newest(tmp_path, "step-*").name == "step-4"


def test_a_digest_that_a_checkpoint_brings_is_believed_over_its_form(tmp_path: Path) -> None:
    path = made(tmp_path, "step-000005") / "step-000005"
    record = {"format": 1, "step": 5, "files": {"weights": "0" * 64}, "settings": {"world": 2}}
    (path / "checkpoint.json").write_text(json.dumps(record))
    assert examine(path).ok and examine(path).kind == "recipe" and not examine(path, processes=1).ok
    assert "changed after it was saved" in examine(path, thorough=True).why


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    path = made(tmp_path, "step-1") / "step-1"
    os.mkfifo(path / "model.safetensors")
    assert examine(path).why == "model.safetensors is neither a file nor a directory"
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("nowhere")
    assert "cannot be read" in examine(path).why


@given(
    field=st.sampled_from(["dtype", "shape", "data_offsets"]),
    value=st.from_type(type(None)) | st.integers() | st.text() | st.lists(st.integers()),
)
def test_a_header_that_says_nonsense_is_a_broken_file(
    field: str, value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    path = safetensors(
        tmp_path_factory.getbasetemp() / "nonsense" / "m.safetensors", **{field: value}
    )
    verdict = examine(path, thorough=True)
    assert (
        not verdict.ok
        or value == whole[field]
        or (field == "dtype" and value != "F32")
        or (field == "shape" and value in ([1, 2], [2, 1]))
    )


def test_pruning_keeps_the_newest_whole_ones_and_whatever_is_not_a_checkpoint(
    tmp_path: Path,
) -> None:
    folder = made(tmp_path, "step-1", "step-2", "step-3", "logs")
    (folder / "step-3" / "weights").unlink()
    assert prune(folder, "step-*", 1) == ["step-1"]
    assert sorted(path.name for path in folder.iterdir()) == ["logs", "step-2", "step-3"]


def test_pruning_keeps_as_many_of_each_number_of_processes_and_the_best_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        transformers(tmp_path, step, best="/there/checkpoint-1")
    for step in (4, 5):
        transformers(tmp_path, step, processes=2)
    assert sorted(prune(tmp_path, "checkpoint-*", 1)) == ["checkpoint-2", "checkpoint-4"]


def test_a_generation_made_under_more_is_not_taken_for_less_and_is_not_lost(tmp_path: Path) -> None:
    first = choose(tmp_path, {"steps": 1000})
    assert choose(tmp_path, {"steps": 2000}).path == first.path
    made(first.folder("ckpt"), "step-1")
    fresh = choose(tmp_path, {"steps": 1000})
    assert fresh.path != first.path and "steps=2000" in fresh.note
    assert choose(tmp_path, {"steps": 1000}).path == fresh.path
    assert first.path.is_dir()


def test_a_generation_made_by_other_processes_is_not_taken_and_is_not_lost(tmp_path: Path) -> None:
    two = choose(tmp_path, {}, processes=2)
    made(two.folder("ckpt"), "step-1")
    one = choose(tmp_path, {}, processes=1)
    assert (
        one.path != two.path
        and "by 2 processes, but this run has 1 process; starting over" in one.note
    )
    made(one.folder("ckpt"), "step-1")
    again = choose(tmp_path, {}, processes=2)
    assert (again.path, again.id) == (
        two.path,
        two.id,
    ) and "using the earlier checkpoints" in again.note
    assert one.id != two.id


def test_of_a_generation_without_anything_in_it_nothing_is_said(tmp_path: Path) -> None:
    first = choose(tmp_path, {"steps": 2000})
    first.folder("ckpt").mkdir()
    (first.path / ".incoming" / "ckpt").mkdir(parents=True)
    fresh = choose(tmp_path, {"steps": 1000})
    assert fresh.path != first.path and fresh.note == ""
    made(fresh.folder("ckpt"), "step-1")
    assert (
        choose(tmp_path, {"steps": 500}).note
        == "ignoring checkpoints that were trained with steps=1000, more than requested now; starting over"
    )


def test_a_generation_of_an_older_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "made_under.json").write_text('{"steps": 500}')
    assert choose(tmp_path, {"steps": 100}).path.name == "2"
    assert choose(tmp_path, {"steps": 500}, processes=1).path.name == "2"
    (tmp_path / "1" / "made_under.json").write_text("{")
    assert choose(tmp_path / "none", {"steps": 1}).path.name == "1"


@pytest.mark.parametrize(
    ("restored", "first", "back"),
    [
        (10, 11, False),
        (10, 10, False),
        (10, 9, True),
        (10, 1, True),
        (None, 1, False),
        (10, None, False),
    ],
)
def test_a_training_that_goes_on_tells_no_step_before_its_checkpoint(
    restored: int | None, first: int | None, back: bool
) -> None:
    assert bool(went_back(restored, first)) is back


def test_an_optimizer_in_shards_needs_that_of_every_rank() -> None:
    shards = [f"rank{rank}-of-3-optimizer.pt" for rank in range(3)]
    rest = [
        "trainer_state.json",
        "training_args.bin",
        "scheduler.pt",
        "model.safetensors",
        *(f"rng_state_{rank}.pth" for rank in range(3)),
    ]
    assert recognize_layout([*shards, *rest]) == Layout("transformers", 3)
    assert recognize_layout([shards[0], shards[2], *rest]).missing == ("rank1-of-3-optimizer.pt",)
    assert recognize_layout([*shards[:2], *rest]).missing == ("rank2-of-3-optimizer.pt",)


def test_an_archive_whose_compressed_contents_are_damaged_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "10" / "moments.npz"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("m.npy", bytes(range(256)) * 8)
    assert examine(path.parent, thorough=True).ok
    data = bytearray(path.read_bytes())
    data[60] ^= 0xFF
    path.write_bytes(data)
    assert (
        examine(path.parent, thorough=True).why
        == "moments.npz is a zip archive with a damaged member"
    )


def test_the_size_of_a_shard_is_read_from_its_numbers_alone(tmp_path: Path) -> None:
    shard = {"relative_path": "__0_0.distcp", "offset": 8, "length": 64}
    # Of so many memoized objects, the last are referenced by LONG_BINGET.
    shape: list[object] = []
    other = {"relative_path": "__1_0.distcp", "offset": 8, "length": shape}
    many: list[object] = [[] for _ in range(300)]
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps([*many, shape, shard, other], protocol=2))
    assert read_shard_sizes(path) == {"__0_0.distcp": 72}


@pytest.mark.parametrize("name", ["²", "٣", "3²", "notes"])
def test_a_folder_without_a_number_as_its_name_is_no_generation(name: str, tmp_path: Path) -> None:
    made(tmp_path, "1", name)
    assert choose(tmp_path, {}).path == tmp_path / "1"
