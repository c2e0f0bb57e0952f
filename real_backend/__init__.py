"""Backends that run the real connector: vLLM's own code over a stand-in or a real `mori.io`.

Importing this package imports neither torch nor vLLM, so that a laptop without them still starts in milliseconds.
"""
