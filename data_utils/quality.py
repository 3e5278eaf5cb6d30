"""Measures of unusable text: wrong encodings, markup, encoded bytes, URLs, repetitions."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise

# Typical results of UTF-8 decoded as Latin-1 or GBK, and of GBK decoded as another encoding.
_BROKEN = re.compile(
    r"\ufffd|锟斤拷|烫烫烫|屯屯屯|[ÃÂ][\u0080-\u00bf]|â(?:€[œ\u009d™˜”]|\u0080[\u0080-\u00bf])|ï»¿"
    r"|[æåçè][\u0080-\u00bf]{2}"
)
# Closing tags, opening tags of HTML, any tag with an attribute in quotes (XML, SVG), comments and entities. The text
# after the name must be attributes, or the inequality "a<b, so c>d" would be a tag.
_TAG = re.compile(
    r"</[a-z][-\w:.]*\s*>"
    r"|<(?:a|abbr|article|aside|audio|b|blockquote|body|br|button|canvas|caption|center|code|col|colgroup|dd|del|details|"
    r"div|dl|dt|em|embed|fieldset|figcaption|figure|font|footer|form|h[1-6]|head|header|hr|html|i|iframe|img|input|ins|"
    r"kbd|label|legend|li|link|main|meta|nav|noscript|object|ol|option|p|param|picture|pre|rp|rt|ruby|s|script|section|"
    r"select|small|span|strong|style|sub|sup|svg|table|tbody|td|textarea|tfoot|th|thead|title|tr|tt|u|ul|video|wbr)"
    r"""(?>(?:\s+|(?<=["']))(?:data-[-\w.]+|[-a-z_:.@]+)(?:\s*=\s*(?:"[^"]*"|'[^']*'|[^\s"'<>]+))?)*\s*/?>"""
    r"""|<[a-z][-\w:.]*(?>\s+[-\w:.@]+\s*=\s*(?:"[^"]*"|'[^']*'))+\s*/?>"""
    r"|<!--.{0,2000}?-->|<!DOCTYPE[^<>]{0,200}>"
    r"|&(?:[a-z](?:grave|acute|circ|tilde|uml|ring|cedil|caron)|(?:ae|oe|sz)lig|oslash|eth|thorn|iexcl|iquest|"
    r"nbsp|emsp|ensp|thinsp|zwn?j|shy|lt|gt|amp|quot|apos|(?:[lr][sd]|sb|bd)quo|[lr]s?aquo|[mn]dash|hellip|bull|middot|"
    r"copy|reg|trade|deg|times|divide|plusmn|euro|pound|yen|cent|sect|para|ord[fm]|sup[123]|frac\d\d|[lrud]arr|"
    r"#\d{2,5}|#x[0-9a-f]{2,5});",
    re.IGNORECASE | re.DOTALL,
)
_ENCODED = re.compile(r"[A-Za-z0-9+/=]{60,}(?:\s+[A-Za-z0-9+/=]{20,})*")
_URL = re.compile(r"(?:https?://|ftp://|www\.)[!-~]+", re.IGNORECASE)
_NON_ASCII = re.compile(r"[^\x00-\x7f]{2,}")
_LATIN = re.compile("[\u00a1-\u00ff]{4,}")
_REPEATED_PHRASE = re.compile(r"(.{2,200}?)\1{9,}")
_CODE_START = ("  ", "\t", "#include", "#define", "#undef", "#if", "#el", "#endif", "//", "/*", " *")
_CODE_END = (";", "{", "}", "},", "};", ");", "]", "],", ")", "\\\\", "*/", ":", "/>")
# These characters make up about a quarter of modern Chinese text, simplified or traditional.
_COMMON = re.compile(
    "[的一是不了在人有我他中大来上到和地出也要下以生可里用所方前主行面同而之其于本部分如成者作多天心日月年小自此]"
)
_HAN = re.compile("[\u4e00-\u9fa5，。、：；！？“”（）《》]")
_PRIVATE = re.compile("[\ue000-\uf8ff]")
_TWO_BYTES = re.compile("[\u0100-\u07ff]")
_SCRIPTS = "\u0100\u0180\u0250\u0370\u0400\u0530\u0590\u0600\u0700\u0800"
MAX_EXAMINED = 600  # non-ASCII characters examined to detect a wrong encoding
MIN_TAGS = 5  # smallest number of tags that counts as markup; texts about HTML may contain a few tags
MIN_REPEATS = 10  # a phrase that occurs so often in a row is reduced to one copy
LONGEST_PHRASE = 200  # characters
PROBE = 8  # length of the substrings that are searched for again to detect repetition, and their distance


