"""Gemini: train models too big or too slow for one device without touching their code."""
