"""Reading what a model said: its reasoning, its text and its calls, in the syntaxes of the model families."""
