"""Modules and names of CPM-Pretrain: where each is in this project, or what replaces it.

`install()` makes `import` follow these tables, so this project needs no files with CPM-Pretrain's names. Importing a
name that this project lacks raises ImportError, and the message says what to use instead.
docs/reference/imports.md shows the tables.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_BUFFERS = "recomputed activations need no separate buffers; remove this import"
_BERT = "there is no BERT model"
_REALM = "there are no retrieval models"
_SCALER = 'DeepSpeed scales losses ("fp16" of --deepspeed-config); remove this import'
_KERNELS = "torch's attention is one kernel and --compile fuses other operations; remove this import"
_LAYERS = "megatron.model.block.Block is one transformer layer; gpt2_layers and t5_layers list the layers of a model"
_SAVES = (
    "runs save and load by --save, --load and --save-interval; megatron.checkpointing.save_checkpoint in a custom loop"
)
_RESUMES = "SIGTERM makes a run save and end, and the same command resumes it"
_TOKENIZERS = "megatron.tokenizer.load_tokenizer(path)"
_MASKING = "tools/preprocess_data.py --objective cpm-t5 masks spans in advance, megatron.data.t5_dataset on reading"

# Modules of CPM-Pretrain of which no module has all names; HOMES and COUNTERPARTS list where each name is.
_SPLIT = (
    "megatron.arguments megatron.data.dataset_utils megatron.data.samplers megatron.fp16.fp16util "
    "megatron.fp16.loss_scaler megatron.initialize megatron.learning_rates megatron.model.fused_bias_gelu "
    "megatron.model.fused_softmax megatron.model.language_model megatron.package_info "
    "megatron.tokenizer.gpt2_tokenization megatron.tokenizer.t5_tokenization megatron.tokenizer.tokenizer"
)
# Module of CPM-Pretrain -> module of this project with the same names; None for those of _SPLIT.
MODULES: dict[str, str | None] = {
    **dict.fromkeys(_SPLIT.split()),
    "megatron.data.T5_dataset": "megatron_compat.data",
    "megatron.fp16": "megatron_compat.fp16",
    "megatron.fp16.fp16": "megatron_compat.fp16",
    "megatron.global_vars": "megatron.training.global_vars",
    "megatron.model.gpt2_model": "megatron.model",
    "megatron.model.t5_model": "megatron.model",
    "megatron.model.transformer": "megatron_compat.transformer",
    "megatron.model.transformer_seq2seq": "megatron_compat.transformer",
    "megatron.model.utils": "megatron_compat.transformer",
    "megatron.module": "megatron_compat.transformer",
    "megatron.mpu.initialize": "megatron.mpu",
    "megatron.mpu.utils": "megatron.mpu",
}
# Module of CPM-Pretrain without a replacement -> reason, shown by the ImportError.
GONE_MODULES = {
    "megatron.data.bert_dataset": _BERT,
    "megatron.data.helpers": "the sample index needs no compiled helpers; remove this import",
    "megatron.data.ict_dataset": _REALM,
    "megatron.data.realm_dataset_utils": _REALM,
    "megatron.data.realm_index": _REALM,
    "megatron.fused_kernels": _KERNELS,
    "megatron.memory": _BUFFERS,
    "megatron.model.bert_model": _BERT,
    "megatron.model.classification": _BERT,
    "megatron.model.distributed": "DeepSpeed or tds.DistributedOptimizer reduces gradients; remove this import",
    "megatron.model.multiple_choice": _BERT,
    "megatron.model.realm_model": _REALM,
    "megatron.tokenizer.bert_tokenization": _BERT,
    "megatron.tokenizer.file_utils": "nothing is downloaded; give --vocab-file",
}
# (module, name) of CPM-Pretrain -> module of this project that has the name.
HOMES = {
    ("megatron.utils", "get_masks_and_position_ids_for_t5"): "megatron_compat.masks",
    ("megatron.model", "get_params_for_weight_decay_optimization"): "megatron_compat.transformer",
    ("megatron.mpu.layers", "LayerNorm"): "megatron.mpu",
    **{
        ("megatron.mpu.random", name): "megatron.mpu"
        for name in ("checkpoint", "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed")
    },
    ("megatron.package_info", "__version__"): "megatron",
}
_INDEXED = "megatron.data.indexed_dataset.IndexedDataset(prefix)"
_METRICS = "--tensorboard writes events; metrics.jsonl has all numbers"
_FP16 = {
    "FP16_Module": "tds.initialize casts a model as --precision says",
    "FP16_Optimizer": "tds.initialize wraps an optimizer as --precision says",
}
_TRANSFORMER = {
    "ParallelSelfAttention ParallelTransformer ParallelTransformerLayer ParallelTransformerLayerPipe "
    "Seq2SeqParallelTransformer bias_dropout_add get_bias_dropout_add": _LAYERS,
}
# Module of CPM-Pretrain -> names without an identical counterpart, separated by spaces -> their replacement.
_COUNTERPARTS = {
    "megatron": {
        "get_adlr_autoresume": _RESUMES,
        "get_tensorboard_writer": _METRICS,
    },
    "megatron.arguments": {"parse_args": "megatron.config.command_line.parse(argv)"},
    "megatron.checkpointing": {
        "check_checkpoint_args ensure_directory_exists get_checkpoint_name get_checkpoint_tracker_filename "
        "get_checkpoint_version save_ds_checkpoint set_checkpoint_version": _SAVES,
        "load_ict_checkpoint": _REALM,
    },
    "megatron.data.T5_dataset": {
        "EncDecDataset": "megatron.data.t5_dataset.T5Dataset, or cpm_triples.CPMTripleDataset",
        "get_indexed_dataset_": _INDEXED,
    },
    "megatron.data.gpt2_dataset": {"get_indexed_dataset_": _INDEXED},
    "megatron.data.dataset_utils": {
        "build_train_valid_test_datasets create_tokens_and_tokentypes get_a_and_b_segments pad_and_convert_to_numpy "
        "truncate_segments": _BERT,
        "compile_helper": GONE_MODULES["megatron.data.helpers"],
        "create_masked_lm_predictions": _MASKING,
        "get_indexed_dataset_": _INDEXED,
        "get_train_valid_test_split_": "megatron.data.splits.split_documents(parse_split(split), documents)",
    },
    "megatron.data.indexed_dataset": {
        "IndexedCachedDataset MMapIndexedDataset create_doc_idx data_file_path dataset_exists "
        "get_available_dataset_impl index_file_path infer_dataset_impl make_dataset read_longs": _INDEXED,
        "IndexedDatasetBuilder MMapIndexedDatasetBuilder "
        "make_builder write_longs": "data_utils.indexed_writer.IndexedDatasetBuilder(prefix, dtype)",
    },
    "megatron.data.samplers": {
        "DistributedBatchSampler": "megatron.data.sampler.ConsecutiveSampler",
        "RandomSampler": "megatron.data.sampler.ConsecutiveSampler; data sets shuffle by --seed",
    },
    "megatron.fp16": _FP16,
    "megatron.fp16.fp16": _FP16,
    "megatron.fp16.fp16util": {
        "BN_convert_float FP16Model convert_module convert_network master_params_to_model_params "
        "model_grads_to_master_grads network_to_half prep_param_lists tofp16": "--precision fp16 converts weights "
        "and keeps fp32 master weights; remove this import",
        "clip_grad_norm": "megatron.mpu.clip_grad_norm",
        "to_python_float": "tensor.item()",
    },
    "megatron.fp16.loss_scaler": {"DynamicLossScaler LossScaler": _SCALER},
    "megatron.global_vars": {
        "Timers": "megatron.timers.Timers",
        "get_adlr_autoresume": _RESUMES,
        "get_tensorboard_writer": _METRICS,
        "rebuild_tokenizer": _TOKENIZERS,
        "set_global_variables": "pretrain() sets what get_args(), get_tokenizer() and get_timers() return",
    },
    "megatron.initialize": {
        "initialize_megatron": "pretrain(...), or megatron.training.start_engine in a custom loop",
        "setup_deepspeed_random_and_activation_checkpointing": "--checkpoint-activations",
    },
    "megatron.learning_rates": {"AnnealingLR": "--lr-decay-style, --warmup and --min-lr; megatron.optim.lr_at"},
    "megatron.model": {
        "BertModel": _BERT,
        "DistributedDataParallel": GONE_MODULES["megatron.model.distributed"],
    },
    "megatron.model.fused_bias_gelu": {"bias_gelu_impl gelu_impl": _KERNELS},
    "megatron.model.fused_softmax": {"FusedScaleMaskSoftmax": _KERNELS},
    "megatron.model.gpt2_model": {
        "CrossEntropy": "megatron.model.loss.TokenLoss",
        "gpt2_attention_mask_func": _KERNELS,
    },
    "megatron.model.t5_model": {
        "CrossEntropy": "megatron.model.loss.TokenLoss",
        "t5_attention_mask_func": _KERNELS,
    },
    "megatron.model.language_model": {
        "Embedding EmbeddingPipe Pooler Seq2SeqEmbeddingPipe TransformerLanguageModel "
        "TransformerSeq2SeqLanguageModel get_language_model get_seq2seq_language_model": _LAYERS,
        "parallel_lm_logits": "VocabParallelEmbedding.logits(hidden)",
    },
    "megatron.model.transformer": _TRANSFORMER,
    "megatron.model.transformer_seq2seq": _TRANSFORMER,
    "megatron.mpu.random": {
        "init_checkpointed_activations_memory_buffer reset_checkpointed_activations_memory_buffer": _BUFFERS,
    },
    "megatron.mpu.utils": {
        "VocabUtility": "VocabParallelEmbedding.first_row and .rows",
        "ensure_divisibility": "mpu.divide(numerator, denominator), which rejects a remainder",
    },
    "megatron.package_info": {
        "__contact_names__ __description__ __download_url__ "
        "__keywords__ __license__ __package_name__ __url__": "importlib.metadata.metadata('megatron-tds')",
    },
    "megatron.tokenizer": {"build_tokenizer": _TOKENIZERS},
    "megatron.tokenizer.gpt2_tokenization": {
        "GPT2Tokenizer": f"{_TOKENIZERS} for a vocab.json with merges.txt",
    },
    "megatron.tokenizer.t5_tokenization": {
        "GPT2TokenizerwoMerge": f"{_TOKENIZERS} for a vocab.txt",
        "T5Tokenizer": f"{_TOKENIZERS}, to which pretrain_t5.py adds sentinels",
    },
    "megatron.tokenizer.tokenizer": {"build_tokenizer": _TOKENIZERS},
    "megatron.training": {"get_model": "megatron.training.build.build_model"},
    "megatron.utils": {
        "check_adlr_autoresume_termination": _RESUMES,
        "make_data_loader": "pretrain() builds loaders; megatron.data.sampler.build_loader in a custom loop",
        "print_params_min_max_norm": "grad_norm of metrics.jsonl, and --check-replicas",
        "report_memory": "memory_mb of metrics.jsonl",
    },
}
COUNTERPARTS = {
    (module, name): advice
    for module, table in _COUNTERPARTS.items()
    for names, advice in table.items()
    for name in names.split()
}
_SUBMODULES = {tuple(name.rsplit(".", 1)) for name in (*GONE_MODULES, *MODULES)}  # (package, module)
_KNOWN = {*HOMES, *COUNTERPARTS, *_SUBMODULES}
_OWNERS = {module for module, _ in _KNOWN}
# Modules of this project to which the finder adds names. `megatron` itself, which installs the finder, adds its own.
_EXTENDED = _OWNERS - MODULES.keys() - {"megatron"}


def resolve_name(module: str, name: str) -> Any:
    """Return this project's object for `module.name` of CPM-Pretrain.

    Raises ImportError if this project has no such object; the message says what to use instead. Raises AttributeError
    if CPM-Pretrain has no such name either.
    """
    full_name = f"{module}.{name}"
    if (module, name) in HOMES:
        return getattr(importlib.import_module(HOMES[module, name]), name)
    if (module, name) in COUNTERPARTS:
        raise ImportError(
            f"{full_name} of CPM-Pretrain is not part of this project; instead: {COUNTERPARTS[module, name]}"
        )
    if full_name in GONE_MODULES:
        raise ImportError(f"{full_name} of CPM-Pretrain is not part of this project: {GONE_MODULES[full_name]}")
    if full_name in MODULES:
        return importlib.import_module(full_name)
    # The module of this project that has all other names. The import system also asks for names such as __path__, which
    # must not be those of another module.
    home = MODULES.get(module)
    if home is not None and not (name.startswith("__") and name.endswith("__")):
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def install() -> None:
    """Make imports of CPM-Pretrain's modules and names follow the tables of this module."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finder of CPM-Pretrain's modules, which also adds CPM-Pretrain's names to modules of this project."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of module `name`; None leaves the module to the other finders."""
        if name in GONE_MODULES:
            raise ModuleNotFoundError(
                f"{name} of CPM-Pretrain is not part of this project: {GONE_MODULES[name]}", name=name
            )
        if name in MODULES:
            # megatron.fp16 is a package, for example, because megatron.fp16.fp16 lies in it.
            is_package = any(each.startswith(f"{name}.") for each in MODULES)
            return ModuleSpec(name, _NamesLoader(), is_package=is_package)
        if name not in _EXTENDED:
            return None
        # The other finders find this project's module, and its loader then also adds the names.
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec:
                if spec.loader is not None:  # a folder without __init__.py has no loader
                    loader: Any = _ExtendedLoader(spec.loader)
                    spec.loader = loader
                return spec
        return None


