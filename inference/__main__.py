"""The commands of this package: python -m inference."""

COMMANDS = """\
python -m inference.export MODEL                 write a faster int8 artefact beside a model
python -m inference.serve --help                 serve a model over HTTP
python -m inference.predict --model MODEL TEXT   classify from the terminal
"""

print(COMMANDS, end="")
