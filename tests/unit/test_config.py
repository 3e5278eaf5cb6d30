import json
import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_utils import inspect_data, preprocess_data
from data_utils.run_data import load_config
from megatron.checkpointing import plain_config
from megatron.config import SECTIONS, settings
from megatron.config.command_line import from_file, parse, with_values
from megatron.config.defaults import DEFAULTS
from megatron.config.ds_config import resolve
from megatron.config.families import parse_any_family
from megatron.config.fields import ConfigError
from megatron.config.help import help_text
from megatron.config.parallel import uses_sequence_parallel
from megatron_compat.args import Args
from tests.sentences import SENTENCES
from tests.support import command


def write(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_defaults_then_file_then_flags_and_the_last_flag_wins(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", {"model": {"hidden_size": 64, "num_attention_heads": 4}, "lr": 3e-4})
    config = parse(["--lr", "1e-3", "--config", path, "--num-attention-heads", "8", "--lr", "5e-4"], {"gas": 3})
    assert (config.model.hidden_size, config.model.num_attention_heads, config.model.num_layers) == (64, 8, 12)
    assert (config.optim.lr, config.train.gas, config.model.head_size, config.model.ff_size) == (5e-4, 3, 8, 256)


def test_a_later_file_wins_over_an_earlier_one(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.json", {"seed": 1, "gas": 2}), write(tmp_path / "b.json", {"train": {"seed": 5}})
    config = parse(["--config", a, "--config", b])
    assert (config.train.seed, config.train.gas) == (5, 2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--hiden-size", "3"], r"unknown argument --hiden-size; did you mean --hidden-size\?"),
        (["--hidden-size", "x"], "invalid int value"),
        (["--hidden-size", "10"], "--hidden-size 10 cannot be split among --num-attention-heads 12"),
        (["--gas", "0"], "--gas 0 must be at least 1"),
        (["--lr-decay-style", "cos"], "--lr-decay-style cos must be one of cosine, linear, constant"),
        (["--hidden-dropout", "1.5"], "must lie between 0 and 1"),
        (["--adam-beta1", "1.0"], "--adam-beta1 1.0 must be at least 0 and less than 1"),
        (["--adam-eps", "0"], "--adam-eps 0.0 must be more than 0"),  # 0 / 0 where the gradient is 0
        (["--adam-beta2", "1.0"], "--adam-beta2 1.0 must be at least 0 and less than 1"),
        (["--load", ""], "--load is empty; give a path, or leave it out"),
        (["--model-parallel-size", "5"], "--num-attention-heads 12 cannot be split over --model-parallel-size 5"),
        (
            ["--context-parallel-size", "3"],
            "--seq-length 1024 is not a multiple of 6: each of --context-parallel-size 3 ranks",
        ),
        (
            ["--context-parallel-size", "4", "--model-parallel-size", "4", "--sequence-parallel", "--seq-length", "24"],
            "--seq-length 24 is not a multiple of 16.*--context-parallel-size 4.*--model-parallel-size 4",
        ),
        (
            ["--context-parallel-size", "2", "--family", "t5"],
            r"--context-parallel-size \(used by gpt2 and llama only\): this model is a t5; leave it out",
        ),
        (["--family", "gpt2", "--pipe-parallel-size", "13"], "--pipe-parallel-size 13 is more than --num-layers 12"),
        (["--max-position-embeddings", "8"], "--seq-length 1024 exceeds --max-position-embeddings 8"),
        (["--config", "/no/such.json"], "cannot read /no/such.json: No such file"),
        (
            ["--family", "t5", "--span-convention", "cpm", "--num-sentinels", "1"],
            "--num-sentinels 1: with --span-convention cpm, a sentinel also ends the labels; give 2",
        ),
        (
            ["--family", "t5", "--reset-position-ids"],
            "--reset-position-ids: a T5 distinguishes documents only with --reset-attention-mask; give both, or "
            "neither",
        ),
        (
            ["--family", "t5", "--position-embedding", "relative", "--relative-attention-max-distance", "16"],
            "--relative-attention-max-distance 16.*--relative-attention-num-buckets 32",
        ),
    ],
)
def test_mistakes_are_named(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(argv)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": {"hiden_size": 3}}, "section 'model' has no setting 'hiden_size'; did you mean hidden_size?"),
        ({"zero_optimization": {"stage": 1}}, "pass it as --deepspeed-config"),
        ({"hidden_size": 8, "architectures": ["GPT2LMHeadModel"]}, "--from-hf"),
        ({"hiden_size": 3}, "unknown setting 'hiden_size'; did you mean hidden_size?"),
        ({"model": {"hidden_size": "64"}}, "--hidden-size must be int, got '64'"),
        ({"num_layers": True}, "--num-layers must be int, got True"),
        ([1], "must hold a JSON object, found list"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(["--config", write(tmp_path / "a.json", content)])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "flags", "found"),
    [
        ({"sliding_window": 8}, "--sliding-window none", {"sliding_window": None}),
        (
            {"num_key_value_heads": 4, "kv_hidden_size": 8},
            "--num-key-value-heads none",
            {"key_value_heads": 12, "head_size": 8},
        ),
        ({"max_position_embeddings": 4096}, "--max-position-embeddings=none", {"max_position_embeddings": None}),
        ({"reference_ops": ["rope", "swiglu"]}, "--reference-ops none", {"reference_ops": ()}),
        ({"sliding_window": 8}, "--sliding-window none --sliding-window 3", {"sliding_window": 3}),
        ({"sliding_window": "none", "rope_scaling": "none"}, "", {"sliding_window": None, "rope_scaling": None}),
    ],
)
def test_none_turns_off_what_a_file_sets(tmp_path: Path, content: Any, flags: str, found: dict[str, Any]) -> None:
    model = parse(["--config", write(tmp_path / "a.json", content), *flags.split()]).model
    assert {name: getattr(model, name) for name in found} == found


def test_former_names_of_settings(tmp_path: Path) -> None:
    """Flags, files, checkpoints and `get_args()` also accept the former name of a renamed setting."""
    notes: list[str] = []
    config = parse(["--unfused", "rope", "swiglu", "--failed-saves=5"], notify=notes.append)
    assert (config.model.reference_ops, config.checkpoint.max_failed_saves) == (("rope", "swiglu"), 5)
    assert [note.split(";")[0] for note in notes] == [
        "--unfused is now --reference-ops",
        "--failed-saves is now --max-failed-saves",
    ]
    assert Args(config).failed_saves == 5
    content = config.to_dict()
    content["model"]["unfused"] = content["model"].pop("reference_ops")
    content["checkpoint"]["failed_saves"] = content["checkpoint"].pop("max_failed_saves")
    assert from_file(write(tmp_path / "config.json", content)) == config
    reader: Any = SimpleNamespace(path=tmp_path, config=content, tensors={})
    assert plain_config(reader).model.reference_ops == ("rope", "swiglu")


def test_a_removed_setting_in_a_file_is_ignored(tmp_path: Path) -> None:
    content = parse([]).to_dict()
    for value in (None, "certificate.json"):
        content["checkpoint"]["certificate"] = value
        path = write(tmp_path / "config.json", content)
        notes: list[str] = []
        assert from_file(path) == parse(["--config", path], notify=notes.append) == parse([])
        assert any("--certificate" in note for note in notes) == (value is not None)


def test_tools_read_the_settings_of_a_run_whose_script_registers_its_schedule(tmp_path: Path) -> None:
    flags = ["--pipe-parallel-size", "2", "--pipeline-schedule", "waves"]
    content = parse(flags[:2]).to_dict()
    content["parallel"]["pipeline_schedule"] = "waves"
    path = write(tmp_path / "config.json", content)
    assert from_file(path).parallel.pipeline_schedule == "waves"
    assert parse_any_family(["mine.py", *flags]).parallel.pipeline_schedule == "waves"
    for argv in (flags, ["--config", path]):  # a run needs the schedule itself
        with pytest.raises(ConfigError, match="--pipeline-schedule waves"):
            parse(argv)


def test_documents_left_out_by_earlier_versions_are_refused_by_name(tmp_path: Path) -> None:
    """A file that names documents to leave out does not start a run with them; its other settings stay readable."""
    content = parse([]).to_dict()
    content["data"]["without"] = None
    path = write(tmp_path / "config.json", content)
    assert parse(["--config", path]) == parse([])
    content["data"]["without"] = '[{"samples": 0, "documents": {"": ["17"]}}]'
    path = write(tmp_path / "config.json", content)
    assert from_file(path) == parse([])
    for argv in (["--config", path], ["--without", "documents.txt"]):
        with pytest.raises(ConfigError, match=r"--without .*inspect_data\.py drop"):
            parse(argv)
    with pytest.raises(ConfigError, match=r"config\.json.*--without"):
        load_config(str(tmp_path))


def test_a_checkpoint_with_divided_experts_is_read_by_one_process(tmp_path: Path) -> None:
    content = parse(["--num-experts", "4", "--expert-parallel-size", "2"]).to_dict()
    reader: Any = SimpleNamespace(path=tmp_path, config=content, tensors={})
    assert plain_config(reader).parallel.data_parallel_size(1) == 1


def test_tools_read_a_checkpoint_without_the_packages_that_its_kernels_need(tmp_path: Path) -> None:
    content = parse(["--family", "gpt2", "--kernels", "apex", "--flash-attention-impl", "FA3"]).to_dict()
    reader: Any = SimpleNamespace(path=tmp_path, config=content, tensors={})
    config = plain_config(reader)
    assert (config.model.kernels, config.train.flash_attention_impl) == ("auto", None)


def test_none_of_other_sections_and_where_it_means_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", {"data_path": ["a", "b"], "load": "runs/a", "keep_last": 2, "zero_stage": 1})
    flags = "--data-path none --load none --keep-last none --zero-stage none"
    config = parse(["--config", path, *flags.split()])
    assert (config.data.data_path, config.checkpoint.load, config.checkpoint.keep_last) == (None, None, None)
    assert config.parallel.zero_stage is None
    for argv, message in (
        ("--hidden-size none", "argument --hidden-size: invalid int value: 'none'"),
        ("--sliding-window off", "argument --sliding-window: invalid int value: 'off'"),
        ("--sliding-window 0", "--sliding-window 0 must be at least 1, or none"),
        ("--gas 0", "--gas 0 must be at least 1"),
        (
            "--data-path a --valid-data-path b",
            "--valid-data-path and --test-data-path need --train-data-path or --data-stages instead of --data-path, "
            "which --split divides",
        ),
    ):
        with pytest.raises(ConfigError) as refused:
            parse(argv.split())
        assert str(refused.value) == message


def test_another_rope_scaling_leaves_out_what_a_file_says_of_its_own(tmp_path: Path) -> None:
    """--rope-scaling drops RoPE settings of a --config file if the new scaling does not use them, and notes say so."""
    llama3 = {
        "rope_scaling": "llama3",
        "rope_scaling_factor": 8.0,
        "rope_original_length": 8192,
        "rope_low_freq_factor": 2.0,
    }
    path = write(tmp_path / "a.json", {"model": {**llama3, "rope_high_freq_factor": 4.0}})
    dropped = {
        "linear": ["--rope-original-length 8192", "--rope-low-freq-factor 2.0"],
        "yarn": ["--rope-low-freq-factor 2.0"],
        "none": ["--rope-scaling-factor 8.0", "--rope-original-length 8192", "--rope-low-freq-factor 2.0"],
        "llama3": [],
    }
    for kind, numbers in dropped.items():
        notes: list[str] = []
        model = parse(["--config", path, "--rope-scaling", kind], notify=notes.append).model
        assert notes == [f"{path}: {each} has no effect: --rope-scaling {kind} does not use it" for each in numbers]
        assert model.rope_scaling_factor == (1.0 if kind == "none" else 8.0)
        assert model.rope_original_length == (8192 if kind in ("yarn", "llama3") else None)
    later = write(tmp_path / "b.json", {"rope_scaling": "linear", "rope_scaling_factor": 2})
    found = parse(["--config", path, "--config", later], notify=notes.append).model
    assert (found.rope_scaling, found.rope_scaling_factor, found.rope_original_length) == ("linear", 2.0, None)
    back = parse(["--config", path, "--config", later, "--rope-scaling", "none"], notify=notes.append).model
    assert back.rope_scaling is None and notes[-1].startswith(f"{later}: --rope-scaling-factor 2 has no effect")
    with pytest.raises(ConfigError, match="--rope-original-length.*--rope-scaling"):
        parse(["--config", path, "--rope-scaling", "linear", "--rope-original-length", "4096"])
    for wrong in (["yarn"], {"type": "yarn"}):
        with pytest.raises(ConfigError, match="--rope-scaling"):
            parse(["--config", path, "--config", write(tmp_path / "c.json", {"rope_scaling": wrong})])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n "lr": \n}', "a.json, line 3: Expecting value"),
        ('{\n "lr": 1,\n "gas": 2,\n\n}', "a.json, line 3: JSON does not allow a comma before }"),
        ('{"gas": [\n1, ]}', "a.json, line 2: JSON does not allow a comma before ]"),
        ('{\n // the rate\n "lr": 1}', "a.json, line 2: JSON does not allow comments"),
    ],
)
def test_bad_json_names_the_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(["--config", str(path)])


