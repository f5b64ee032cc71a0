"""The SGLang server: checked, started, watched, asked for prefills, and its dumps read."""
