import shutil

import pytest

from planner.cli.main import run
from planner.hardware.profiles import PROFILES_FOLDER, list_clusters


@pytest.mark.parametrize("arguments", [["profiles"], ["profiles", "list"]])
def test_the_clusters_are_listed(capsys, arguments):
    assert run(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for name in list_clusters():
        assert f"\n{name} " in out


@pytest.mark.parametrize("name", list_clusters())
def test_every_number_is_shown_with_its_source(capsys, name):
    assert run(["profiles", "show", name]) == 0
    out = capsys.readouterr().out
    assert f"Cluster {name}" in out
    assert "memory_gib = " in out
    assert "achieved_fraction = " in out
    assert any(word in out for word in ("measured", "fitted", "datasheet", "assumed"))


def test_an_own_cluster_is_shown_by_its_path(tmp_path, capsys):
    own = tmp_path / "own.toml"
    shutil.copy(PROFILES_FOLDER / "clusters" / "h100-sxm.toml", own)
    own.write_text(own.read_text().replace('name = "h100-sxm"', 'name = "own"', 1))
    assert run(["profiles", "show", str(own)]) == 0
    assert "Cluster own" in capsys.readouterr().out


def test_an_unknown_cluster_ends_with_6(capsys):
    assert run(["profiles", "show", "h1000"]) == 6
    out, err = capsys.readouterr()
    assert out == ""
    assert "h100-sxm" in err


def test_a_new_cluster_is_written_and_plans(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["profiles", "new", "mine", "--like", "a100-80gb-sxm"]) == 0
    assert "--cluster mine.toml" in " ".join(capsys.readouterr().out.split())
    device = tmp_path / "mine-device.toml"
    device.write_text(device.read_text().replace("\nmemory_gib = ", "\nmemory_gib = 1", 1))
    assert run(["profiles", "show", "mine.toml"]) == 0
    assert "stated by user" in capsys.readouterr().out
    assert run(["profiles", "new", "mine", "--like", "a100-80gb-sxm"]) == 2
    assert "mine.toml" in capsys.readouterr().err
