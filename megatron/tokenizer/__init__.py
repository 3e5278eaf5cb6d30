"""Text to ids and back, without loss."""

from .base import Tokenizer, TokenizerError, load_tokenizer

__all__ = ["Tokenizer", "TokenizerError", "load_tokenizer"]
