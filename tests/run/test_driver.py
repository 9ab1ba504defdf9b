"""Shared runs: a failure names its script, and ends all ranks."""

import time

import pytest
from launch import run_jobs

pytestmark = pytest.mark.run

WAITS = "import os; os.environ['RANK'] == '0' and time.sleep(600)"
FAILS = "import os; assert os.environ['RANK'] == '0', 'no such stage'; time.sleep(600)"


def script(folder, body):
    folder.mkdir()
    (folder / "train.py").write_text(f"import time\n\ndef main(arguments):\n    {body}\n")
    return folder


def test_the_first_rank_to_fail_names_its_script_and_ends_the_others(tmp_path):
    sound, broken = script(tmp_path / "sound", "pass"), script(tmp_path / "broken", FAILS)
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)rank 1 ended with 1.*-- broken.*no such stage"):
        run_jobs([(sound, []), (broken, ["--steps", "1"])], num_processes=2)
    assert time.monotonic() - begin < 500


def test_ranks_that_hang_are_ended(tmp_path):
    hanging = script(tmp_path / "hanging", WAITS)
    with pytest.raises(AssertionError, match=r"rank 0 still ran after 5 s"):
        run_jobs([(hanging, [])], num_processes=2, timeout_s=5)
