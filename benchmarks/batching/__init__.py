"""How the speed of one engine depends on how its texts are grouped."""
