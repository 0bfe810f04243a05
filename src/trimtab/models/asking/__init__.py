"""What Transformers says of its own models: the side that needs torch, loaded in a child process by `trimtab.ask`."""
