"""Composed scenes with exact mattes, from folders of cut-outs and backgrounds."""
