"""Emulated clusters: rates, and what a killed run leaves behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from network import Network, emulated, remove_leftovers, shape, why_not

REASON = why_not()

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as end:
    start_s = time.perf_counter()
    end.sendall(bytes(int(sys.argv[2])))
    end.recv(1)
    print(8 * int(sys.argv[2]) / (time.perf_counter() - start_s) / 1e6)
"""
RECEIVE = """
import socket, sys
with socket.create_server(("", 5000)) as server:
    print(flush=True)
    with server.accept()[0] as end:
        left = int(sys.argv[1])
        while left:
            left -= len(end.recv(left))
        end.sendall(b".")
"""

BURNT_S = 1.0
BURN = f"""
import time
start_s, own_s = time.perf_counter(), time.process_time()
while time.perf_counter() < start_s + {BURNT_S}:
    pass
print(time.process_time() - own_s)
"""


def mbit_per_s(sender, receiver, num_bytes):
    listen = receiver.command(sys.executable, "-c", RECEIVE, str(num_bytes))
    with subprocess.Popen(listen, stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        command = sender.command(sys.executable, "-c", SEND, receiver.address, str(num_bytes))
        return float(subprocess.run(command, check=True, capture_output=True).stdout)


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines() if line}


def test_links_have_the_rates_of_inside_and_between_which_can_change():
    slow = Network(hosts=2, ranks_per_host=2, inside_mbit_per_s=100, between_mbit_per_s=10)
    before = namespaces()
    with emulated(slow) as hosts:
        # A host has the rates of its ranks together, after a burst; a busy machine sends less.
        assert mbit_per_s(hosts[0], hosts[0], 2_500_000) < 210
        assert mbit_per_s(hosts[0], hosts[1], 500_000) < 21
        shape(hosts, replace(slow, between_mbit_per_s=1000))
        assert mbit_per_s(hosts[0], hosts[1], 2_500_000) > 30
    assert namespaces() <= before


def test_a_host_has_its_share_of_the_cores():
    """It may use that, and no more where others wait; how much is left is for other work to say."""
    cores = os.sched_getaffinity(0)
    pair = Network(hosts=2, ranks_per_host=1, inside_mbit_per_s=9, between_mbit_per_s=9)
    with emulated(pair) as hosts:
        for host in hosts:
            assert given_cores(host.namespace) == len(cores) / 2
        burn = hosts[0].command(sys.executable, "-c", BURN)
        found = [subprocess.Popen(burn, stdout=subprocess.PIPE) for _ in cores]
        used_s = sum(float(each.communicate()[0]) for each in found)
    assert 0 < used_s < 1.3 * BURNT_S * len(cores) / 2


def given_cores(name):
    """How many cores a group may use, as the kernel has it."""
    for root in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")):
        group = root / name
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
            return int(quota) / int(period)
        if (group / "cpu.cfs_quota_us").exists():
            quota, period = (group / f"cpu.cfs_{each}_us" for each in ("quota", "period"))
            return int(quota.read_text()) / int(period.read_text())
    raise FileNotFoundError(name)


def test_what_a_killed_run_leaves_is_removed():
    code = (
        "import subprocess, time; from network import *\n"
        "network = Network(hosts=2, ranks_per_host=1, inside_mbit_per_s=9, between_mbit_per_s=9)\n"
        "with emulated(network) as hosts:\n"
        "    rank = subprocess.Popen(hosts[0].command('sleep', '100'))\n"
        "    print(hosts[0].namespace, rank.pid, flush=True)\n"
        "    time.sleep(100)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
    )
    with run:
        namespace, rank = run.stdout.readline().split()
        assert namespace in namespaces()
        assert namespace not in remove_leftovers()  # it runs
        run.send_signal(signal.SIGKILL)
    assert namespace in remove_leftovers()
    assert namespace not in namespaces()
    assert ended(int(rank), limit_s=10)


def ended(pid, *, limit_s):
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
