"""When gradients of one configuration come, are added up and are reduced."""

from functools import cached_property

from planner.cost.model_units import ModelUnits
from planner.strategy.configuration import Configuration


class GradientTimes:
    """What becomes of gradients that a backward has made."""

    def __init__(self, model: ModelUnits, configuration: Configuration) -> None:
        """Keep what it depends on."""
        self._units = model.units
        self._configuration = configuration
        self._alone = configuration.num_microbatches == 1
        self._reshards = configuration.reshard_after_forward
        self.is_script = configuration.state_form != "replicated"
        """Whether emitted scripts hold the state so."""
        self.pipelined = configuration.degrees.pp > 1
        """Whether there are several stages."""
        self.are_reduced = configuration.degrees.shards > 1 or (
            configuration.cpu_offload and self._reshards
        )
        """Whether ranks have shares of them."""

    @property
    def add_up(self) -> bool:
        """Whether whole gradients wait for others before they are reduced, and are added up.

        Under a pipeline those of a single microbatch wait too.
        """
        return self.pipelined or not (self._alone or self._reshards)

    @cached_property
    def lie_beside(self) -> bool:
        """Whether gradients of a unit are there beside those counted as the state's, for a while.

        FSDP adds them to others in the optimiser's dtype when the backward of the block is over,
        or reduces them then. (``Transients.reduced_bytes`` has them where parameters are
        resharded.)
        """
        if not self.is_script or not (self.pipelined or not self._reshards):
            return False
        dtypes_differ = any(
            unit.gathered_bytes - unit.frozen_bytes != unit.trained_bytes for unit in self._units
        )
        return dtypes_differ or not self.add_up

    @cached_property
    def are_added_at_once(self) -> bool:
        """Whether each gradient is added to one of its dtype as soon as it is made."""
        return self.is_script and self.add_up and not self.lie_beside and not self._alone

    @property
    def are_reduced_each_time(self) -> bool:
        """Whether those of a block are reduced in each backward."""
        return self.is_script and self.are_reduced and not self.pipelined and not self.add_up

    @property
    def free_each_time(self) -> bool:
        """Whether they are, and its gathered parameters freed before."""
        return self.are_reduced_each_time and self._reshards

    @property
    def end_gathers(self) -> bool:
        """Whether parameters are gathered for all blocks, and of each until its backward is over.

        Under a pipeline they stay.
        """
        is_fsdp = self._configuration.state_form == "fsdp"
        return is_fsdp and not self._reshards and self._alone and not self.pipelined

    @property
    def reduce_root_last(self) -> bool:
        """Whether the root's wait for the end of each backward, and blocks' do not."""
        is_fsdp = self._configuration.state_form == "fsdp"
        return is_fsdp and self._reshards and not self.pipelined

    @property
    def keep_root_to_end(self) -> bool:
        """Whether new ones of the root lie in the compute dtype to the end of a backward."""
        return self.lie_beside or self.reduce_root_last

    @cached_property
    def may_be_missing(self) -> bool:
        """Whether some rank of a pipeline may be fullest where it has none yet."""
        configuration = self._configuration
        return not all(
            stage.has_gradients or stage.is_ending
            for rank in range(configuration.degrees.pp)
            for moment in configuration.fullest_moments(rank)
            for stage in moment
        )
