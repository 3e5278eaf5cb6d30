"""Sentence splitting for Chinese and English."""

import re

# A Chinese sentence ends with a punctuation mark and the closing quotes and brackets after it. An ASCII ? or ! before
# another ASCII character, as in URLs, ends none. An English sentence ends with a full stop and white space, unless an
# abbreviation, an initial or a list number precedes the full stop. A line break also ends a sentence.
_END = re.compile(
    r"""(?:(?:[。！？!?…；]*[。！？…；][!?]*[”’」』）》〉】"')\]]*|[!?]+[”’」』）》〉】"')\]]*(?![!-~]))\s*
        |(?<=[^\s.])\.+["')\]”’]*(?:\s+|$)
        |\n\s*)""",
    re.VERBOSE,
)
_NOT_A_STOP = re.compile(
    r"^\s*[(“\"']?\d+$|(?:^|[\s(“\"'])(?:[A-Za-z]|(?:[A-Za-z]\.)+[A-Za-z]"
    r"|Mr|Mrs|Ms|Dr|Prof|St|vs|etc|cf|Fig|No|Vol|pp|al|Inc|Ltd|Jr|Sr)$"
)


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences, each with the white space after it.

    The joined sentences equal the text. An empty text gives [].
    """
    sentences: list[str] = []
    start = 0
    for ending in _END.finditer(text):
        sentence = text[start : ending.start()]
        mark = ending[0]  # with the white space after it
        is_full_stop = mark[0] == "." and "\n" not in mark  # a line break ends a sentence in any case
        # The last 12 characters suffice to see an abbreviation, an initial or a list number. A ^ still matches only at
        # the start of the sentence.
        if is_full_stop and _NOT_A_STOP.search(sentence, len(sentence) - 12):
            continue
        whole = text[start : ending.end()]
        # White space alone is no sentence: it joins the sentence before it or, at the start, the one after it.
        if sentence.strip():
            sentences.append(whole)
        elif sentences:
            sentences[-1] += whole
        else:
            continue
        start = ending.end()
    rest = text[start:]
    if rest:
        if rest.strip() or not sentences:
            sentences.append(rest)
        else:
            sentences[-1] += rest
    return sentences
