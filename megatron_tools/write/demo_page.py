"""The page of tools/demo.py, made with gradio. Importing this module raises ImportError if gradio is not installed."""

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from megatron.model.parameter_counts import count_parameters

from .demo import PageContent, stream_poem, stream_text, with_settings
from .demo_html import CSS, EMPTY_TEXTS, probability_bars, text_cards
from .writer import Writer

POEM_FORMS = {"五言绝句 4 × 5": (4, 5), "七言绝句 4 × 7": (4, 7), "五言律诗 8 × 5": (8, 5), "七言律诗 8 × 7": (8, 7)}
SETTING_TYPES = {
    "num_samples": int,
    "max_new_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "seed": int,
}
Update = tuple[str, str]  # HTML of the texts and of the bars
Stream = Callable[..., Iterator[PageContent]]
Tab = tuple[Any, list[Any], Stream]  # button, inputs and function that streams the content


def build_page(writer: Writer, args: argparse.Namespace) -> gr.Blocks:
    """Return the page of a model. args: flags of tools/demo.py; those of sampling are the first settings."""
    # The analytics of gradio would send each start to its servers.
    with gr.Blocks(title="Text of a model", analytics_enabled=False) as page:
        parameters = count_parameters(writer.model) / 1e6
        gr.Markdown(f"### {Path(args.load).name} ({writer.config.model.family}, {parameters:.1f} M parameters)")
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                tabs = [_add_poem_tab()] if args.poem else []
                tabs.append(_add_text_tab(writer))
                settings = _add_settings(args)
                stop = gr.Button("Stop 停止", elem_id="stop")
            with gr.Column(scale=3, min_width=320):
                texts = gr.HTML(EMPTY_TEXTS, elem_id="texts")
                gr.Markdown("#### Next token of the first text 下一个词元的概率")
                chart = gr.HTML("", elem_id="chart")
        events = []
        for button, inputs, stream in tabs:
            answer = _click_handler(writer, args, stream, len(inputs))
            # The model writes for one visitor at a time; others wait.
            event = button.click(
                answer, [*inputs, *settings], [texts, chart], show_progress="hidden", concurrency_id="model"
            )
            events.append(event)
        stop.click(None, cancels=events)
    return page


def _add_text_tab(writer: Writer) -> Tab:
    """Add the form for a prompt. Return its button, its inputs, and the function that takes (writer, *inputs, args)."""
    hint = "masked spans such as <extra_id_0> or <s_0>" if writer.config.is_t5 else "the model continues this text"
    with gr.Tab("Text 文本"):
        prompt = gr.Textbox(label="Prompt 提示", info=hint, lines=3, elem_id="prompt")
        button = gr.Button("Write 生成", variant="primary", elem_id="write")
    return button, [prompt], stream_text


def _add_poem_tab() -> Tab:
    """Add the form for a poem. Return the same as `_add_text_tab`."""
    with gr.Tab("Poem 作诗"):
        title = gr.Textbox(label="Title 题目", value="月夜忆舍弟", elem_id="title")
        forms = list(POEM_FORMS)
        form = gr.Radio(forms, value=forms[0], label="Form 体裁 (lines × characters)")
        button = gr.Button("Write 作诗", variant="primary", elem_id="write_poem")

    def stream(writer: Writer, title: str, form: str, args: argparse.Namespace) -> Iterator[PageContent]:
        return stream_poem(writer, title, *POEM_FORMS[form], args)

    return button, [title, form], stream


def _add_settings(args: argparse.Namespace) -> list[Any]:
    """Add the settings of sampling; return them in the order of SETTING_TYPES."""
    # A flag may set the first value of a slider beyond its usual maximum.
    most_samples = max(4, args.num_samples)
    most_tokens = max(512, args.max_new_tokens)
    highest_temperature = max(2, args.temperature)
    highest_top_k = max(200, args.top_k)
    # A slider gets its minimum, its maximum and its first value.
    with gr.Row():
        samples = gr.Slider(1, most_samples, args.num_samples, step=1, label="Samples 份数")
        tokens = gr.Slider(1, most_tokens, args.max_new_tokens, step=1, label="Tokens 词元数")
    with gr.Row():
        temperature = gr.Slider(0, highest_temperature, args.temperature, step=0.05, label="Temperature")
        top_p = gr.Slider(min(0.05, args.top_p), 1, args.top_p, step=0.05, label="Top-p (1: all)")
    with gr.Row():
        top_k = gr.Slider(0, highest_top_k, args.top_k, step=1, label="Top-k (0: all)")
        seed = gr.Number(args.seed, precision=0, label="Seed 随机种子")
    return [samples, tokens, temperature, top_k, top_p, seed]


def _click_handler(
    writer: Writer, args: argparse.Namespace, stream: Stream, num_inputs: int
) -> Callable[..., Iterator[Update]]:
    """Return the function that gradio calls at a click, and that yields updates of the page.

    stream: function of the tab that streams the content. num_inputs: number of inputs of the tab.
    """

    def answer(*values: Any) -> Iterator[Update]:
        # gradio passes the values of the tab's inputs, then those of the settings in the order of SETTING_TYPES.
        inputs = values[:num_inputs]
        settings = {}
        for (name, convert), value in zip(SETTING_TYPES.items(), values[num_inputs:], strict=True):
            if value is not None:  # an emptied field
                settings[name] = convert(value)
        try:
            for content in stream(writer, *inputs, with_settings(args, settings)):
                yield text_cards(content, poems=stream is not stream_text), probability_bars(content)
        except ValueError as error:
            raise gr.Error(str(error)) from None

    return answer


def serve(writer: Writer, args: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C. Raises ValueError if the port is in use."""
    # The fonts of gradio's other themes come from a server of Google.
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    page = build_page(writer, args)
    # gradio requests its own page, which a proxy of the environment does not find.
    no_proxy = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    os.environ["no_proxy"] = f"{no_proxy},localhost,127.0.0.1,{args.host}".strip(",")
    try:
        page.launch(
            server_name=args.host,
            server_port=args.port,
            share=False,
            ssr_mode=False,
            quiet=True,
            theme=theme,
            css=CSS,
            footer_links=[],
            prevent_thread_lock=True,
        )
    except OSError:
        raise ValueError(
            f"--port {args.port} of --host {args.host} is in use or not allowed; pass another one"
        ) from None
    print(f"the page is at http://{args.host}:{args.port}; Ctrl-C ends it", flush=True)
    page.block_thread()