def test_args_are_a_flat_read_only_view() -> None:
    config = parse(["--hidden-size", "24", "--num-attention-heads", "2"])
    args = Args(config)
    assert (args.hidden_size, args.pipe_parallel_size, args.config) == (24, 0, config)
    with pytest.raises(AttributeError, match="fixed"):
        args.hidden_size = 3
    with pytest.raises(AttributeError, match=SENTENCES["did_you_mean_hidden_size"]):
        _ = args.hiden_size
    with pytest.raises(FrozenInstanceError):
        config.model.hidden_size = 3  # type: ignore[misc]


def test_names_are_unique_and_all_have_help() -> None:
    found = [f for section in SECTIONS.values() for f in fields(section)]
    assert len({f.name for f in found}) == len(found)
    assert all(f.metadata["help"] for f in found)


def test_config_json_reads_back(tmp_path: Path) -> None:
    config = parse(["--hidden-size", "24", "--num-attention-heads", "2", "--no-hidden-bias", "--split", "8,1,1"])
    assert parse(["--config", write(tmp_path / "config.json", config.to_dict())]) == config


def test_a_key_that_stands_twice_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"train": {"lr": 1e-3, "gas": 8, "gas": 4}}')
    with pytest.raises(ConfigError, match=SENTENCES["sets_gas_more_than_once"]):
        parse(["--config", str(tmp_path / "a.json")])


