"""Whether ranks run on the kinds of device that the plan has for them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .processes import RankError


def check_devices(device: torch.device, kinds: Sequence[tuple[str, int]]) -> None:
    """Refuse GPUs on which another kind of the plan belongs, as where nodes start in another order.

    Args:
        device: What this rank runs on; CPUs are not told apart.
        kinds: Kinds of device with their numbers of ranks, in the order of the ranks.

    Raises:
        RankError: Its name is that of another kind.
    """
    if device.type != "cuda":
        return
    wrong = wrong_device(torch.cuda.get_device_name(device), dist.get_rank(), kinds)
    if wrong is not None:
        raise RankError(wrong)


def wrong_device(name: str, rank: int, kinds: Sequence[tuple[str, int]]) -> str | None:
    """Say what is wrong with the device of a rank, None where it may be the plan's.

    Names of kinds are those of profiles; one of the user's own may be no part of any GPU's name,
    and nothing is known of it then.
    """
    found = name.replace(" ", "").replace("-", "").lower()
    named = [kind for kind, _ in kinds if kind.partition("-")[0].lower() in found]
    planned = [kind for kind, ranks in kinds for _ in range(ranks)][rank]
    if not named or planned in named:
        return None
    order = ", then ".join(f"{ranks} ranks on {kind}" for kind, ranks in kinds)
    return (
        f"rank {rank} runs on {name}, and the plan has {planned} there: it is for {order}; number "
        "the nodes in this order (--node-rank)"
    )
