"""Keys of config.json are read, ignored with a note, or refused if they change the computation.

The tables of keys in megatron_tools/convert are compared with the configuration classes of transformers.
"""

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_tools.convert.hf_config import FAMILIES, read_config, unread_keys
from megatron_tools.convert.hf_folder import HFModelFolder
from megatron_tools.convert.hf_keys import IGNORED_KEYS, REQUIRED_VALUES, has_no_effect
from tests.support import covering
from tests.unit.test_hf_configs import KINDS, difference, old, write

transformers = pytest.importorskip("transformers")
WHERE = Path("config.json")
# Keys of other model families that a review found harmless: they concern lengths, images, sound, losses or init.
REVIEWED = {
    "z_loss_coefficient",
    "init_std",
    "pooling",
    "prompt_types",
    "prompt_length",
    "max_seq_len",
    "vocabulary_map",
    "mm_tokens_per_image",
    "audio_soft_tokens_per_image",
    "image_seq_length",
    "aux_loss_coef",
    "init_device",
    "chroma_length",
    "seed",
    "context_length",
    "apply_spec_augment",
    "mask_time_length",
    "mask_feature_length",
    "lang_id",
    "languages",
    "default_language",
    # Other families read these, but the note says that no class of a supported family does.
    "layer_norm_eps",
    "layer_norm_epsilon",
    "rms_norm_eps",
    "norm_eps",
    "norm_epsilon",
    "max_window_layers",
}
# Models on the Hugging Face Hub -> (family, unusual keys of config.json, keys that a note must name).
ON_THE_HUB: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "distilgpt2": (
        "gpt2",
        {
            "_num_labels": 1,
            "n_ctx": 24,
            "id2label": {"0": "LABEL_0"},
            "task_specific_params": {"text-generation": {"max_length": 50}},
        },
        ("_num_labels",),
    ),
    "gpt2-finetuned": (
        "gpt2",
        {"n_special": 0, "predict_special_tokens": True, "gradient_checkpointing": False},
        ("predict_special_tokens",),
    ),
    "SmolLM": (
        "llama",
        {"is_llama_config": True, "rope_interleaved": False, "attention_bias": False, "pretraining_tp": 1},
        ("is_llama_config",),
    ),
    "SmolLM2": (
        "llama",
        {
            "is_llama_config": True,
            "rope_interleaved": False,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        },
        ("is_llama_config", "transformers.js_config"),
    ),
    "Llama 1": (
        "llama",
        {"max_sequence_length": 2048, "pad_token_id": -1, "bos_token_id": 0, "eos_token_id": 1},
        ("max_sequence_length",),
    ),
    "Vicuna": (
        "llama",
        {
            "max_sequence_length": 2048,
            "pad_token_id": 0,
            "quantization_config": None,
            "tokenizer_class": "LlamaTokenizer",
        },
        ("max_sequence_length",),
    ),
    "Nous-Yarn": (
        "llama",
        {
            "auto_map": {"AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM"},
            "rope_parameters": None,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "finetuned": True},
        },
        ("auto_map",),
    ),
    "unsloth": (
        "llama",
        {"unsloth_version": "2024.9", "unsloth_fixed": True, "mlp_bias": False, "head_dim": 6, "_name_or_path": "x"},
        ("unsloth_version", "unsloth_fixed"),
    ),
    "flash": (
        "mistral",
        {"_flash_attn_2_enabled": True, "use_flash_attn": True, "attention_bias": False, "rope_scaling": None},
        ("_flash_attn_2_enabled", "use_flash_attn"),
    ),
    "Qwen of others": (
        "qwen2",
        {"use_mrope": False, "attention_bias": False, "mlp_bias": False, "num_experts": 0, "residual_multiplier": 1.0},
        (),
    ),
    "windows": (
        "llama",
        {
            "sliding_window": None,
            "use_sliding_window": False,
            "layer_types": ["full_attention"] * 2,
            "partial_rotary_factor": 1.0,
        },
        (),
    ),
    "a Llama with keys of other families": (
        "llama",
        {"layer_norm_eps": 1e-5, "norm_eps": 1e-3, "max_window_layers": 28, "use_sliding_window": False},
        ("layer_norm_eps", "norm_eps", "max_window_layers"),
    ),
    "UMT5": (
        "umt5",
        {"scalable_attention": True, "output_past": True, "is_gated_act": True, "dense_act_fn": "gelu_new"},
        ("scalable_attention",),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_THE_HUB)
def test_folders_of_the_hub_come_in(name: str, tmp_path: Path) -> None:
    family, keys, named = ON_THE_HUB[name]
    write(tmp_path, family, {}, old(**keys), "float32")
    assert difference(tmp_path, family) <= 1e-5
    notes = " ".join(HFModelFolder(tmp_path).notes)
    assert all(key in notes for key in named)
    assert not any(key in notes for key in keys if key not in named)


