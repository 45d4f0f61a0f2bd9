"""The zoo: every architecture of transformers that can be built small, and classic models."""
