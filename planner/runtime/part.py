"""What a rank trains: the user's model, or one pipeline stage of it, sharded by FSDP2."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from .model import UserModel, arguments_of, cast_parameters, first_names, master_dtype, run_model
from .processes import RunError
from .trees import Tree, cast_floats, without_view


class OffersLoss(Protocol):
    """A UserModel, or what stands for it."""

    def loss(self, output: Tree, targets: Tree) -> Tensor:
        """Return the scalar loss."""


class Part(nn.Module):
    """The user's model under ``model``, which runs from its inputs to the loss."""

    def __init__(self, model: nn.Module, user: OffersLoss, *, blocks: Sequence[str]) -> None:
        """Take the model as it is.

        Args:
            model: The whole model, or what is left of it in a stage.
            user: Offers the loss.
            blocks: Paths of the blocks that run here.
        """
        super().__init__()
        self.model = model
        self.user = user
        self.blocks = tuple(blocks)
        self.device = self.state_device = torch.device("cpu")  # the latter of optimisers
        self.dtype = torch.float32
        self.offload_policy: OffloadPolicy | None = None
        self.first_names = first_names(model)
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        self.shapes = {name: tuple(tensor.shape) for name, tensor in named}
        self.orders: dict[str, Any] = {}  # a StoredOrder, where checkpoints have another than ranks
        self.stays_sharded = False
        self.has_weights = True
        for parameter in model.parameters():
            if not parameter.numel():  # nothing to train, and FSDP2 reduces no empty gradients
                parameter.requires_grad_(False)  # noqa: FBT003

    def block_items(self) -> list[tuple[str, nn.Module]]:
        """Return path and module of the blocks that run here."""
        return [(path, self.model.get_submodule(path)) for path in self.blocks]

    def forward(self, *, inputs: Tree, targets: Tree) -> Tensor:
        """Run one microbatch, which may lie on the host, and return its scalar loss."""
        output = run_model(self.model, self.taken(inputs))
        return self.user.loss(output, self.here(targets))

    def here(self, tree: Tree) -> Tree:
        """Move tensors to where the part runs; those in pinned memory while the host goes on."""
        return tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True), tree)

    def taken(self, inputs: Tree) -> Tree:
        """Return the inputs of a microbatch where the part runs, in the dtype that it computes."""
        return cast_floats(self.here(inputs), self.dtype)

    def holds(self, module: nn.Module) -> bool:
        """Say whether a module of the model runs here."""
        return True

    def move_to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move parameters and buffers to the device; parameters on meta stay there for now.

        Inputs will be cast to the dtype, nothing else is.

        Raises:
            RunError: A buffer has no values.
        """
        for name, buffer in self.model.named_buffers():
            if buffer.is_meta:
                raise RunError(f"buffer {name} lies on the meta device: build it with its values")
        self.device, self.dtype, self.state_device = device, dtype, device
        self._apply(self._moved)  # type: ignore[no-untyped-call]
        for module in self.model.modules():
            running = module._buffers.get("running_mean")
            if running is not None and running.dtype is not dtype:
                module.register_forward_pre_hook(_show_in_dtype_of_statistics)
                module.register_forward_hook(_show_as_they_are, always_call=True)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(self.device)

    def materialise(self) -> None:
        """Allocate parameters that are still on the meta device; they get their values later."""

        def real(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device=self.state_device) if tensor.is_meta else tensor

        on_meta = [parameter for parameter in self.parameters() if parameter.is_meta]
        self.has_weights = not on_meta
        if isinstance(self, FSDPModule):
            self._apply(real)  # type: ignore[no-untyped-call]
        else:  # tied parameters stay tied
            made = {p: nn.Parameter(real(p), requires_grad=p.requires_grad) for p in on_meta}
            for own in (module._parameters for module in self.modules()):
                own.update({name: made[p] for name, p in own.items() if p in made})

    def saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the persistent buffers of the modules that run here, by the user's names."""
        saved = self.model.state_dict(keep_vars=True)
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            if name in saved:
                yield name, buffer


def _show_in_dtype_of_statistics(module: nn.Module, _: Tree) -> None:
    """Show weights in the dtype of running statistics: kernels of GPUs take both in one dtype."""
    dtype = module.get_buffer("running_mean").dtype
    shown = {**module._parameters, **module.__dict__}
    module.__dict__.update(
        {n: shown[n].to(dtype) for n, p in module._parameters.items() if p is not None}
    )


def _show_as_they_are(module: nn.Module, *_: Tree) -> None:
    for name in module._parameters:
        module.__dict__.pop(name, None)


def named_parameters(part: Part) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters under the first name that the user's model has for them."""
    for name, parameter in part.model.named_parameters():
        yield part.first_names.get(name, name), parameter


def shard_parameters(
    part: Part, mesh: DeviceMesh, dtype: torch.dtype, *, reshard_after_forward: bool
) -> None:
    """Apply FSDP2 to each block and then to the rest, which stays gathered until its backward.

    The mesh is that of the ranks that share the state, with those that replicate it before them.
    Where one rank has it, with nothing cast, split or offloaded, FSDP2 would only copy.
    """
    is_changed = part.offload_policy or any(isinstance(p, DTensor) for p in part.parameters())
    if mesh.size() == 1 and dtype is master_dtype(dtype) and not is_changed:
        return
    policy = policies(part, dtype, num_shards=mesh.size(mesh.ndim - 1))
    for _, block in part.block_items():
        if any(True for _ in block.parameters()):
            block.register_forward_hook(lambda _, __, out: tree_map_only(Tensor, without_view, out))
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, **policy)
    fully_shard(part, mesh=mesh, reshard_after_forward=False, **policy)
    part.stays_sharded = reshard_after_forward


def policies(part: Part, dtype: torch.dtype, *, num_shards: int) -> dict[str, Any]:
    """Compute in a dtype, but keep that of rotary tables and the like; reduce in the masters'."""
    reduced = master_dtype(dtype)
    return {
        "mp_policy": MixedPrecisionPolicy(dtype, reduce_dtype=reduced, cast_forward_inputs=False),
        "offload_policy": part.offload_policy or OffloadPolicy(),
        "shard_placement_fn": lambda parameter: split_dim(parameter, num_shards),
    }


def split_dim(parameter: Tensor, num_shards: int) -> Shard:
    """Say which dim FSDP2 splits: the first, or where it pads that by more than 1/16 an even one.

    It gathers the padding too: of a table of (1, 1024, 768) on 64 ranks 63 times what that holds.
    """
    sizes = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
    if not sizes or 16 * (-sizes[0] % num_shards) <= sizes[0]:
        return Shard(0)
    return Shard(next((dim for dim, size in enumerate(sizes) if size % num_shards == 0), 0))


class _Reference(Part):
    """The plain model, whose parameters are cast to the compute dtype where it runs."""

    def forward(self, *, inputs: Tree, targets: Tree) -> Tensor:
        """Run one microbatch and return its scalar loss."""
        cast = {n: cast_floats(p, self.dtype) for n, p in self.model.named_parameters()}
        output = torch.func.functional_call(self.model, cast, *arguments_of(self.taken(inputs)))
        return self.user.loss(output, self.here(targets))


def reference_part(model: nn.Module, user: UserModel, dtype: torch.dtype) -> Part:
    """Return the plain model, for one process."""
    part = _Reference(cast_parameters(model, dtype), user, blocks=())
    part.move_to(torch.device("cuda" if torch.cuda.is_available() else "cpu"), dtype)
    return part
