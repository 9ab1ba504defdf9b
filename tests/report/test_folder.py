from pathlib import Path

import pytest

from planner.errors import RequestError
from planner.report import folder as folder_module
from planner.report.folder import check_folder, free_folder, write_file, write_folder

FILES = {"plan.json": "{}\n", "train.py": "print()\n"}


def listing(path):
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*"))


def test_a_new_folder_appears_with_all_files(tmp_path):
    target = tmp_path / "plans" / "gpt"
    written = write_folder(target, FILES, force=False)
    assert written == (target / "plan.json", target / "train.py")
    assert (target / "train.py").read_bytes() == b"print()\n"
    assert listing(tmp_path) == ["plans", "plans/gpt", "plans/gpt/plan.json", "plans/gpt/train.py"]


def test_an_empty_folder_is_filled(tmp_path):
    write_folder(tmp_path, FILES, force=False)
    assert listing(tmp_path) == ["plan.json", "train.py"]


def test_a_folder_with_files_is_kept_as_it_is(tmp_path):
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(RequestError, match="not empty") as caught:
        write_folder(tmp_path, FILES, force=False)
    assert "--force" in caught.value.hint
    assert listing(tmp_path) == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "mine"


def test_force_replaces_its_own_files_only(tmp_path):
    (tmp_path / "train.py").write_text("old")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "weights").write_text("precious")
    write_folder(tmp_path, FILES, force=True)
    assert (tmp_path / "train.py").read_text() == "print()\n"
    assert (tmp_path / "checkpoint" / "weights").read_text() == "precious"
    assert listing(tmp_path) == ["checkpoint", "checkpoint/weights", "plan.json", "train.py"]


def test_what_an_earlier_plan_left_of_its_own_goes(tmp_path):
    """And nothing else: a plan's folder holds what its script runs."""
    owned = ["runtime/stages.py", "runtime/log.py"]
    write_folder(tmp_path, {"runtime/stages.py": "old", "runtime/log.py": "old"}, force=False)
    (tmp_path / "runtime" / "mine.py").write_text("precious")
    write_folder(tmp_path, {"runtime/log.py": "new"}, force=True, owned=owned)
    assert listing(tmp_path) == ["runtime", "runtime/log.py", "runtime/mine.py"]
    assert (tmp_path / "runtime" / "log.py").read_text() == "new"


def test_nothing_is_half_written_when_the_disk_is_full(tmp_path, monkeypatch):
    target = tmp_path / "gpt"
    real_write = folder_module.Path.write_text

    def failing_write(path, *args, **kwargs):
        if path.name == "train.py":
            raise OSError(28, "No space left on device")
        return real_write(path, *args, **kwargs)

    monkeypatch.setattr(folder_module.Path, "write_text", failing_write)
    with pytest.raises(RequestError, match="No space left on device"):
        write_folder(target, FILES, force=False)
    assert listing(tmp_path) == []


def test_a_path_below_a_file_is_refused_before_any_work(tmp_path):
    (tmp_path / "notes").write_text("")
    with pytest.raises(RequestError, match="is a file, not a folder"):
        check_folder(tmp_path / "notes" / "gpt", force=False)


def test_an_unwritable_place_is_refused_before_any_work(tmp_path, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folder_module.Path, "mkdir", refuse)
    with pytest.raises(RequestError, match="cannot be written: Permission denied"):
        check_folder(tmp_path / "gpt", force=False)


def test_checking_leaves_nothing_behind(tmp_path):
    check_folder(tmp_path / "a" / "b", force=False)
    assert listing(tmp_path) == []


def test_a_free_name_is_found(tmp_path):
    wanted = tmp_path / "gpt"
    assert free_folder(wanted) == wanted
    wanted.mkdir()
    assert free_folder(wanted) == wanted
    (wanted / "plan.json").write_text("")
    assert free_folder(wanted) == tmp_path / "gpt-2"
    (tmp_path / "gpt-2").write_text("a file of that name")
    assert free_folder(wanted) == tmp_path / "gpt-3"


def test_a_file_is_written_with_its_folders(tmp_path):
    file = tmp_path / "a" / "b.csv"
    write_file(file, "x\n", option="--ops", force=False)
    assert file.read_bytes() == b"x\n"
    assert listing(tmp_path) == ["a", "a/b.csv"]


def test_a_file_is_replaced_on_demand_only(tmp_path):
    file = tmp_path / "b.csv"
    file.write_text("mine")
    with pytest.raises(RequestError, match="exists") as caught:
        write_file(file, "x", option="--ops", force=False)
    assert "--force" in caught.value.hint
    assert file.read_text() == "mine"
    write_file(file, "x", option="--ops", force=True)
    assert file.read_text() == "x"
    assert listing(tmp_path) == ["b.csv"]


def test_a_link_keeps_pointing_to_its_file(tmp_path):
    file, link = tmp_path / "b.csv", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    write_file(link, "x", option="--ops", force=True)
    assert link.is_symlink()
    assert file.read_text() == "x"


def test_a_device_is_written_to_and_not_replaced():
    null = Path("/dev/null")
    write_file(null, "x", option="--ops", force=False)
    assert null.is_char_device()


def test_a_file_in_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RequestError, match="cannot be written"):
        write_file(tmp_path / "file" / "b.csv", "x", option="--ops", force=True)
    assert listing(tmp_path) == ["file"]
