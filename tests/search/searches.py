from pathlib import Path

import pytest

from planner.graph.loading.load import load_model
from planner.graph.sizes.family import GraphFamily, trace_family
from planner.hardware.profiles import load_cluster
from planner.hardware.spec import ClusterSpec
from planner.plan.types import ModelRef, SearchOutcome
from planner.search.run import Search
from planner.search.search_request import SearchRequest
from planner.search.space import LayoutSpace
from planner.strategy.rules import FixedValues

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def gpt() -> GraphFamily:
    return trace_family(load_model(str(EXAMPLES / "gpt.py"), seq_len=None), dtype="bfloat16")


@pytest.fixture(scope="session")
def llama() -> GraphFamily:
    return trace_family(load_model(str(EXAMPLES / "llama.py"), seq_len=None), dtype="bfloat16")


@pytest.fixture(scope="session")
def big_gpt() -> GraphFamily:
    """GPT-3 XL at its full sequence: large enough that memory and links matter."""
    source = f"{EXAMPLES / 'gpt.py'}:gpt_1_3b"
    return trace_family(load_model(source, seq_len=2048), dtype="bfloat16")


@pytest.fixture(scope="session")
def mlp() -> GraphFamily:
    return trace_family(load_model(str(EXAMPLES / "mlp.py"), seq_len=None), dtype="bfloat16")


def request_for(
    cluster: ClusterSpec, *, batch: int | None = None, top: int = 5, **fixed: object
) -> SearchRequest:
    return SearchRequest(
        model=ModelRef(
            file="model.py", module=None, factory="build_model", seq_len=None, num_parameters=0
        ),
        global_batch_size=batch or 8 * cluster.num_gpus,
        dtype="bfloat16",
        fixed=FixedValues(**fixed),
        top=top,
    )


def space_for(graphs: GraphFamily, cluster: ClusterSpec, **fixed: object) -> LayoutSpace:
    return LayoutSpace(graphs, cluster, request_for(cluster, **fixed))


def search_for(
    graphs: GraphFamily,
    cluster: ClusterSpec,
    *,
    batch: int | None = None,
    top: int = 5,
    **fixed: object,
) -> SearchOutcome:
    search = Search(
        graphs,
        cluster,
        request_for(cluster, batch=batch, top=top, **fixed),
        resize=lambda gpus: load_cluster("h100-sxm", gpus=gpus),
    )
    return search.run()
