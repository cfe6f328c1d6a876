"""Vision towers: pixels of an image in, embeddings of its tokens out."""
