"""Commands that compile programs and read them: `overlap` and `bytes`."""
