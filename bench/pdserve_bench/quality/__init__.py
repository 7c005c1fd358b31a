"""How much quality a configuration costs: perplexity and greedy agreement with fp32 on fixed texts. Times nothing."""
