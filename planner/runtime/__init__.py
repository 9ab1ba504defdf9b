"""What a training script runs: small modules that need torch and the user's model file alone.

A script gets those of them that its plan needs, as a folder beside it. In the order of use:

``options``, ``processes``   command line; process group, errors that ranks share, requests to
                             stop; ``lost_ranks`` of other nodes, ``mesh_order`` of other orders
``model``, ``data``          the user's model, its functions, and the microbatches of a step with
                             what is drawn in them; ``loaders`` where it has a ``data_loader``
``first_weights``            of models too large to be built whole
``part``                     what a rank trains, sharded by FSDP2, and its microbatches; the same
                             on one process; ``split_part`` where it does not have all of each
                             tensor
``anatomy``, ``stages``      pipeline stages: what a model consists of, and how it is cut
``tensor_parallel``          modules that are split over ranks
``recompute``                recomputation in backward
``pipeline``                 torch's schedules for microbatches
``gradients``                sums over ranks, the global norm
``parallel_model``           all of these as one object, for the script's loop or any other
``checkpoint``, ``log``      what a run leaves behind, and weights in files of others;
                             ``checkpoint_folders`` are whole or absent
``plan_folder``              ``parallelize``: a plan's script, for a loop of the user's

Words: a *unit* is the prologue (all that runs before the first block, unit 0), a block (block i
is unit i + 1) or the epilogue; a stage holds consecutive units. The *stream* is the first tensor
argument of a block, and what leaves the last block; other tensors that later units read (skip
connections, an encoder's memory) are *carried* beside it. An *axis* belongs to the device mesh, a
*dim* to a tensor.
"""

from .plan_folder import parallelize

__all__ = ["parallelize"]
