"""Scalar parameters, held as vectors of one element: FSDP2 shards no scalars."""

from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .meshes import copy_share
from .part import Part
from .stored_order import StoredOrder


class ScalarOrder(StoredOrder):
    """A checkpoint has a scalar."""

    def by_rank(self, tensor: Tensor) -> Tensor:
        """Return a scalar as the vector that it is held in."""
        return tensor.reshape(1)

    def in_user_order(self, value: Tensor) -> Tensor:
        """Return the scalar that is held as a vector."""
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.reshape(())

    def restore(self, saved: Tensor, value: Tensor) -> None:
        """Copy what ``in_user_order`` returned back."""
        copy_share(self.by_rank(saved), value)


def hold_scalars_as_vectors(part: Part) -> None:
    """Replace scalar parameters; the user's forward still sees scalars."""
    made: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for path, module in part.model.named_modules():
        names = [name for name, p in module._parameters.items() if p is not None and not p.ndim]
        for name in names:
            scalar = module._parameters[name]
            assert scalar is not None
            vector = nn.Parameter(scalar.detach().reshape(1), requires_grad=scalar.requires_grad)
            module._parameters[name] = made.setdefault(id(scalar), vector)
            full_name = f"{path}.{name}" if path else name
            first = part.first_names.get(full_name, full_name)
            part.orders[first] = ScalarOrder()
        if names:
            kind = type(module)
            as_scalars = {name: property(partial(_as_scalar, name=name)) for name in names}
            module.__class__ = type(kind.__name__, (kind,), as_scalars)


def _as_scalar(module: nn.Module, name: str) -> Tensor:
    """Return a gathered parameter as the scalar that it is; FSDP2 asks for sharded ones."""
    vector = module.__dict__.get(name, module._parameters[name])
    assert isinstance(vector, Tensor)
    return vector if isinstance(vector, DTensor) else vector.reshape(())
