"""The packaged demo model: its weights and tokenizer, and the problems it was trained on."""
