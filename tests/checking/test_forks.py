"""Calls in forks of a process that has imported what they need."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from planner.checking import forks as forking
from planner.checking.forks import Forks, forks_of

MODULE = """
import os, sys, time
from pathlib import Path

STARTED = os.getpid()


def note(file, wait_for=None, kill=None, error=None):
    print("said")
    print("warned", file=sys.stderr)
    Path(file).write_text(f"{os.getpid()} {STARTED} {os.environ.get('ASKED')} {os.getcwd()}")
    while wait_for and not Path(wait_for).exists():
        time.sleep(0.01)
    if kill:
        os.kill(os.getpid(), kill)
    if error:
        raise ValueError(error)
"""


@pytest.fixture
def forks(tmp_path):
    (tmp_path / "noting.py").write_text(MODULE)
    return Forks("noting", "note", {"PYTHONPATH": str(tmp_path)})


def noted(file):
    mine, started, asked, folder = file.read_text().split()
    return int(mine), int(started), asked, folder


def test_calls_are_forks_of_one_process_that_is_kept(forks, tmp_path):
    files = [tmp_path / str(index) for index in range(4)]
    for pair in (files[:2], files[2:]):
        ended = forks.call([{"file": str(file)} for file in pair])
        assert [each.code for each in ended] == [0, 0]
        assert all("said" in each.printed and "warned" in each.printed for each in ended)
    seen = [noted(file) for file in files]
    assert len({mine for mine, *_ in seen}) == 4
    assert len({started for _, started, *_ in seen}) == 1
    assert os.getpid() not in {started for _, started, *_ in seen}


def test_calls_of_a_request_run_at_once(forks, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    ended = forks.call(
        [
            {"file": str(first), "wait_for": str(second)},
            {"file": str(second), "wait_for": str(first)},
        ]
    )
    assert [each.code for each in ended] == [0, 0]


def test_environment_and_folder_are_those_of_the_call(forks, tmp_path, monkeypatch):
    for asked in ("one", "two"):
        (tmp_path / asked).mkdir()
        monkeypatch.chdir(tmp_path / asked)
        monkeypatch.setenv("ASKED", asked)
        forks.call([{"file": str(tmp_path / "seen")}])
        assert noted(tmp_path / "seen")[2:] == (asked, str(tmp_path / asked))


def test_a_failed_call_tells_its_code_and_trace_and_harms_no_other(forks, tmp_path):
    file = str(tmp_path / "seen")
    failed, killed, sound = forks.call(
        [{"file": file, "error": "no such luck"}, {"file": file, "kill": 9}, {"file": file}]
    )
    assert failed.code == 1
    assert "ValueError: no such luck" in failed.printed
    assert killed.code == -signal.SIGKILL
    assert sound.code == 0


def test_after_an_end_it_is_started_again(forks, tmp_path):
    file = tmp_path / "seen"
    forks.call([{"file": str(file)}])
    first = noted(file)[1]
    os.kill(first, signal.SIGKILL)
    assert forks.call([{"file": str(file)}])[0].code == -signal.SIGKILL
    assert forks.call([{"file": str(file)}])[0].code == 0
    assert noted(file)[1] != first


def test_a_module_that_is_not_there_is_a_failed_call():
    (ended,) = Forks("no_such_module", "note", {}).call([{}])
    assert ended.code == 1
    assert "No module named 'no_such_module'" in ended.printed


def test_after_a_while_without_calls_nothing_is_left(forks, tmp_path, monkeypatch):
    monkeypatch.setattr(forking, "IDLE_S", 0.0)  # here alone: what is forked waits a minute
    file = tmp_path / "seen"
    forks.call([{"file": str(file)}])
    first = noted(file)[1]
    forks.call([{"file": str(file)}])
    assert noted(file)[1] != first
    assert not is_there(first)


def test_serving_ends_by_itself():
    code = "import planner.checking.forks as f; f.IDLE_S = 0.1; f.serve(print)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as server:
        assert server.wait(timeout=60) == 0  # though its stdin is open


def test_an_interrupt_ends_the_calls(forks, tmp_path):
    """By another signal than Ctrl-C's, which processes in the background ignore."""
    file = tmp_path / "seen"

    def interrupt(*_):
        raise KeyboardInterrupt

    def interrupt_later():
        while not (file.exists() and file.read_text()):
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=interrupt_later)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            forks.call([{"file": str(file), "wait_for": str(tmp_path / "never")}])
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert not is_there(noted(file)[0])
    assert forks.call([{"file": str(file)}])[0].code == 0


def test_who_asks_for_the_same_gets_the_same():
    one = forks_of("noting", "note", (("A", "1"),))
    assert forks_of("noting", "note", (("A", "1"),)) is one
    assert forks_of("noting", "note", (("A", "2"),)) is not one


def is_there(process):
    """Whether it runs on; one that has ended may not have been waited for."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True
        ).stdout
        if not state or state.startswith("Z"):
            return False
        time.sleep(0.01)
    return True
