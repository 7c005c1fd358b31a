"""Two servers of one model side by side: their OpenAI APIs, on the same cores, in turns within one run."""
