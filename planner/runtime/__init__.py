"""What a training script runs: small modules that need torch and the user's model file alone.

A script gets those of them that its plan needs, as a folder beside it. In the order of use:

``options``, ``processes``   command line, process group, mesh
``model``, ``data``          the user's model and its batches
``start``, ``weights``       built or read weights, ``first_weights`` for models too large for it
``part``                     what a rank trains: the model, or a stage of it
``anatomy``, ``stages``      pipeline stages: what a model consists of, and how it is cut
``tensor_parallel``          modules that are split over ranks
``recompute``, ``sharding``  recomputation in backward, FSDP2
``step``, ``pipeline``       the microbatches of a step, and torch's schedules for them
``gradients``                sums over ranks, the global norm
``checkpoint``, ``log``      what a run leaves behind; ``checkpoint_folders`` are whole or absent
``stopping``                 a scheduler's request to stop
``reference``                the same training on one process

Words: a *unit* is the prologue (all that runs before the first block, unit 0), a block (block i
is unit i + 1) or the epilogue; a stage holds consecutive units. The *stream* is the first tensor
argument of a block, and what leaves the last block; other tensors that later units read (skip
connections, an encoder's memory) are *carried* beside it. An *axis* belongs to the device mesh, a
*dim* to a tensor.
"""
