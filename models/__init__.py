"""model.py is Llama; each file here says how another model differs from it."""
