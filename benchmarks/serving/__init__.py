"""The serving benchmark's rooms: model, servers, load, machine limit, page."""
