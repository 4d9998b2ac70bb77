"""Export: from the reference model to an artefact that serves without PyTorch, measured before it
is written.
"""
