"""The op benchmark's cases without a GPU: every file has some, names are unique, and the byte
counts are plausible.
"""

from dsv4.bench.ops import all_cases


def test_the_main_ops_have_cases() -> None:
    ops = {case.op for case in all_cases("")}
    assert {
        "linear",
        "moe",
        "sparse_attention",
        "index_select",
        "prepare_attention",
        "hc_seam",
        "sample_token",
    } <= ops, ops


def test_names_are_unique_and_counts_positive() -> None:
    cases = list(all_cases(""))
    assert len({(case.op, case.name) for case in cases}) == len(cases)
    assert all(case.nbytes > 0 and case.flops >= 0 and case.resident_bytes > 0 for case in cases)
