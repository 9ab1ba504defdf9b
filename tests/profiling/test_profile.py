"""Profiles say what was measured: points made from known numbers give these numbers back."""

from dataclasses import replace
from itertools import permutations

import pytest

from planner.cli.main import run
from planner.cost.link_fit import price_collective
from planner.cost.op import OpWork, op_s
from planner.cost.tables import CollectiveSample
from planner.errors import ProfileError, RequestError
from planner.hardware.profiles import load_cluster
from planner.hardware.spec import Provenance
from planner.profiling.dispatch_terms import COLLECTIVES, SPLIT, SPLIT_LONGER
from planner.profiling.fitted import full_speed_ranks, profile
from planner.profiling.host_terms import SHAPES
from planner.profiling.points import Machine, PointFile, Settings

MACHINE = Machine(
    processor="a CPU", cores=2, torch="2.13.0", device="cpu", memory_bytes=2**34, num_sms=1, ranks=2
)

FULL_SPEED = 1.6
"""Ranks that get on as fast as one alone."""
LAUNCH_S = 20e-6
CALL_S = 2e-6
RATE = 100e9
BYTES_PER_S = {"add": 20e9, "gelu": 5e9, "native_layer_norm": 10e9, "embedding": 8e9}
SCRIPT = {
    "step_s": 5e-3,
    "unit_s": 0.5e-3,
    "collective_s": 2e-3,
    "tensor_s": 0.2e-3,
    "plain_tensor_s": 0.05e-3,
    "message_s": 0.7e-3,
    "full_op_s": 90e-6,
    "selective_op_s": 120e-6,
    "split_op_s": 100e-6,
    "split_collective_s": 300e-6,
}
OPS = {"forward": 6, "again": 4}
ON_PARTS = {SPLIT: 12, SPLIT_LONGER: 30}
"""Of the blocks whose ops torch looks at in Python."""
WAYS = ("none", "full", "selective")
LINK = {"bandwidth": 2e9, "hop_s": 100e-6, "base_s": 200e-6}


def row(kernel, seconds, *, read_bytes=0, flop=0, sizes=(1, 0, 0, 0), phase="forward"):
    batch, m, n, k = sizes
    return {
        "group": kernel, "kernel": kernel, "phase": phase, "dtype": "float32", "shapes": "",
        "batch": batch, "m": m, "n": n, "k": k, "causal": 0, "flop": flop,
        "read_bytes": read_bytes, "write_bytes": 0,
        "seconds": seconds, "seconds_p10": seconds, "seconds_p90": seconds, "repeats": 5,
    }  # fmt: skip


def rows():
    for name, rate in BYTES_PER_S.items():
        yield row(name, CALL_S, read_bytes=8)
        for num_bytes in (2**20, 2**24):
            yield row(name, CALL_S + num_bytes / rate, read_bytes=num_bytes)
    for size in (64, 256, 512):
        flop = 2 * size**3
        yield row("mm", CALL_S + flop / RATE, flop=flop, sizes=(1, size, size, size))
    for phase in ("forward", "backward"):
        for length in (64, 256):
            flop = 4 * 8 * length * length * 32
            yield row(
                "_scaled_dot_product_flash_attention_for_cpu", CALL_S + flop / (RATE / 2),
                flop=flop, sizes=(8, length, length, 32), phase=phase,
            )  # fmt: skip


def script_s(shape):
    blocks, number = shape["blocks"], shape["microbatches"]
    if not shape.get("shares", True):
        return SCRIPT["step_s"] + blocks * shape["tensors"] * SCRIPT["plain_tensor_s"]
    pairs = 1.5 * number if shape["reshards"] else 1
    return (
        SCRIPT["step_s"]
        + blocks * number * SCRIPT["unit_s"]
        + blocks * pairs * SCRIPT["collective_s"]
        + blocks * shape["tensors"] * SCRIPT["tensor_s"]
    )


def dispatch_s():
    """Times of these blocks: as they are, run again, and split with their collectives."""
    plain_s = 20 * LAUNCH_S
    again, forward = OPS["again"], OPS["forward"]
    split_s = plain_s + (ON_PARTS[SPLIT] + COLLECTIVES) * SCRIPT["split_op_s"]
    split_s += COLLECTIVES * SCRIPT["split_collective_s"]
    more = ON_PARTS[SPLIT_LONGER] - ON_PARTS[SPLIT]
    return {
        "none": plain_s,
        "full": plain_s + forward * (LAUNCH_S + SCRIPT["full_op_s"]),
        "selective": plain_s + again * LAUNCH_S + (forward + again) * SCRIPT["selective_op_s"],
        SPLIT: split_s,
        SPLIT_LONGER: split_s + more * (LAUNCH_S + SCRIPT["split_op_s"]),
    }