def broken_characters(text: str) -> int:
    """Return the number of characters that occur only in text decoded with a wrong encoding."""
    return sum(map(len, _BROKEN.findall(text)))


def is_misread(text: str) -> bool:
    """Return True if the text was decoded throughout with a wrong encoding.

    Detects UTF-8 and Big5 decoded as GB18030, and GB18030 decoded as Latin-1, Big5 or UTF-8. Such text becomes Chinese
    when it is encoded again and decoded correctly. If invalid bytes were dropped, a mixture of many scripts remains.
    """
    # GB18030 read as Latin-1. A look at the head alone decides whether the whole text is worth the time.
    if sum(map(len, _LATIN.findall(text[:20_000]))) >= 20:
        latin = "".join(_LATIN.findall(text))
        if len(latin) > 0.1 * len(text) and _becomes_chinese(latin, "latin-1", "gb18030"):
            return True
    sample = ""
    for match in _NON_ASCII.finditer(text):
        sample += match[0]
        if len(sample) > MAX_EXAMINED:
            break
    sample = sample[:MAX_EXAMINED]
    if _becomes_chinese(sample, "gb18030", "utf-8"):  # UTF-8 read as GB18030
        return True
    # Big5 read as GB18030 has characters of private use, since the second byte of many characters of Big5 is ASCII.
    num_private = len(_PRIVATE.findall(sample))
    if num_private > 0.05 * len(sample) and _swaps_chinese(sample, "gb18030", "big5"):
        return True
    # GB18030 read as Big5, or as UTF-8 without its invalid bytes
    return _swaps_chinese(sample, "big5", "gb18030") or _is_mixed(text)


def _becomes_chinese(text: str, wrong_encoding: str, true_encoding: str) -> bool:
    """Return whether a text is mostly Chinese if it was read in `wrong_encoding` instead of `true_encoding`."""
    if len(text) < 8:  # too short for a judgement
        return False
    decoded = text.encode(wrong_encoding, "replace").decode(true_encoding, "replace")
    han = len(_HAN.findall(decoded))
    invalid = decoded.count("\ufffd") + decoded.count("?")
    return han > 4 and invalid < 0.5 * len(decoded) and 2 * han > len(decoded)


def _swaps_chinese(text: str, wrong_encoding: str, true_encoding: str) -> bool:
    """Return whether a Chinese text was probably decoded in the other of two Chinese encodings.

    In such a text, common Chinese characters are rare. They become frequent when it is encoded again and decoded
    correctly.
    """
    if len(text) < 20 or common_characters(text) > 0.03 * len(text):
        return False
    decoded = text.encode(wrong_encoding, "replace").decode(true_encoding, "replace")
    return common_characters(decoded) > 0.1 * len(decoded)


def common_characters(text: str) -> int:
    """Return the number of frequent Chinese characters, which make up about a quarter of a Chinese text."""
    return len(_COMMON.findall(text))


