"""Everything that looks at text: chat templates, prompts, streaming detokenisation, stop strings."""
