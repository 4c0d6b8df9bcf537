"""What is learned from? Images, text and synthetic batches."""