def test_a_single_stage_interleaves_nothing() -> None:
    """The number of layers does not matter, as a single stage has one chunk of them."""
    flags = "--pipeline-schedule interleaved --virtual-pipeline-size 4 --num-layers 2 --pipe-parallel-size"
    parse([*flags.split(), "0"], {"family": "gpt2"})
    with pytest.raises(ConfigError, match="--virtual-pipeline-size 4 is more than --num-layers 2"):
        parse([*flags.split(), "2"], {"family": "gpt2"})


def test_the_family_is_said_and_reads_only_what_it_knows() -> None:
    t5 = ["--enc-seq-length", "32", "--position-embedding", "relative"]
    assert parse(t5, {"family": "t5"}).is_t5
    assert not parse(t5).is_t5, "a model of a user's own, which may read them"
    with pytest.raises(ConfigError) as refused:
        parse(["--enc-seq-length", "32", "--noise-density", "0.2", "--hidden-size", "36"], {"family": "gpt2"})
    assert (
        str(refused.value)
        == "--enc-seq-length (used by t5 only), --noise-density (used by t5 only): this model is a gpt2; leave them out"
    )
    with pytest.raises(
        ConfigError, match=r"--rope-theta \(used by llama only\), --num-decoder-layers \(used by t5 only"
    ):
        parse(["--rope-theta", "5", "--num-decoder-layers", "2"], {"family": "gpt2"})
    with pytest.raises(ConfigError, match="--position-embedding"):
        parse(["--position-embedding", "relative"], {"family": "gpt2"})
    with pytest.raises(ConfigError, match="--family"):
        parse(["--family", "t5"], {"family": "gpt2"})


