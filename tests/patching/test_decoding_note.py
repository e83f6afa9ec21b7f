"""What a plan says of generate() of encoder-decoders."""

from __future__ import annotations

import pytest

import accelpatch
from accelpatch.patching.decoding_note import CAPTURED, NATIVE
from tests.support.encoder_decoders import encoder_decoder
from tests.support.tiny import CAUSAL


@pytest.mark.parametrize("name", ["whisper", "t5"])
def test_a_folder_of_an_encoder_decoder(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp(name)
    encoder_decoder(name).save_pretrained(folder)
    plan = accelpatch.plan_from_config(str(folder), "int8", arch="sm_90")
    assert "ForConditionalGeneration" in str(plan)
    assert CAPTURED in str(plan).splitlines()
    assert NATIVE in str(accelpatch.plan_from_config(str(folder))).splitlines()


def test_other_models() -> None:
    assert accelpatch.plan(CAUSAL["llama"].make(), "exact").model_notes == ()
