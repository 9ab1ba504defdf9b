"""What a training script runs: small modules that need torch and the user's model file alone.

A script gets those of them that its plan needs, as a folder beside it. In the order of use:

``options``, ``processes``   command line, process group; ``mesh_order`` of other orders
``model``, ``data``          the user's model, its functions, and the microbatches of a step;
                             ``loaders`` where it has a ``data_loader``
``first_weights``            of models too large to be built whole; ``weights`` in files of others
``draws``                    random numbers, alike where ranks must agree
``part``                     what a rank trains, and its microbatches; ``split_part`` where it does
                             not have all of each tensor
``anatomy``, ``stages``      pipeline stages: what a model consists of, and how it is cut
``tensor_parallel``          modules that are split over ranks
``recompute``, ``sharding``  recomputation in backward, FSDP2
``pipeline``                 torch's schedules for microbatches
``gradients``                sums over ranks, the global norm
``parallel_model``           all of these as one object, for the script's loop or any other
``checkpoint``, ``log``      what a run leaves behind; ``checkpoint_folders`` are whole or absent
``stopping``, ``lost_ranks`` requests to stop, and ranks of other nodes that are gone
``reference``                the same training on one process
``plan_folder``              ``parallelize``: a plan's script, for a loop of the user's

Words: a *unit* is the prologue (all that runs before the first block, unit 0), a block (block i
is unit i + 1) or the epilogue; a stage holds consecutive units. The *stream* is the first tensor
argument of a block, and what leaves the last block; other tensors that later units read (skip
connections, an encoder's memory) are *carried* beside it. An *axis* belongs to the device mesh, a
*dim* to a tensor.
"""

from .plan_folder import parallelize

__all__ = ["parallelize"]