def test_the_family_of_settings_that_do_not_say_it(tmp_path: Path) -> None:
    for length, family in ((None, "gpt2"), (32, "t5")):
        content = parse([]).to_dict()
        del content["model"]["family"]
        content["data"]["enc_seq_length"] = length
        assert from_file(write(tmp_path / "config.json", content)).model.family == family
    own = parse([]).to_dict()
    assert from_file(write(tmp_path / "config.json", own)).model.family is None


def test_settings_of_decoders_before_they_had_objectives(tmp_path: Path) -> None:
    """Old config.json files of decoder-only models contain T5's objective, span-corruption; it is ignored."""
    for family, read in (("gpt2", None), (None, None), ("t5", "span-corruption")):
        content = parse([]).to_dict()
        content["model"]["family"], content["data"]["objective"] = family, "span-corruption"
        path = write(tmp_path / "config.json", content)
        assert from_file(path).data.objective == read
        assert parse(["--config", path]).data.objective == read
    assert [parse(["--family", f]).objective for f in ("gpt2", "t5")] == ["lm", "span-corruption"]


def test_every_setting_is_read_by_something() -> None:
    """The code reads every setting, so no flag is without effect."""
    root = Path(__file__).resolve().parents[2]
    source = (
        "".join(
            path.read_text()
            for path in (root / "megatron").rglob("*.py")
            if path.name not in ("sections.py", "output.py", "command_line.py")
        )
        + (root / "megatron/config/sections.py").read_text().split("class Config:")[1]
    )
    derived = {
        "trace_iterations": "trace_range",
        "profile_iterations": "profile_range",
        "kv_hidden_size": "head_size",
        "ff_hidden_size": "ff_size",
        "moe_layer_frequency": "has_experts",
        "max_position_embeddings": "positions",
    }
    derived |= dict.fromkeys(("train_data_path", "valid_data_path", "test_data_path"), "data.paths")
    derived |= {"pipe_parallel_size": "stages", "num_decoder_layers": "decoder_layers"}
    for section in SECTIONS.values():
        for f in fields(section):
            assert f".{derived.get(f.name, f.name)}" in source, f.name


