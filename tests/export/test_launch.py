"""Launch files: what each of them starts, by what its own reader makes of it."""

import shutil
import subprocess

import pytest
import yaml
from plan_factory import make_cluster

from planner.export.launch import launch_files
from planner.hardware.profiles import load_cluster

FOUR_NODES = make_cluster(num_gpus=32, gpus_per_node=8)
ONE_NODE = make_cluster(num_gpus=8, gpus_per_node=8)
UNEVEN = make_cluster(num_gpus=20, gpus_per_node=8)
NAMES = ["launch/torchrun.sh", "launch/slurm.sh", "launch/trainjob.yaml", "launch/skypilot.yaml"]


def test_there_are_four_and_none_where_the_host_is_the_device():
    assert list(launch_files(FOUR_NODES)) == NAMES
    assert launch_files(load_cluster("cpu", gpus=8)) == {}


@pytest.mark.parametrize("cluster", [ONE_NODE, FOUR_NODES, UNEVEN])
def test_shell_files_are_sound(cluster, tmp_path):
    checker = shutil.which("shellcheck")
    for name, text in launch_files(cluster).items():
        if name.endswith(".sh"):
            file = tmp_path / name.partition("/")[2]
            file.write_text(text)
            subprocess.run(["bash", "-n", file], check=True)
            if checker:
                subprocess.run([checker, file], check=True)


def test_nodes_and_devices_are_those_of_the_cluster():
    torchrun, slurm, job, sky = launch_files(FOUR_NODES).values()
    assert "torchrun --nnodes 4 --nproc-per-node 8 " in torchrun
    assert "#SBATCH --nodes=4\n" in slurm
    assert "#SBATCH --gpus-per-node=8\n" in slurm
    trainer = yaml.safe_load(job)["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 8)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    task = yaml.safe_load(sky)
    assert task["num_nodes"] == 4
    assert task["resources"]["accelerators"] == "H100:8"
    assert "--standalone" in launch_files(ONE_NODE)["launch/torchrun.sh"]


def test_the_last_node_has_as_many_processes_as_it_has_devices():
    torchrun, slurm, job, sky = launch_files(UNEVEN).values()
    condition = '"${NODE_RANK:?number of this node, from 0 on}" -ge 2 ] && [ "$NODE_RANK" -le 2 ]'
    assert f"if [ {condition}; then\n    processes=4\n" in torchrun
    assert 'torchrun --nnodes 3 --nproc-per-node "$processes" ' in torchrun
    assert "2 nodes of 8 and one of 4 devices" in slurm
    assert "#SBATCH --nodes=3\n" in slurm
    assert yaml.safe_load(job)["spec"]["trainer"]["numNodes"] == 3
    assert yaml.safe_load(sky)["num_nodes"] == 3


def test_a_device_without_a_name_in_the_catalog_is_left_to_the_user():
    cluster = load_cluster("a800-80gb-sxm", gpus=8)
    assert "NAME_OF_THE_GPU:8" in launch_files(cluster)["launch/skypilot.yaml"]
    amd = load_cluster("mi300x", gpus=8)
    assert "amd.com/gpu: 8" in launch_files(amd)["launch/trainjob.yaml"]


def test_slurm_queues_again_what_was_asked_to_stop():
    slurm = launch_files(FOUR_NODES)["launch/slurm.sh"]
    assert "#SBATCH --requeue\n" in slurm
    assert "#SBATCH --signal=B:TERM@600\n" in slurm
    assert 'if [ -e "$CHECKPOINTS/stopped" ]; then\n    scontrol requeue' in slurm


@pytest.mark.parametrize("cluster", [ONE_NODE, FOUR_NODES])
def test_kubeflows_own_model_knows_every_field(cluster):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api")
    document = yaml.safe_load(launch_files(cluster)["launch/trainjob.yaml"])
    read = models.TrainerV1alpha1TrainJob.from_dict(document)
    assert read.to_dict() == document


@pytest.mark.parametrize("cluster", [ONE_NODE, FOUR_NODES])
def test_skypilots_own_schema_takes_the_file(cluster):
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot")
    jsonschema = pytest.importorskip("jsonschema")
    task = yaml.safe_load(launch_files(cluster)["launch/skypilot.yaml"])
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
