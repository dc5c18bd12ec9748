"""How a decoder is trained on many devices: one file per axis, plain functions on plain modules."""