@pytest.mark.parametrize(
    ("flags", "accelerated", "splits"),
    [
        ("--family gpt2 --model-parallel-size 4 --seq-length 64", True, True),
        ("--family gpt2 --model-parallel-size 4 --seq-length 64", False, False),
        ("--family gpt2 --model-parallel-size 4 --seq-length 66", True, False),
        ("--family gpt2 --seq-length 64", True, False),
        ("--model-parallel-size 4 --seq-length 64", True, False),  # without --family, the model is a user's
        ("--model-parallel-size 4 --seq-length 66 --sequence-parallel", False, True),
        ("--family gpt2 --model-parallel-size 4 --seq-length 64 --no-sequence-parallel", True, False),
        ("--family t5 --model-parallel-size 4 --enc-seq-length 62 --seq-length 64", True, False),
        ("--family t5 --model-parallel-size 4 --enc-seq-length 62 --seq-length 66 --sequence-parallel", True, True),
    ],
)
def test_sequences_are_split_where_that_pays(flags: str, accelerated: bool, splits: bool) -> None:
    assert uses_sequence_parallel(parse(flags.split()), accelerated) is splits


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_sequence_parallelism_of_a_length_that_the_ranks_cannot_split_is_refused(family: str) -> None:
    flags = ["--model-parallel-size", "4", "--num-attention-heads", "4", "--sequence-parallel", "--seq-length"]
    assert parse([*flags, "132"], DEFAULTS[family]).parallel.sequence_parallel
    with pytest.raises(ConfigError, match=r"--seq-length 130 .*--sequence-parallel.*--model-parallel-size 4"):
        parse([*flags, "130"], DEFAULTS[family])


def test_padding_beyond_the_learned_positions_of_a_t5_is_refused() -> None:
    flags = [
        "--model-parallel-size",
        "2",
        "--sequence-parallel",
        "--seq-length",
        "32",
        "--dec-seq-length",
        "15",
        "--enc-seq-length",
    ]
    assert parse([*flags, "32"], DEFAULTS["t5"]).parallel.sequence_parallel
    assert parse([*flags, "33", "--position-embedding", "relative"], DEFAULTS["t5"]).positions == 33
    assert parse([*flags, "33", "--max-position-embeddings", "34"], DEFAULTS["t5"]).positions == 34
    with pytest.raises(ConfigError, match=r"--sequence-parallel .*--max-position-embeddings 34"):
        parse([*flags, "33"], DEFAULTS["t5"])


def test_context_ranks_are_no_replicas(tmp_path: Path) -> None:
    """Context-parallel ranks do not enlarge the global batch, although DeepSpeed's train_batch_size counts them."""
    config = parse(["--context-parallel-size", "2", "--model-parallel-size", "2", "--batch-size", "3", "--gas", "5"])
    assert config.parallel.data_parallel_size(8) == 2 and config.train_batch_size(8) == 30
    assert resolve(config, 8, False).deepspeed["train_batch_size"] == 60
    with pytest.raises(ConfigError, match="--context-parallel-size"):
        config.parallel.data_parallel_size(6)
    path = write(tmp_path / "ds.json", {"train_batch_size": 60})
    with pytest.raises(ConfigError, match="train_batch_size .* 15: .* / --context-parallel-size 2"):
        resolve(with_values(config, {"deepspeed_config": path, "pipe_parallel_size": 2, "num_layers": 2}), 8, False)


