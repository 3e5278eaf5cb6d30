"""Messages of a conversation, as records have them and as chat templates get them."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .document_text import check_surrogates, texts_in

ROLES = ("system", "user", "assistant")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # names of one field, as for transformers


class Message(NamedTuple):
    """One turn of a conversation.

    role: who speaks, one of `ROLES`. content: the text of the turn. entry: the turn in its record, which may have
    further keys, such as tool_calls; {} for a turn with role and content only.
    """

    role: str
    content: str
    entry: Mapping[str, Any] = {}

    @property
    def further(self) -> dict[str, Any]:
        """Keys of the turn besides `role` and `content`, with their values."""
        return {key: value for key, value in self.entry.items() if key not in ("role", "content")}

    def as_dict(self) -> dict[str, Any]:
        """Return the turn as an object with all its keys, in the order of its record."""
        return {**self.entry, "role": self.role, "content": self.content}

    def for_template(self) -> dict[str, Any]:
        """Return the turn as templates of transformers get it, with its reasoning under both names that they use."""
        # Templates handle a missing key, but may write "None" for a null value.
        entry = {key: value for key, value in self.as_dict().items() if value is not None}
        # The first of REASONING_KEYS that the turn has gives both names their value: {"reasoning": "a"} also gets
        # `thinking` and `reasoning_content` with "a". But {"reasoning_content": "a", "thinking": "b"} remains as it is,
        # because the `thinking` in ** replaces the one before it.
        for key in REASONING_KEYS:
            if key in entry:
                entry = {"thinking": entry[key], **entry, "reasoning_content": entry[key]}
                break
        return entry


def refuse_unrendered(entry: Mapping[str, Any], template: str) -> None:
    """Raise ValueError for a key that the source `template` does not name, unless its value is null or empty.

    template: "" for a template that renders no keys besides role and content.
    """
    for key, value in entry.items():
        if value in (None, "", [], {}):
            continue
        names = re.escape(key)
        if key in REASONING_KEYS:  # a message has its reasoning under several of these names; see `for_template`
            names = "|".join(REASONING_KEYS)
        if not re.search(rf"(?<!\w)({names})(?!\w)", template):  # as a whole word
            raise ValueError(
                f"{key!r} is not rendered: remove this key or write it into a message"
                f"{', or set another --chat-template' if template else ''}"
            )


def parse_messages(turns: object) -> tuple[Message, ...]:
    """Convert a list of `{"role", "content"}` to messages. Raises ValueError for anything else."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("'messages' is not a list of objects with 'role' and 'content'")
    messages = []
    for turn in turns:
        # Message.as_dict() gives these two keys in this order anyway, so a plain turn needs no entry.
        is_plain = list(turn) == ["role", "content"]
        # A missing role or content becomes "", which the checks below refuse.
        message = Message(turn.get("role", ""), turn.get("content", ""), {} if is_plain else turn)
        if message.role not in ROLES:
            raise ValueError(f"the role {message.role!r} is not one of {', '.join(ROLES)}")
        if not isinstance(message.content, str) or not message.content:
            raise ValueError(f"the content of a message with the role {message.role} is empty or no text")
        for text in texts_in([message.content, message.further]):
            check_surrogates(text)
        messages.append(message)
    return tuple(messages)
