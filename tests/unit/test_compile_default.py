"""Layers are compiled by default on CUDA, unless something speaks against it; --compile and --no-compile override."""

from pathlib import Path

import pytest
import torch

from megatron.config.command_line import parse
from megatron.config.ds_config import resolve
from megatron.config.fields import ConfigError
from megatron.features import compiling
from megatron.model.block import Block
from megatron.ranks import device

GPT2 = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --vocab-size 64 --pipe-parallel-size 0"


def compiled(flags: str, monkeypatch: pytest.MonkeyPatch, kind: str = "cuda", compiler: bool = True) -> bool:
    """Return whether a run with `flags` on a device of this kind compiles its layers.

    compiler: whether torch finds a compiler.
    """
    config = parse(f"{GPT2} {flags}".split())
    layer = Block(config.model, "layers.0")
    monkeypatch.setattr(device, "current_device", lambda: torch.device(kind))
    monkeypatch.setattr(compiling, "compiler_found", lambda: compiler)
    monkeypatch.setattr(compiling, "_exclude_from_compiling", lambda: None)
    compiling.compile_layers(torch.nn.Sequential(layer), config, resolve(config, 1, False).zero_stage)
    return layer._compiled_call_impl is not None


@pytest.mark.parametrize(
    ("flags", "kind", "is_compiled"),
    [("", "cuda", True), ("", "cpu", False), ("", "xpu", False), ("--no-compile", "cuda", False)]
    + [("--compile", kind, True) for kind in ("cuda", "cpu", "xpu")],
)
def test_the_default_depends_on_the_device_and_a_flag_wins(
    flags: str, kind: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compiled(flags, monkeypatch, kind) is is_compiled
    assert ("--no-compile turns it off" in capsys.readouterr().out) == (not flags and is_compiled)


FORBIDDEN = [
    ("--zero-stage 3", "ZeRO stage 3"),
    ("--pipeline-schedule zb-h1 --pipe-parallel-size 1", "zb-h1"),
    ("--offload-activations", "--offload-activations"),
    ("--recompute-modules norm", "--recompute-modules"),
    ("--precision fp8", "--precision fp8"),
]


@pytest.mark.parametrize(("flags", "named"), FORBIDDEN)
def test_a_conflict_turns_the_default_off_and_refuses_the_flag(
    flags: str, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not compiled(flags, monkeypatch)
    assert capsys.readouterr().out.count("note: layers are not compiled: ") == 1
    with pytest.raises(ConfigError, match=named):
        resolve(parse(f"{GPT2} {flags} --compile".split()), 1, False)


LLAMA = "--family llama --position-embedding rope"
T5 = "--family t5 --enc-seq-length 8 --dec-seq-length 8 --position-embedding relative"


@pytest.mark.parametrize(
    ("flags", "is_compiled"),
    [
        ("--reset-attention-mask", False),
        ("--objective sft", False),
        ("--objective prefix-lm", False),
        (f"{LLAMA} --sliding-window 4", False),
        (f"{LLAMA} --sliding-window 8", True),
        (T5, True),
        ("--reset-attention-mask --compile", True),
    ],
)
def test_layers_with_attention_masks_are_compiled_only_with_the_flag(
    flags: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each compiled layer saves its own mask, so the default does not compile layers that need one."""
    assert compiled(flags, monkeypatch) is is_compiled


@pytest.mark.parametrize("flags", ["", "--compile"])
def test_without_a_compiler_the_layers_are_not_compiled(
    flags: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not compiled(flags, monkeypatch, compiler=False)
    assert "Triton" in capsys.readouterr().out


@pytest.mark.parametrize(("without", "found"), [("", True), ("triton", False), ("gcc", False), ("Python.h", False)])
def test_triton_needs_a_c_compiler_and_the_headers_of_python(
    without: str, found: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch.utils._triton

    from megatron import _torch

    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda: without != "triton")
    monkeypatch.setattr(_torch.shutil, "which", lambda name: None if without == "gcc" else name)
    if without != "Python.h":
        (tmp_path / "Python.h").touch()
    monkeypatch.setattr(_torch.sysconfig, "get_path", lambda _: str(tmp_path))
    assert _torch.can_use_triton() is found
