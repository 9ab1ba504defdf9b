"""A rank among ranks that do not exist, on tensors without data.

Every private name of torch that this needs stands here; the tests of ``plan check`` call each.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from planner.graph.recording.kernels import fused_kernels

Tree = Any
"""A tensor, or nested tuples, lists and dicts of tensors."""


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Join a process group whose other ranks do not exist; nothing waits for them."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    with (
        _patched(dist, "all_gather_object", _gathered_objects),
        _patched(dist, "broadcast_object_list", _nothing),
    ):
        yield
    dist.destroy_process_group()


@contextmanager
def numbers_received() -> Iterator[None]:
    """Let buffers that a rank receives in hold random numbers, and not what lay there before.

    What comes from another stage is the same in every step, and gets its numbers in the first.
    """
    exchanged = dist.all_to_all_single

    def exchange(output: Tensor, given: Tensor, *sizes: Tree, **kw: Tree) -> Tree:
        work = exchanged(output, given, *sizes, **kw)
        if sizes and output.is_floating_point():  # without them a rank gets its own back
            with torch.no_grad():
                output.normal_()
        return work

    own = dist.P2POp.__init__
    # By what they lie in, as long as it is there: another buffer may come to lie at its address.
    filled: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def transfer(operation: dist.P2POp, op: Tree, tensor: Tensor, *args: Tree, **kw: Tree) -> None:
        own(operation, op, tensor, *args, **kw)
        if op is dist.irecv and tensor.untyped_storage() not in filled:
            filled[tensor.untyped_storage()] = None
            with torch.no_grad():
                tensor.normal_()

    with (
        _patched(dist.P2POp, "__init__", transfer),
        _patched(dist, "all_to_all_single", exchange),
    ):
        yield


def _gathered_objects(objects: list[object], own: object, **_: object) -> None:
    objects[:] = [own] * len(objects)


def _nothing(*_: object, **__: object) -> None:
    pass


@contextmanager
def copied_from_host() -> Iterator[None]:
    """Let a gather of offloaded parameters copy them first, as a device does from its host."""
    own = FSDPParam.all_gather_inputs

    def inputs(parameter: FSDPParam) -> Tree:
        kept = parameter._sharded_param_data
        if parameter.offload_to_cpu:
            parameter._sharded_param_data = kept.clone()
        try:
            return own.__get__(parameter)
        finally:
            parameter._sharded_param_data = kept

    with _patched(FSDPParam, "all_gather_inputs", property(inputs)):
        yield


@contextmanager
def same_in_place() -> Iterator[None]:
    """Let ``module.to`` leave what is as asked, in the middle of a step as on real tensors.

    It swaps parameters that are fake for new ones, and refuses where autograd watches them.
    """
    own: Callable[..., nn.Module] = nn.Module._apply

    def applied(module: nn.Module, change: Callable[[Tensor], Tensor], **how: bool) -> nn.Module:
        with torch.no_grad():
            if all(change(each) is each for each in (*module.parameters(), *module.buffers())):
                return module
        return own(module, change, **how)

    with _patched(nn.Module, "_apply", applied):
        yield


@contextmanager
def _patched(place: object, name: str, new: object) -> Iterator[None]:
    own = getattr(place, name)
    setattr(place, name, new)
    try:
        yield
    finally:
        setattr(place, name, own)


class FakeWorld:
    """Fake tensors on the CPU, whose ops take no time and no memory.

    Attention, RMSNorm, dropout and recurrent layers run as the kernels of a GPU.
    """

    def __init__(self) -> None:
        """Make the mode; it is entered by ``entered``."""
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let all ops run on fake tensors."""
        with ExitStack() as stack:
            for place, name, wrap in _KEPT_REAL:
                stack.enter_context(_patched(place, name, wrap(getattr(place, name))))
            stack.enter_context(stages_know_shapes())
            stack.enter_context(_patched(torch._subclasses, "FakeTensor", _NoTensor))
            stack.enter_context(fused_kernels("AutogradCPU"))
            stack.enter_context(self._mode)
            yield

    def faked(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return what ops see of real tensors, as long as what is returned is there."""
        return [self._mode.from_tensor(tensor) for tensor in tensors]

    def on_host(self, tree: Tree) -> Tree:
        """Return tensors without data that look like those of a tree, and take no memory."""
        return tree_map_only(Tensor, lambda t: self._mode.from_tensor(t.to("meta")), tree)

    def moved(self, tree: Tree, device: torch.device) -> Tree:
        """Return tensors like those of ``on_host`` that take memory of a device."""
        return tree_map_only(Tensor, lambda t: torch.empty_like(t, device=device), tree)


def _outside(own: Callable[..., Tree]) -> Callable[..., Tree]:
    def run(*args: Tree, **kwargs: Tree) -> Tree:
        with unset_fake_temporarily():
            return own(*args, **kwargs)

    return run


def _without_modes(own: Callable[..., Tree]) -> Callable[..., Tree]:
    def run(*args: Tree, **kwargs: Tree) -> Tree:
        with _disable_current_modes():
            return own(*args, **kwargs)

    return run


def stages_know_shapes() -> AbstractContextManager[None]:
    """Let stages of a pipeline go by the shapes that they know; torch asks the other ranks."""
    return _patched(_SCHEDULE, "_warmup_p2p", _all_static)


def _all_static(_: object, stages: list[Any], *__: object) -> None:
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


class _NoTensor:
    """What no tensor is: a model that asks whether its inputs are fake goes on as with others."""


_SCHEDULE = schedules._PipelineSchedule

_KEPT_REAL = (
    (DeviceMesh, "__init__", _outside),
    (ShardingPropagator, "_propagate_tensor_meta_non_cached", _without_modes),
)
"""What looks at data of its own."""


def fake_device(tensor: Tensor) -> torch.device | None:
    """Return the device of a fake tensor, whose ``device`` is an op; None for others."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else None


def named_group_size(name: str) -> int:
    """Return the number of ranks of the group that functional collectives call by a name."""
    return _resolve_process_group(GroupName(name)).size()


def _sharded_parameters(module: nn.Module) -> list[FSDPParam]:
    """Return what FSDP2 has of a module's parameters."""
    return [
        parameter
        for each in module.modules()
        if isinstance(each, FSDPModule)
        for group in each._get_fsdp_state()._fsdp_param_groups
        for parameter in group.fsdp_params
    ]


def offloaded_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the shards of a module's parameters that lie in host memory."""
    found = _sharded_parameters(module)
    return [parameter.sharded_param for parameter in found if parameter.offload_to_cpu]


def parameters_held(module: nn.Module) -> dict[str, list[Tensor]]:
    """Return what is held of a module's parameters now, by FSDP2 or without it.

    Returns:
        Shards as "params"; gathered parameters and all gradients as "grads_and_buffers".
    """
    sharded = _sharded_parameters(module)
    own = [] if sharded else list(module.parameters())
    held: dict[str, list[Tensor | None]] = {
        "params": [*own],
        "grads_and_buffers": [parameter.grad for parameter in own],
    }
    for parameter in sharded:
        held["params"].append(parameter.sharded_param)
        buffers = held["grads_and_buffers"]
        buffers.append(parameter.sharded_param.grad)
        gathered = getattr(parameter, "_unsharded_param", None)
        buffers += parameter.all_gather_outputs
        buffers.append(parameter.unsharded_accumulated_grad)
        if gathered is not None:
            buffers += [gathered, gathered.grad]
    return {name: [each for each in found if each is not None] for name, found in held.items()}
