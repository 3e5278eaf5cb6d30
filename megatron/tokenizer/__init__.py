"""Tokenizers, which convert text to token ids and back."""

from .base import Tokenizer, TokenizerError
from .load import load_tokenizer
from .sentinels import SentinelTokenizer

__all__ = ["SentinelTokenizer", "Tokenizer", "TokenizerError", "load_tokenizer"]
