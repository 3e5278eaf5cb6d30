"""What a trained model is asked: to write, to score a text, to answer a benchmark."""
