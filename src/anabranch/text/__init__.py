"""Text on both sides of the model: tokenizer, chat template, detokenizer, stop strings.

Never imports torch and never speaks to the engine: token ids in, token ids out.
"""
