"""Every architecture of transformers, traced in its default size: ``make bench`` prints them."""

import pytest
from breadth import FAILED, TRACED, TRACED_IN_FLOAT32, summary, sweep

MOST_FAILED = 0.03

USUAL_RATIO = (1.9, 2.6)
"""FLOPs of backward over forward: two gradients for each product, and fused attention makes its
scores again."""

OTHER_RATIO = {
    "HrmTextForCausalLM": "all rounds of its recurrence but the last run without gradients",
    "MraForMaskedLM": "it chooses blocks of the scores without gradients",
    "ReformerForMaskedLM": "reversible layers run again in backward",
}
"""Models whose backward does more or less, by class."""

NO_ENCODER = "a decoder alone has nothing for its cross attention"
NO_GLOBAL_TOKENS = "no token of the batch has global attention"
UNREAD = {
    "BartForCausalLM": NO_ENCODER,
    "BigBirdPegasusForCausalLM": NO_ENCODER,
    "BlenderbotForCausalLM": NO_ENCODER,
    "BlenderbotSmallForCausalLM": NO_ENCODER,
    "MBartForCausalLM": NO_ENCODER,
    "MarianForCausalLM": NO_ENCODER,
    "MvpForCausalLM": NO_ENCODER,
    "PLBartForCausalLM": NO_ENCODER,
    "PegasusForCausalLM": NO_ENCODER,
    "ProphetNetForCausalLM": NO_ENCODER,
    "TrOCRForCausalLM": NO_ENCODER,
    "WhisperForCausalLM": NO_ENCODER,
    "LEDForConditionalGeneration": NO_GLOBAL_TOKENS,
    "LongformerForMaskedLM": NO_GLOBAL_TOKENS,
    "Dinov2ForImageClassification": "no patch of the images is masked",
    "Dinov2WithRegistersForImageClassification": "no patch of the images is masked",
    "LukeForMaskedLM": "the batch names no entities",
    "ReformerForMaskedLM": "its head has a bias of its own beside the one of the table",
    "Wav2Vec2ConformerForSequenceClassification": "positions are relative by default",
    "XLNetLMHeadModel": "the batch has no segments and no permuted order",
}
"""Models that leave parameters aside, by class; ``graph.warnings`` tells the user."""


@pytest.mark.bench
def test_architectures_of_transformers():
    outcomes = []
    for outcome in sweep([]):
        print(outcome.line, flush=True)
        outcomes.append(outcome)
    print(summary(outcomes))
    traced = [each for each in outcomes if each.outcome in (TRACED, TRACED_IN_FLOAT32)]
    failed = [each for each in outcomes if each.outcome == FAILED]
    assert all(each.reason for each in failed)
    assert len(failed) <= MOST_FAILED * (len(traced) + len(failed))

    least, most = USUAL_RATIO
    unusual = {each.class_name for each in traced if not least <= each.flop_ratio <= most}
    assert unusual <= set(OTHER_RATIO)
    assert {each.class_name for each in traced if each.unread} <= set(UNREAD)
    told = {each.class_name for each in traced if "read by no operator" in str(each.warnings)}
    assert told == {each.class_name for each in traced if each.unread}
