"""From text to the batches of each step: documents, tokenizer, store on disk, windows, loaders."""
