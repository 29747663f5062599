"""The attention implementation "ring" for transformers models."""
