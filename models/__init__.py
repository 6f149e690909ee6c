"""One model a file: what differs from Llama, which model.py is."""
