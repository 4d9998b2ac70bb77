"""What a server counts about the texts it classifies, and what people correct."""
