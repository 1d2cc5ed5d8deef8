"""Integrations: Pilotage's rollouts inside other people's trainers.

An integration speaks its host's interface in plain dictionaries and Protocols, so that it is imported, read
and tested without the host. It chooses concrete classes as a recipe does; nothing in Pilotage imports it.
"""
