"""First weights, one tensor at a time: no process holds the whole model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from .first_weights import DeferredInit
from .part import Part, first_names, named_parameters
from .processes import RunError
from .trees import Tree
