"""What a server counts about the texts that it answers, and what follows from these counts."""
