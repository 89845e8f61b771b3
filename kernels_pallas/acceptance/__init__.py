"""Acceptance of drafts and the draw of the next token; nothing of the vocabulary's size is written."""
