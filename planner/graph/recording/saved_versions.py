"""Whether what autograd keeps is changed before backward, which torch checks without hooks only."""

from torch import Tensor

from planner.errors import ModelError


class SavedVersions:
    """Remembers how often the memory of each saved tensor had been written to."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}

    def note(self, tensor: Tensor) -> None:
        """Note a tensor that autograd keeps."""
        self._versions[id(tensor)] = tensor._version

    def check(self, tensor: Tensor) -> None:
        """Refuse a saved tensor that has been changed, as torch does in training.

        Raises:
            ModelError: It has been.
        """
        if tensor._version == self._versions.get(id(tensor), tensor._version):
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(
            "The model changes a tensor in place that backward needs as it was, of shape"
            f" {tuple(tensor.shape)} and type {dtype}: training would stop there.",
            hint="Make a new tensor (x = x + y, not x += y) after an operator that keeps its input"
            " or its result; torch.autograd.set_detect_anomaly(True) names the line in a real run.",
        )
