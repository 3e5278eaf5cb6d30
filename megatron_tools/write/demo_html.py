"""HTML of the page of tools/demo.py: cards with texts, and bars of probabilities."""

from html import escape

from .demo import PageContent

CSS = """\
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(12.5rem, 1fr)); gap: 0.9rem; }
.sample { border: 1px solid var(--border-color-primary); border-radius: 10px; padding: 0.9rem 1rem; min-height: 7rem;
    background: var(--background-fill-primary); white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.75; }
.sample .prompt { color: var(--body-text-color-subdued); }
.poems .sample { text-align: center; font-size: 1.15rem; line-height: 2; }
.poems .sample .prompt { color: inherit; font-weight: 600; }
.bars { columns: 15rem; column-gap: 1.6rem; }
.bar { display: grid; grid-template-columns: 4.5rem 1fr 3.8rem; gap: 0.6rem; align-items: center; height: 1.65rem;
    break-inside: avoid; }
.bar .token { text-align: right; white-space: pre; overflow: hidden; text-overflow: ellipsis; }
.bar .track { background: var(--background-fill-secondary); border-radius: 4px; height: 0.8rem; overflow: hidden; }
.bar .share { display: block; background: var(--color-accent); border-radius: 4px; height: 100%; }
.bar .number { font-variant-numeric: tabular-nums; color: var(--body-text-color-subdued); font-size: 0.85rem; }
.hint { color: var(--body-text-color-subdued); }
footer { display: none !important; }
"""
EMPTY_TEXTS = '<p class="hint">Press <b>Write</b>. 点击 <b>Write</b> 开始。</p>'


def text_cards(shown: PageContent, poems: bool) -> str:
    """Return the texts as cards side by side. poems: the prompt of each text is a title."""
    cards = []
    for prompt, text in shown.texts:
        if poems:
            prompt = f"《{prompt.strip()}》\n"
            text = text.replace("，", "，\n")  # two lines side by side are wider than a card
        cards.append(f'<div class="sample"><span class="prompt">{escape(prompt)}</span>{escape(text)}</div>')
    css_class = "samples poems" if poems else "samples"
    return f'<div class="{css_class}">{"".join(cards)}</div>'


def probability_bars(shown: PageContent) -> str:
    """Return the probabilities of the next tokens as bars. The longest bar fills its track."""
    bars = []
    largest = max((p for _, p in shown.bars), default=1.0)
    for token, p in shown.bars:
        label = f"{p:.2%}" if p >= 0.0001 else "< 0.01%"
        bars.append(
            f'<div class="bar"><span class="token">{escape(token)}</span><span class="track">'
            f'<span class="share" style="width:{p / largest:.1%}"></span></span>'
            f'<span class="number">{label}</span></div>'
        )
    return f'<div class="bars">{"".join(bars)}</div>'
