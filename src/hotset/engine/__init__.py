"""From requests to steps and from logits to events. The engine knows token ids only; text is a protocol (text.py)."""
