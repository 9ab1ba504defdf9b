"""Every key that a profile or a calibration may hold changes some price.

The keys are those that the readers ask for, so that a new one without effect is found. Each is
changed alone, in a copy of a shipped file, until what is said of some request changes.
"""

import json
import re
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
from run_tables import make_runs

import planner
from planner.errors import InfeasiblePlanError, ProfileError, RequestError
from planner.framework.constants import KEYS
from planner.framework.profiles import list_frameworks, load_framework
from planner.graph.sizes import family
from planner.hardware.fields import FieldReader
from planner.hardware.profiles import (
    PROFILES_FOLDER,
    list_clusters,
    list_devices,
    load_cluster,
    load_device,
)
from planner.validation.pricing import cases
from planner.validation.pricing.case_price import CasePricer
from planner.validation.pricing.workbook import WorkBook

GPT = Path(__file__).resolve().parents[2] / "examples" / "gpt.py"

OWN_PROFILES = Path(__file__).parent / "profiles"
"""A machine as ``plan profile`` writes it, cut short: no shipped one has its keys."""

EXEMPT = {
    "name": "which profile it is",
    "description": "what it is",
    "measured_on": "the machine that its numbers are of, for the screen",
    "format": "the version of the file's form; any other is refused",
    "runs": "which published runs it is for",
    **dict.fromkeys(("host", "links", "ops", "script"), "a table; its own keys are here"),
    "step_time_errors": "a table; its own keys are here",
}
"""Keys that are no part of any price, and what they say."""

LARGE, SMALL = "gpt_1_3b", "build_model"
"""Models of ``examples/gpt.py``: devices take longer than their host, or the other way round."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A layout of a GPT."""

    model: str = LARGE
    cluster: str = "h100-sxm"
    gpus: int = 16
    framework: str | None = None
    dtype: str | None = None
    fix: dict = field(default_factory=dict, hash=False)


def layout(**degrees):
    return {"activation_checkpointing": "none", "microbatch_size": 1, **degrees}


FULL = {"dp_shard": 8, "activation_checkpointing": "full"}

REQUESTS = [
    Request(fix=layout(dp_replicate=2)),
    Request(gpus=8, fix=layout(dp_shard=8, cpu_offload="true")),
    Request(gpus=8, fix=layout(**FULL, activation_offload="true")),
    Request(
        framework="torchtitan-compile",
        cluster="h100-96gb-sxm",
        fix=layout(dp_shard=8, float8="true", microbatch_size=4),
        gpus=8,
    ),
    Request(framework="composer-fsdp", fix=layout(float8="true")),
    Request(
        framework="torchtitan-compile",
        cluster="h100-96gb-sxm",
        fix=layout(tp=2, sequence_parallel="true", float8="true"),
    ),
    Request(framework="nanotron", fix=layout(tp=2, pp=2)),
    Request(model=SMALL, framework="nanotron", fix=layout(tp=2, pp=4)),
    Request(model=SMALL, framework="nanotron", gpus=512, fix=layout(tp=8, pp=4)),
    Request(framework="megatron", fix=layout(tp=2, pp=2)),
    Request(framework="megatron", fix=layout(tp=2, activation_checkpointing="selective")),
    Request(framework="megatron-deepspeed-bigscience", fix=layout(pp=4)),
    Request(framework="megatron-sc21", fix=layout(tp=8, pp=2, activation_checkpointing="full")),
    Request(framework="megatron-zero-bubble", fix=layout(pp=4, schedule="ZB-1p")),
    Request(framework="megatron-deepspeed-vtrain", model=SMALL, cluster="a100-80gb-sxm"),
    Request(framework="composer-fsdp-pure", cluster="a100-40gb-sxm"),
    Request(framework="torchtitan", cluster="h100-96gb-sxm", fix=layout(tp=2)),
    Request(framework="torchtitan-compile", cluster="h100-96gb-sxm", fix=layout()),
    Request(framework="planner", gpus=16, fix=layout(tp=2, sequence_parallel="true")),
    Request(model=SMALL, framework="planner", gpus=4, cluster="cpu", dtype="float32"),
    *(
        Request(model=SMALL, gpus=4, cluster="measured", dtype="float32", fix=layout(pp=pp))
        for pp in (2, 4)
    ),
    *(
        Request(model=SMALL, gpus=2, cluster="measured", dtype="float32", fix=fix)
        for fix in (
            layout(tp=2),
            layout(activation_checkpointing="full"),
            layout(activation_checkpointing="selective"),
        )
    ),
    Request(framework="megatron", dtype="float16", fix=layout(tp=2)),
    *(Request(dtype=dtype, fix=layout(tp=2)) for dtype in ("float32", "float64")),
]

