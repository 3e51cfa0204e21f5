"""Text to tokens and tokens to text: tokenizers, chat templates, streams. No HTTP, no model."""
