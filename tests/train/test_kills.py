"""Exact resume: a run killed at random moments ends with the files of an uninterrupted run, bit for bit."""

from __future__ import annotations

from tests.train.kills import check_same, killed_run, usual_seconds


def test_a_run_killed_25_times_ends_with_the_same_bits(parent, tmp_path):
    usual_s = usual_seconds(parent, tmp_path)
    killed_run(parent, tmp_path, "killed", 25, seed=3, usual_s=usual_s)
    check_same(tmp_path, "killed")