RUNS = {
    "nanotron": {"vocab": None, "recompute": "full"},
    "torchtitan": {
        **{"framework": "torchtitan", "tp": 1, "pp": 1, "dp": 8, "micro_batch": 1},
        "zero_stage_or_fsdp": "FSDP FULL_SHARD",
    },
    "megatron-deepspeed-bigscience": {
        **{"framework": "megatron-deepspeed", "source": "bigscience", "arch": "gpt"},
        **{"heads": None, "kv_heads": None},
    },
}
"""Published runs; their rows leave open what some profiles say."""


def read_all_files():
    for name in list_devices():
        load_device(name)
    for name in list_clusters():
        load_cluster(name, gpus=1)
    load_cluster(str(OWN_PROFILES / "clusters" / "measured.toml"), gpus=1)
    for name in list_frameworks():
        load_framework(name)


def asked_of_files():
    """Keys that readers ask for, by folder and table; the words that some of them choose from."""
    asked, known = defaultdict(set), {}
    finish, text = FieldReader.finish, FieldReader.text

    def place(reader):
        return reader.path.parent.name, re.split(r"[.[]", reader.prefix)[0]

    def finishing(reader):
        asked[place(reader)] |= reader.asked
        return finish(reader)

    def taking(reader, key, choices=()):
        known[(*place(reader), key)] = choices
        return text(reader, key, choices)

    with (
        mock.patch.object(FieldReader, "finish", finishing),
        mock.patch.object(FieldReader, "text", taking),
    ):
        read_all_files()
    return asked, known


ASKED, CHOICES = asked_of_files()

KEYS_OF_FILES = [
    (folder, table, key)
    for (folder, table), keys in sorted(ASKED.items())
    for key in sorted(keys)
    if table != "runs" and key not in EXEMPT
]

KEYS_OF_CALIBRATIONS = [(owner, key) for owner in KEYS for key in KEYS[owner]]


BOOK = WorkBook()
"""The work of the published runs' models, counted once."""


# -- changed files --------------------------------------------------------------------------------


@cache
def shipped(folder, name):
    files = (root / folder / f"{name}.toml" for root in (PROFILES_FOLDER, OWN_PROFILES))
    return tomllib.loads(next(file for file in files if file.exists()).read_text())


def toml(value):
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def write(file, content):
    file.write_text("".join(f"{key} = {toml(value)}\n" for key, value in content.items()))
    return str(file)


def tables(content, name):
    """The tables of a name, () where there are none; the file itself for no name."""
    found = content.get(name, []) if name else content
    return found if isinstance(found, list) else [found]


def held(content, table, key):
    """The value of a key in a file, None where it is left out."""
    return next((each[key] for each in tables(content, table) if key in each), None)


def with_key(content, table, key, value):
    """A file where each table that has the key, or else the last, has another value."""
    if not table:
        return {**content, key: value}
    old = tables(content, table)
    holders = [each for each in old if key in each] or old[-1:]
    new = [{**each, key: value} if each in holders else each for each in old]
    return {**content, table: new if isinstance(content.get(table), list) else new[0]}


def number(value):
    return {"value": value, "provenance": "assumed", "source": "a test"}


def other_values(place, value):
    """Other values that a key may have."""
    if place in CHOICES:
        words = CHOICES[place] or list_devices()
        return [each for each in words if each != value]
    old = 1 if value is None else value["value"]
    if isinstance(old, list):
        return [number(old[:1])]
    half = old // 2 if isinstance(old, int) and old > 1 else old / 2
    return [number(each) for each in (0.1, 10 * old + 1000, half, old * 2, 0.5)]


# -- what is said of requests ---------------------------------------------------------------------


class Files:
    """The profiles of a request, as files of their own."""

    def __init__(self, request, folder, path):
        framework = request.framework or "planner"
        device = Path(shipped("clusters", request.cluster)["device"]).stem
        self.names = {"devices": device, "clusters": request.cluster, "frameworks": framework}
        self.request, self.folder, self.path = request, folder, path

    def said(self, place=None, value=None):
        """What is said of the request when a key has another value."""
        paths, device = {}, "devices.toml"
        for folder, name in self.names.items():
            content = shipped(folder, name)
            if place and place[0] == folder:
                content = with_key(content, *place[1:], value)
                device = value if place[2] == "device" else device
            if folder == "clusters":
                content = {**content, "device": device}
            paths[folder] = write(self.path / f"{folder}.toml", content)
        if self.request.framework is None and self.folder != "frameworks":
            del paths["frameworks"]
        return estimated(self.request, paths["clusters"], framework=paths.get("frameworks"))


