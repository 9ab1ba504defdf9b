"""From a run to its step time and memory, by the cost model of the search."""