DEAD: dict[str, tuple[Any, ...]] = {
    "_num_labels": (1, 2),
    "is_llama_config": (True,),
    "rope_interleaved": (False,),
    "max_sequence_length": (2048,),
    "finetuned": (True,),
    "quantization_config": (None,),
    "auto_map": ({"AutoConfig": "x.Y"},),
    "transformers.js_config": ({"dtype": "q4"},),
    "unsloth_version": ("2025.1",),
    "unsloth_fixed": (True,),
    "model_max_length": (4096,),
    "sft_version": ("1", 2),
    "_my_note": ("x",),
    "seq_len": (8,),
    "license": ("mit",),
    "num_experts": (0, None),
    "logits_soft_cap": (None, 0.0),
    "partial_rotary_factor": (1, None),
    "use_qk_norm": (False,),
    "embedding_multiplier": (1.0,),
    "tokenizer_name": ("gpt2",),
    "bos_token": ("<s>",),
    "vocab_file": (None, "a"),
    "_flash_attn_2_enabled": (True,),
    "training_args": ({"lr": 1},),
    "layer_norm_eps": (1e-5, 1e-3),
    "rms_norm_eps": (0.5,),
    "max_window_layers": (28,),
}
ALIVE: dict[str, tuple[Any, ...]] = {
    "rope_interleaved": (True,),
    "quantization_config": ({"bits": 4},),
    "partial_rotary_factor": (0.5,),
    "num_experts": (8,),
    "logits_soft_cap": (30.0,),
    "embedding_multiplier": (12.0, True),
    "use_qk_norm": (True,),
    "attn_logit_softcapping": (50.0,),
    "residual_scale": (0.5,),
    "alibi": (True,),
    "rotary_dim": (4,),
    "layer_types": (["full_attention", "linear_attention"],),
    "kv_lora_rank": (8,),
    "parallel_residual": (True,),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", covering(list(range(100)), lambda seed: seed < 8))
def test_any_of_them_at_once(seed: int, tmp_path: Path) -> None:
    """Keys in DEAD have no effect: random combinations change no logit. Keys in ALIVE would, so they are refused."""
    dice = random.Random(seed)
    family = dice.choice(list(KINDS))
    known = {*FAMILIES[family].defaults, *FAMILIES[family].aliases, *REQUIRED_VALUES}
    keys = {key: dice.choice(DEAD[key]) for key in dice.sample(list(DEAD), 8) if key not in known}
    write(tmp_path, family, {}, old(**keys), "float32")
    assert difference(tmp_path, family) <= 1e-5
    content = json.loads((tmp_path / "config.json").read_text())
    bad = dice.choice([key for key in ALIVE if key not in known])
    with pytest.raises(ValueError, match=re.escape(f"config.json: the key {bad} (")):
        read_config({**content, bad: dice.choice(ALIVE[bad])}, WHERE)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_class_declares_is_known(family: str) -> None:
    """The importer knows every key that transformers' configuration class writes for a supported family."""
    content = KINDS[family][0](**KINDS[family][2]).to_dict()
    assert read_config({**content, "model_type": family}, WHERE)
    assert unread_keys({**content, "model_type": family}) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_whose_attention_is_not_causal_is_refused(family: str) -> None:
    """transformers 5 attends in both directions if is_causal is false or null."""
    content = {"model_type": family, "is_causal": True}
    assert read_config(content, WHERE) == read_config({"model_type": family}, WHERE)
    assert unread_keys(content) == []
    for value in (False, None):
        with pytest.raises(ValueError, match="is_causal"):
            read_config({"model_type": family, "is_causal": value}, WHERE)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_to_ignore_are_those_of_the_class(family: str) -> None:
    theirs = getattr(transformers, FAMILIES[family].class_name)
    assert FAMILIES[family].ignored == tuple(theirs._keys_to_ignore_on_load_unexpected or ())


def test_keys_by_which_other_families_compute_are_refused() -> None:
    """Every configuration key of transformers' text models is either supported, listed as harmless, or refused."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known, passed, count = {*IGNORED_KEYS, *REQUIRED_VALUES}, set(), 0
    kinds = [
        kind
        for kind in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "bart", "longt5", "switch_transformers")
        if kind in CONFIG_MAPPING_NAMES
    ]
    for kind in kinds:
        config = getattr(transformers, CONFIG_MAPPING_NAMES[kind], None)
        for field in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
            count += 1
            declared = all(field.name in (*each.defaults, *each.aliases) for each in FAMILIES.values())
            if field.name not in known and not declared and has_no_effect(field.name):
                passed.add(field.name)
    assert count > 1000
    assert passed <= REVIEWED | {"text_config", "audio_config", "patching_threshold"}, passed - REVIEWED
