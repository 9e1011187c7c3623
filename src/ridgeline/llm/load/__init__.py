"""Reading models: weights, vocabulary and chat template from files that are never trusted.

    load_model("folder/" | "model.gguf" | "stories.bin" | "llama-3-8b:random" | "builtin") ──> Loaded
      prompt      loaded.tokenizer.encode(text) ──> ids          StreamDecoder(loaded.tokenizer).push(id) ──> text
      messages    chat_ids(loaded, messages) ──> ids             render_chat(loaded, messages) ──> text, control tokens spelled out

Give chat_ids to the engine: a text of render_chat must be encoded with special=True, add_bos=False, and then a user who spells a
control token in a message would be taken at his word.
"""

from .chat import chat_ids, render_chat
from .loaded import Loaded
from .open import load_model
from .tokens import StreamDecoder, TextTokenizer, byte_tokenizer

__all__ = ["Loaded", "StreamDecoder", "TextTokenizer", "byte_tokenizer", "chat_ids", "load_model", "render_chat"]
