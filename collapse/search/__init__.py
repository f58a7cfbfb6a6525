"""Tries out smaller models in memory: narrower and shorter ones, refitted to the source on calibration text."""
