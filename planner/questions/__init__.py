"""Questions about plans: how a model scales, what a plan is bound by, why not another layout."""