class _NamesLoader(Loader):
    """Loader of a module of CPM-Pretrain, which resolves each of the module's names on first use."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__getattr__ = lambda attribute: resolve_name(name, attribute)  # type: ignore[method-assign]
        home = MODULES[name]
        # `import *` does not ask __getattr__ which names there are; it reads __all__.
        if home is not None:
            module.__dict__["__all__"] = [public for public in dir(importlib.import_module(home)) if public[0] != "_"]


def _with_original_keywords(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a data-set builder that also accepts CPM-Pretrain's keywords, of which a call has `data_prefix`."""

    @functools.wraps(build)
    def build_either(*args: Any, **kwargs: Any) -> Any:
        if "data_prefix" not in kwargs:
            return build(*args, **kwargs)
        from .data import gpt2_datasets

        return gpt2_datasets(*args, **kwargs)

    return build_either


class _ExtendedLoader:
    """Loader of a module of this project, which adds CPM-Pretrain's names to the module.

    inner: the loader that does everything else.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        names = vars(module)
        # Both projects have this function, but its keywords differ.
        if module.__name__ == "megatron.data.gpt2_dataset":
            build = names["build_train_valid_test_datasets"]
            names["build_train_valid_test_datasets"] = _with_original_keywords(build)
        own_getattr = names.get("__getattr__")

        def get_attribute(name: str) -> Any:
            # A module's own __getattr__ answers for all names that are in none of the tables.
            if own_getattr is None or (module.__name__, name) in _KNOWN:
                return resolve_name(module.__name__, name)
            return own_getattr(name)

        module.__getattr__ = get_attribute  # type: ignore[method-assign]