def collective(kind, payload_bytes, spread=1.0):
    hops, traffic = {"all_gather": (1, 0.5), "all_reduce": (2, 1.0), "send_recv": (1, 1.0)}[kind]
    seconds = LINK["base_s"] + hops * LINK["hop_s"] + traffic * payload_bytes / LINK["bandwidth"]
    return {
        "kind": "collective", "collective": kind, "ranks": 2, "nodes": 1,
        "payload_bytes": payload_bytes, "seconds": seconds, "seconds_p10": seconds,
        "seconds_p90": seconds * spread, "repeats": 5,
    }  # fmt: skip


def points(settings, spread=1.0):
    """What a machine with the numbers above would tell."""
    tiny = [row("add", 0.0, read_bytes=8)] * 10
    yield {"kind": "overhead", "calls": tiny, "seconds": 10 * LAUNCH_S}
    yield {"kind": "residue", "used_bytes": 2**28}
    yield {"kind": "op", "rows": list(rows())}
    turns = settings.processes / FULL_SPEED
    for kind in ("all_gather", "all_reduce", "send_recv"):
        for payload in (2**12, 2**18, 2**24):
            point = collective(kind, payload, spread)
            if kind != "send_recv":  # twice as long after work of 4 ms as alone
                between = {"own_s": 0.004, "both_s": point["seconds"] + turns * 0.004}
                point |= {"seconds": point["seconds"] / 2, **between}
            yield point
    runs = [{"shape": shape, "calls": [], "seconds": script_s(shape)} for shape in SHAPES]
    yield {"kind": "script", "rows": runs}
    yield {
        "kind": "dispatch", "num_split": ON_PARTS,
        **{key: [row("add", 0.0)] * OPS[key] for key in ("forward", "again")},
        "ways": {way: {"seconds": seconds} for way, seconds in dispatch_s().items()},
    }  # fmt: skip
    # Between collectives of 5 ms, each rank works for 4 or 16 ms.
    for own_s in (0.004, 0.016):
        yield {"kind": "work", "own_s": own_s, "both_s": 0.005 + turns * own_s}
    for number in (2, 10):
        yield {
            "kind": "pipeline", "microbatches": number, "stages": 2, "calls": [],
            "seconds": 4e-3 + number * SCRIPT["message_s"],
        }  # fmt: skip
    for elements in (2**16, 2**21):
        yield {"kind": "update", "elements": elements, "seconds": 1e-4 + elements * 3e-9}


def profiled(folder, settings, spread=1.0, *, told=None):
    file = PointFile(folder / "my-points.jsonl", MACHINE, settings)
    for number, point in enumerate(points(settings, spread) if told is None else told):
        file.add({"job": str(number), "wall_s": 1.0, "cpu_s": 1.0, **point})
    found = profile("my", file, MACHINE, settings)
    for name, text in found.files.items():
        (folder / name).write_text(text)
    return found


def settings_of(processes):
    return Settings(processes=processes, hosts=1, quick=True)


def test_the_numbers_come_back(tmp_path):
    profiled(tmp_path, settings_of(2))
    path = str(tmp_path / "my.toml")
    one, two = load_cluster(path, gpus=1), load_cluster(path, gpus=2)
    device = one.device
    assert device.kernel_launch_s == pytest.approx(LAUNCH_S, rel=0.01)
    for name, rate in BYTES_PER_S.items():
        work = OpWork(name=name, kind="memory", flop=0, read_bytes=2**22, write_bytes=0)
        assert op_s(work, device, "float32") == pytest.approx(LAUNCH_S + 2**22 / rate, rel=0.02)
    product = OpWork(
        name="mm", kind="matmul", flop=2 * 512**3, read_bytes=3 * 2**20, write_bytes=2**20,
        m=512, n=512, k=512,
    )  # fmt: skip
    assert op_s(product, device, "float32") == pytest.approx(2 * 512**3 / RATE, rel=0.1)
    script = one.script_host
    assert script is not None
    for name, value in SCRIPT.items():
        assert getattr(script, name) == pytest.approx(value, rel=0.01)
    assert script.element_s == pytest.approx(3e-9, rel=0.01)
    gather = CollectiveSample(
        table="", system="", collective="all_gather", num_ranks=2, num_nodes=1,
        payload_bytes=2**24, setting="", measured_s=0.0,
    )  # fmt: skip
    measured_s = collective("all_gather", 2**24)["seconds"]
    assert price_collective(gather, two) == pytest.approx(measured_s, rel=0.1)


