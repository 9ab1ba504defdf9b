"""What an operator graph says: kinds of blocks, kept bytes, peaks, tables, words."""