def estimated(request, cluster, **options):
    """Time, memory and error of a layout, or why it is refused."""
    try:
        result = planner.estimate(
            f"{GPT}:{request.model}",
            gpus=request.gpus,
            cluster=cluster,
            global_batch_size=4 * request.gpus,
            seq_len=1024 if request.model == LARGE else 64,
            dtype=request.dtype,
            fix=request.fix,
            **options,
        )
    except (InfeasiblePlanError, RequestError) as error:
        return str(error)
    cluster = result._record.cluster
    errors = (cluster.step_time_errors, cluster.uncalibrated_error)
    return result.best.costs, [stage.memory for stage in result.best.stages], errors


@cache
def said_as_shipped(request, folder):
    """What is said of a request when no key is changed."""
    with TemporaryDirectory() as path:
        said = Files(request, folder, Path(path)).said()
    assert not isinstance(said, str), said
    return said


def attempts(place, path):
    """Other values of a key with the requests that they are tried on.

    One of each request first, and before others those whose file has the key.
    """
    folder, table, key = place
    having, lacking = [], []
    for request in REQUESTS:
        of_script = {"cpu_offload", "activation_offload"}
        if folder == "frameworks" and not of_script.isdisjoint(request.fix):
            continue  # of the script alone
        files = Files(request, folder, path)
        content = shipped(folder, files.names[folder])
        if tables(content, table):
            value = held(content, table, key)
            tried = [(files, other) for other in other_values(place, value)]
            (lacking if value is None else having).append(tried)
    return filter(None, chain.from_iterable(zip_longest(*having, *lacking)))


def changes_an_estimate(place, path):
    for files, other in attempts(place, path):
        try:
            if files.said(place, other) != said_as_shipped(files.request, place[0]):
                return True
        except ProfileError as error:
            # Either no legal value, or one that another key does not go with.
            if f"{place[2]}'" not in str(error):
                return True
    return False


def changes_a_run(key, path):
    """Whether a key of a framework changes the price of a published run."""

    def priced(content):
        framework = load_framework(write(path / "own.toml", content))
        with mock.patch.object(cases, "_profiles", return_value=(framework,)):
            price = CasePricer(BOOK).price(cases.case_of(run))
        return price.costs, price.memory

    for name, row in RUNS.items():
        (run,) = make_runs(row)
        content = shipped("frameworks", name)
        before = priced(content)
        for other in other_values(("frameworks", "", key), content.get(key)):
            try:
                if priced({**content, key: other}) != before:
                    return True
            except ProfileError:
                continue
    return False


@pytest.fixture(scope="module", autouse=True)
def _traced_once():
    """Trace each model once: no profile changes its graph."""
    trace, known = family.trace_family, {}

    def trace_once(loaded, *, dtype):
        key = (loaded.description, loaded.seq_len, dtype)
        if key not in known:
            known[key] = trace(loaded, dtype=dtype)
        return known[key]

    with mock.patch.object(family, "trace_family", trace_once):
        yield


@pytest.mark.parametrize("place", KEYS_OF_FILES, ids=".".join)
def test_every_key_of_a_profile_changes_a_price(place, tmp_path):
    folder, _, key = place
    changes = folder == "frameworks" and changes_a_run(key, tmp_path)  # the cheaper question
    assert changes or changes_an_estimate(place, tmp_path)


@pytest.mark.parametrize(("owner", "key"), KEYS_OF_CALIBRATIONS)
def test_every_key_of_a_calibration_changes_a_price(owner, key, tmp_path):
    for request in REQUESTS:
        cluster = load_cluster(request.cluster, gpus=request.gpus)
        framework = request.framework or "planner"
        name = {"device": cluster.device.name, "cluster": cluster.name, "framework": framework}
        found = []
        for value in (0.3, 0.6, 3000.0):
            table = {"name": name[owner], key: number(value)}
            file = write(tmp_path / "own.toml", {"format": 1, owner: [table]})
            options = {"framework": request.framework, "calibration": file}
            try:
                found.append(estimated(request, request.cluster, **options))
            except ProfileError:
                break  # refused for this framework
            if found[0] != found[-1]:
                return
    pytest.fail(f"{key} changes nothing")


def test_what_is_exempt_may_be_held():
    assert set(EXEMPT) <= {key for keys in ASKED.values() for key in keys}


def test_a_file_of_another_form_is_refused(tmp_path):
    file = write(tmp_path / "own.toml", {**shipped("clusters", "cpu"), "format": 2})
    with pytest.raises(ProfileError, match="field 'format' is 2, this version reads 1"):
        load_cluster(file, gpus=1)
