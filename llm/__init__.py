"""What is known of a model: its files, its conversion, its tokenizer. Never needs torch or vLLM to import."""