def test_a_rank_alone_knows_no_link(tmp_path, capsys):
    """Its profile plans one rank, and refuses more with what would help."""
    file = PointFile(tmp_path / "my-points.jsonl", MACHINE, settings_of(1))
    alone = [
        point
        for point in points(settings_of(1))
        if point["kind"] in ("overhead", "residue", "op", "script", "dispatch", "update")
    ]
    for point in alone:
        if point["kind"] == "dispatch":
            point |= {
                "num_split": {},
                "ways": {k: v for k, v in point["ways"].items() if k in WAYS},
            }
    for number, point in enumerate(alone):
        file.add({"job": str(number), "wall_s": 1.0, "cpu_s": 1.0, **point})
    found = profile("my", file, MACHINE, settings_of(1))
    for name, text in found.files.items():
        (tmp_path / name).write_text(text)
    assert found.links == ()
    path = str(tmp_path / "my.toml")
    one = load_cluster(path, gpus=1)
    assert one.num_gpus == 1
    assert one.script_host.split_op_s == 0 < one.script_host.full_op_s
    with pytest.raises(RequestError, match="no link between GPUs") as refused:
        load_cluster(path, gpus=2)
    assert "--gpus 1" in refused.value.hint


@pytest.mark.parametrize(
    ("more_s", "ranks"),
    [
        (-0.001, 2.0),  # less than the work of one
        (0.01, 2.0),  # as if each had a core, and there are two
        (0.02, 2.0),
        (0.04, 1.0),  # one after the other
        (0.08, 0.5),  # hosts that share a core
    ],
)
def test_no_more_ranks_get_on_at_full_speed_than_there_are_cores(more_s, ranks):
    works = [
        {"kind": "work", "own_s": own_s, "both_s": 0.02 + more_s * (own_s > 0.01)}
        for own_s in (0.005, 0.015)
    ]
    assert full_speed_ranks(MACHINE, settings_of(4), works) == pytest.approx(ranks)
    assert full_speed_ranks(MACHINE, settings_of(4), []) == MACHINE.cores
    assert full_speed_ranks(MACHINE, settings_of(1), []) == 1


def test_what_else_runs_for_a_moment_does_not_slow_ranks_down():
    quiet, disturbed = ((0.005, 0.01), (0.015, 0.02)), ((0.005, 0.02), (0.015, 0.06))
    for times in permutations((quiet, disturbed, quiet)):
        works = [
            {"kind": "work", "own_s": own_s, "both_s": both_s}
            for pair in times
            for own_s, both_s in pair
        ]
        assert full_speed_ranks(MACHINE, settings_of(2), works) == pytest.approx(2.0)


def test_attention_takes_what_its_head_dim_took(tmp_path):
    """Narrow heads may take longer than wider ones, as those of 8 do here."""
    heads = {8: 4e-9, 16: 2e-9, 64: 6e-9}
    name, scores = "_scaled_dot_product_flash_attention_for_cpu", 8 * 64 * 64
    measured = [point for point in points(settings_of(2)) if point["kind"] != "op"]
    ops = [each for each in rows() if each["kernel"] != name]
    for head_dim, score_s in heads.items():
        for phase, factor in (("forward", 1), ("backward", 3)):
            ops.append(row(
                name, CALL_S + factor * score_s * scores, flop=4 * scores * head_dim,
                sizes=(8, 64, 64, head_dim), phase=phase,
            ))  # fmt: skip
    profiled(tmp_path, settings_of(2), told=[*measured, {"kind": "op", "rows": ops}])
    device = load_cluster(str(tmp_path / "my.toml"), gpus=1).device

    def attention_s(head_dim, *, backward):
        work = OpWork(
            name="_scaled_dot_product_flash_attention", kind="attention", batch=2, m=128, n=128,
            k=head_dim, flop=4 * 2 * 128 * 128 * head_dim, backward=backward, read_bytes=0,
            write_bytes=0,
        )  # fmt: skip
        return (op_s(work, device, "float32") - device.kernel_launch_s) / (2 * 128 * 128)

    for head_dim, score_s in {**heads, 40: 4e-9, 128: 12e-9}.items():
        assert attention_s(head_dim, backward=False) == pytest.approx(score_s)
        assert attention_s(head_dim, backward=True) == pytest.approx(3 * score_s)


