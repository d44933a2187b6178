"""What the Triton kernels of all codecs share."""
