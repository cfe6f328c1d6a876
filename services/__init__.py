"""The processes around the engine: gateway, tokenizer, engine loop, detokenizer, supervisor, command line."""