def test_every_number_says_when_where_and_how(tmp_path):
    found = profiled(tmp_path, settings_of(2))
    cluster = load_cluster(str(tmp_path / "my.toml"), gpus=2)
    assert cluster.measured_on == found.where
    for number in (*cluster.numbers.values(), *cluster.device.numbers.values()):
        if number.provenance is not Provenance.ASSUMED:
            assert "a CPU" in number.source
            assert "2 processes at once" in number.source


def test_ranks_on_shared_cores_get_back_what_they_measured(tmp_path):
    """Written for a core each; as many ranks as were measured take the time they showed."""
    profiled(tmp_path, settings_of(8))
    path = str(tmp_path / "my.toml")
    eight, two = load_cluster(path, gpus=8), load_cluster(path, gpus=2)
    assert eight.device.kernel_launch_s == pytest.approx(4 * two.device.kernel_launch_s)
    assert eight.script_host.step_s == pytest.approx(4 * two.script_host.step_s)
    assert eight.device.op_curves["gelu"][-1][1] == pytest.approx(
        4 * two.device.op_curves["gelu"][-1][1]
    )
    slowed = eight.device.kernel_launch_s / load_cluster(path, gpus=1).device.kernel_launch_s
    assert slowed == pytest.approx(8 / FULL_SPEED)
    measured_s = collective("send_recv", 2**24)["seconds"]
    link = eight.links[0]
    found_s = link.base_latency_s + link.latency_s + 2**24 / link.bandwidth_bytes_per_s
    assert found_s == pytest.approx(measured_s, rel=0.1)


def test_repeats_that_differ_are_not_written_as_measured(tmp_path):
    profiled(tmp_path, settings_of(2), spread=3.0)
    cluster = load_cluster(str(tmp_path / "my.toml"), gpus=2)
    latency = cluster.links[0].numbers["latency_us_per_hop"]
    assert latency.provenance is Provenance.ASSUMED
    assert "repeats differ 3.0 times" in latency.source


def test_a_rank_that_ends_early_leaves_no_profile(tmp_path, capsys):
    out = tmp_path / "my.toml"
    arguments = ["profile", "--hosts", "here", "--remote", "false", "--out", str(out)]
    assert run(arguments) == 6
    said = capsys.readouterr().err
    assert "a rank ended before all was measured" in said
    assert not out.exists()
    assert not (tmp_path / "my-device.toml").exists()


def test_a_profile_is_a_toml_file(tmp_path, capsys):
    assert run(["profile", "--out", str(tmp_path / "my.json")]) == 2
    assert "my.toml" in capsys.readouterr().err


def test_a_gpu_is_fitted_by_the_same_points(tmp_path):
    """Its host's terms stay the framework's, and its traffic hides behind compute."""
    gpu = replace(MACHINE, device="a GPU", num_sms=100)
    file = PointFile(tmp_path / "my-points.jsonl", gpu, settings_of(2))
    for number, point in enumerate(points(settings_of(2))):
        file.add({"job": str(number), "wall_s": 1.0, "cpu_s": 1.0, **point})
    for name, text in profile("my", file, gpu, settings_of(2)).files.items():
        (tmp_path / name).write_text(text)
    cluster = load_cluster(str(tmp_path / "my.toml"), gpus=2)
    assert cluster.hides_traffic
    assert cluster.script_host is None
    assert cluster.device.num_sms == 100
    assert cluster.device.op_curves == {}
    assert not load_cluster(str(profiled_path(tmp_path / "cpu")), gpus=2).hides_traffic


def profiled_path(folder):
    folder.mkdir()
    profiled(folder, settings_of(2))
    return folder / "my.toml"


def test_a_profile_of_an_older_version_is_to_be_measured_again(tmp_path):
    path = profiled_path(tmp_path / "cpu")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(("full_op", "split"))))
    with pytest.raises(ProfileError, match="full_op_us, split_op_us, split_collective_us") as found:
        load_cluster(str(path), gpus=2)
    assert f"plan profile --out {path} --force" in found.value.hint