def test_help_comes_without_torch_and_shows_what_the_family_reads() -> None:
    shown = {}
    for family in ("gpt2", "llama", "t5"):
        code = (
            f"import atexit, sys, pretrain_{family} as script; sys.argv = ['x', '--help', 'all']; "
            "atexit.register(lambda: print('torch' in sys.modules)); script.main()"
        )
        done = command("python", "-c", code)
        assert (done.returncode, done.stderr) == (0, "")
        *_, loaded = done.stdout.split()
        assert loaded == "False"
        shown[family] = done.stdout
    assert all("--train-iters INT" in text and "--normalization {layernorm,rmsnorm}" in text for text in shown.values())
    assert ["--num-decoder-layers" in shown[name] for name in shown] == [False, False, True]
    assert ["--rope-theta" in shown[name] for name in shown] == [False, True, False]


def test_a_misspelled_required_flag_of_a_tool_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for parser, words in ((preprocess_data.build_parser(), []), (inspect_data.build_parser(), ["decode", "x", "3"])):
        with pytest.raises(SystemExit):
            parser.parse_args([*words, "--vocab-fil", "tokenizer.model"])
        error = capsys.readouterr().err
        assert "--vocab-fil;" in error and "--vocab-file?" in error and "required" in error


def _help(family: str, *topic: str, columns: int = 80) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        return help_text(f"pretrain_{family}.py", family, *topic or (None,))


@pytest.mark.parametrize("family", DEFAULTS)
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_begins_with_the_flags_that_people_use_first(family: str, columns: int) -> None:
    first = _help(family, columns=columns)
    assert "--data-path PATH" in first and "--num-layers INT" in first and "--adam-beta1" not in first
    every = _help(family, "all", columns=columns)
    assert "--adam-beta1 FLOAT" in every
    for text in (first, every):
        assert "None" not in text
        prose = [line for line in text.splitlines() if line.startswith(" " * 28)]
        long = [line for line in prose if len(line) > min(columns, 100)]
        assert long == []


@pytest.mark.parametrize("family", DEFAULTS)
def test_help_shows_each_setting_of_a_family_once_with_the_defaults_of_its_script(family: str) -> None:
    every = _help(family, "all")
    parsed = parse([], DEFAULTS[family])
    for name, section, f in settings():
        shown = re.findall(rf"^  --(?:\[no-\])?{f.name.replace('_', '-')}(?: |$)", every, re.M)
        families = f.metadata["family"]
        assert len(shown) == (families is None or family in families), f.name
        assert _help(family, name) in every
        if not shown:
            continue
        about = " ".join(_help(family, f.name).split())
        value = getattr(getattr(parsed, name), f.name)
        if isinstance(value, bool):
            assert f"(default: {'on' if value else 'off'})" in about
        elif isinstance(value, (int, float, str)) and f.name != "enc_seq_length":
            assert f"(default: {value})" in about, section


def test_help_shows_experts_after_the_sizes_of_the_model() -> None:
    text = _help("llama", "model")
    assert text.index("--num-layers INT") < text.index("--num-experts INT")


def test_help_of_an_unknown_topic_says_what_there_is() -> None:
    with pytest.raises(ConfigError, match="--help modle.*model"):
        _help("gpt2", "modle")
    assert "peak learning rate" in _help("gpt2", "--lr")


def test_an_unknown_preset_gets_the_names_of_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="llama_8b"):
        parse(["--config", "nope"])


@pytest.mark.parametrize("flag", ["--config", "--param-groups", "--deepspeed-config"])
def test_a_file_name_that_is_too_long_is_a_mistake_in_the_settings(flag: str) -> None:
    """Such as settings in JSON in place of the name of their file; a name has at most 255 characters."""
    text = json.dumps({f"setting_{i}": i for i in range(30)})
    for name in (text, "a" * 300):
        with pytest.raises(ConfigError, match="cannot read"):
            config = parse([flag, name])
            resolve(config, 1, False)
