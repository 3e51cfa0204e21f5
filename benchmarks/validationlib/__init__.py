"""Published measurements held against the prediction: docs/reference/validation.md."""
