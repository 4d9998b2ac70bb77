"""Export: from the reference model to an artefact that serves without PyTorch."""
