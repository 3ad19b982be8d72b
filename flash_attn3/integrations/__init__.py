"""Bindings of this package to other libraries; nothing here is imported by flash_attn3 itself."""