def _is_mixed(text: str) -> bool:
    """Return True if much of the text mixes four or more scripts of two-byte UTF-8 characters, as no language does."""
    head = text[:20_000]
    characters = _TWO_BYTES.findall(head)
    if len(characters) < max(20, 0.2 * len(head)):
        return False
    num_scripts = 0
    for low, high in pairwise(_SCRIPTS):  # first character of a script, and of the next one
        count = sum(low <= char < high for char in characters)
        if count > 0.05 * len(characters):
            num_scripts += 1
    return num_scripts >= 4


def html_characters(text: str) -> int:
    """Return the number of characters in HTML tags, comments and entities; 0 if there are only a few tags."""
    if "<" not in text and "&" not in text:
        return 0
    sizes = list(map(len, _TAG.findall(text)))
    return sum(sizes) if len(sizes) >= MIN_TAGS else 0


def encoded_characters(text: str) -> int:
    """Return the number of characters in base64 or similar data: long runs of digits and letters of both cases."""
    total = 0
    for run in _ENCODED.findall(text):
        if any(map(str.isdigit, run)) and any(map(str.isupper, run)) and any(map(str.islower, run)):
            total += len(run)
    return total


def url_characters(text: str) -> int:
    """Return the number of characters in lines that consist mostly of URLs."""
    if "://" not in text and "www." not in text:
        return 0
    total = 0
    for line in text.split("\n"):
        in_urls = sum(map(len, _URL.findall(line)))
        if in_urls > 0.8 * len(line):
            total += len(line)
    return total


def collapse_phrases(line: str) -> str:
    """Reduce each phrase that occurs ten or more times in a row to one copy; return the line."""
    kept = ""
    done = 0
    for place in range(0, len(line) - PROBE, PROBE):
        # Do the 8 characters at `place` occur again, 2 to 200 characters later? A phrase has 2 to 200 characters, so
        # for most lines this search rules out a repetition without a call of a Python function.
        if line.find(line[place : place + PROBE], place + 2, place + LONGEST_PHRASE + PROBE) < 0:
            continue
        # The regular expression is slow, so it is tried only where such a row may begin. That may be up to 8 characters
        # before `place`, as only every eighth place is examined.
        start = max(place - PROBE, done)
        while start <= place and _may_repeat(line, place):
            match = _REPEATED_PHRASE.match(line, start)
            if match is None:
                start += 1
                continue
            # A phrase without letters, such as a horizontal rule, stays repeated.
            copies = match[1] if _has_letters(match[1]) else match[0]
            kept += line[done:start] + copies
            done = match.end()
            start = done
    return kept + line[done:]


def _may_repeat(line: str, place: int) -> bool:
    """Return False if `place` is not among the first PROBE places of ten copies of a phrase that has letters.

    Ten copies of n characters are 10 n characters. From such a place on, the next 9 n - PROBE + 1 characters equal
    those that are n characters later.
    """
    probe = line[place : place + PROBE]
    end = place + LONGEST_PHRASE + PROBE
    copy = line.find(probe, place + 2, end)
    while copy >= 0 and _has_letters(line[place:end]):
        # The phrase has n = copy - place characters.
        size = (MIN_REPEATS - 1) * (copy - place) - PROBE + 1
        if line[place : place + size] == line[copy : copy + size] and _has_letters(line[place:copy]):
            return True
        copy = line.find(probe, copy + 1, end)
    return False


def _has_letters(text: str) -> bool:
    return any(map(str.isalpha, text))


def looks_like_code(lines: Sequence[str]) -> bool:
    """Return True if more than a third of the lines begin or end like lines of code."""
    nonblank = [line for line in lines if line.strip()]
    code_lines = sum(line.startswith(_CODE_START) or line.endswith(_CODE_END) for line in nonblank)
    return 3 * code_lines > len(nonblank)


def collapse_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines, with three or more equal consecutive lines reduced to one; blank lines stay."""
    for line, group in groupby(lines):
        equal_lines = list(group)
        if len(equal_lines) < 3 or not line.strip():
            yield from equal_lines
        else:
            yield line
